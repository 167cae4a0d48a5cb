"""The contents of `approved/`, classified by file names alone.

Spec: docs/spec/stage2.md#inputs, docs/spec/stage2.md#image-id, docs/spec/stage2.md#caption-sources
"""

import errno
import os
import sys
import tracemalloc

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from imagemill.domain.embedding_specs import T5
from imagemill.domain.ids import image_id_of
from imagemill.domain.inputs import NEW_INPUTS, OLD_INPUTS, InputSettings, normalise_caption
from imagemill.errors import MissingInput
from imagemill.fs.fingerprints import FileSignature
from imagemill.inputs import listing, sidecars
from imagemill.inputs.listing import FILE, Entry
from imagemill.inputs.scan import ListedFolder, ListingAhead, classify, list_approved, scan_approved
from imagemill.inputs.sidecars import MAX_CAPTION_BYTES
from imagemill.inputs.survey import survey
from imagemill.parts import IMAGES_TOGETHER
from imagemill.pipeline.problem_list import current_problems
from imagemill.pipeline.stage2.image_metadata import note_missing_captions
from imagemill.store.ledger import Ledger
from tests.helpers.stage2 import embed, photos, plan_of


def touch(folder, *names):
    for name in names:
        (folder / name).write_bytes(b"x")


def reasons(scan):
    return {problem.item: problem.reason for problem in scan.problems}


def test_images_are_listed_in_name_order_for_any_case_of_the_extension(tmp_path):
    touch(tmp_path, "c.JPG", "a.png", "b.WebP", "d.jpeg", ".hidden.jpg")

    scan = scan_approved(tmp_path)

    assert list(scan.sources) == ["a", "b", "c", "d"]
    assert scan.problems == []


CHANGED = {
    "another image": lambda folder: touch(folder, "b.jpg"),
    "another name": lambda folder: (folder / "a.txt").rename(folder / "b.txt"),
    "other bytes": lambda folder: (folder / "a.txt").write_bytes(b"xy"),
    "another time": lambda folder: os.utime(folder / "a.jpg", (1, 1)),
    "an ignored file": lambda folder: touch(folder, ".ignored"),
    "a table of captions": lambda folder: touch(folder, "metadata.jsonl"),
    "a broken link": lambda folder: (folder / "c.jpg").symlink_to("nowhere"),
    "a folder": lambda folder: (folder / "d").mkdir(),
    "an image in a folder": lambda folder: touch(folder / "d", "a.jpg"),
}


@pytest.mark.parametrize("recursive", [False, True])
def test_digest_of_a_listing_changes_with_every_entry_and_setting(tmp_path, recursive):
    inputs = InputSettings(recursive=recursive)
    touch(tmp_path, "a.jpg", "a.txt")
    digests = [list_approved(tmp_path, inputs).digest]
    assert list_approved(tmp_path, inputs).digest == digests[0]

    for change, make in CHANGED.items():
        make(tmp_path)
        digests.append(list_approved(tmp_path, inputs).digest)
        # An empty folder is entered, and has no entry.
        assert digests[-1] not in digests[:-1] or (recursive and change == "a folder"), change
    assert list_approved(tmp_path, InputSettings(recursive=not recursive)).digest not in digests


def test_two_files_with_one_stem_are_both_refused(tmp_path):
    """Neither is processed, and both are reported. Spec: docs/spec/stage2.md#image-id"""
    touch(tmp_path, "a.jpg", "a.png", "b.jpg")

    scan = scan_approved(tmp_path)

    assert list(scan.sources) == ["b"]
    assert reasons(scan) == {"a.jpg": "id_collision", "a.png": "id_collision"}
    assert scan.seen == 3


@pytest.mark.parametrize(
    ("names", "remedy"),
    [(("a.jpg", "a.png"), "rename one of them"), (("a.jpg", "a.png", "a.webp"), "rename all but one of them")],
)
def test_remedy_of_a_collision_keeps_one_file_with_the_id(tmp_path, names, remedy):
    touch(tmp_path, *names)

    problems = scan_approved(tmp_path).problems

    assert [problem.remedy for problem in problems] == [
        f"{remedy}, or leave it out with inputs.exclude in imagemill.yaml: the id is the name without extension"
    ] * len(names)


def test_remedy_for_an_inaccessible_entry_is_not_its_removal(tmp_path):
    """The file may be valid, for example on a network folder without permission."""

    class Entry:
        name, path = "a.jpg", str(tmp_path / "a.jpg")

        def is_file(self):
            raise PermissionError(errno.EACCES, "Permission denied")

    (problem,) = classify([listing._entry("a.jpg", Entry(), None)]).problems

    assert (problem.reason, problem.detail) == ("not_a_file", "cannot be looked up: Permission denied")
    assert problem.remedy == "make it readable, or move it elsewhere"


def test_every_other_entry_has_a_row(tmp_path):
    """Nothing is lost silently, including sidecars without an image."""
    touch(tmp_path, "a.psd", "lonely.txt", "ok.jpg", "ok.txt")
    (tmp_path / "gone.jpg").symlink_to(tmp_path / "nothing")

    assert reasons(scan_approved(tmp_path)) == {
        "a.psd": "unsupported_type",
        "gone.jpg": "not_a_file",
        "lonely.txt": "orphan_caption",
    }


def test_symlink_to_an_image_is_accepted(tmp_path):
    real = tmp_path / "elsewhere" / "x.jpg"
    real.parent.mkdir()
    real.write_bytes(b"x")
    approved = tmp_path / "approved"
    approved.mkdir()
    (approved / "linked.jpg").symlink_to(real)

    assert list(scan_approved(approved).sources) == ["linked"]


def test_name_with_control_characters_or_invalid_bytes_is_refused_and_recorded(tmp_path):
    touch(tmp_path, "a\nb.jpg")
    os.close(os.open(os.fsencode(tmp_path) + b"/\xff.jpg", os.O_CREAT))

    with Ledger(tmp_path / "state" / "ledger.sqlite") as ledger:
        scan = survey(tmp_path, ledger)
        assert [problem.reason for problem in scan.problems if problem.item.endswith(".jpg")] == ["bad_id", "bad_id"]
        assert len(ledger.problems()) == len(scan.problems)


def test_error_of_a_missing_folder_has_a_remedy(tmp_path):
    with pytest.raises(MissingInput, match="put images there"):
        scan_approved(tmp_path / "nowhere")


@given(st.text())
def test_caption_is_one_line_without_runs_of_spaces(text):
    normal = normalise_caption(text)

    assert normal == normalise_caption(normal)
    assert "\n" not in normal
    assert "  " not in normal
    assert normal.split() == text.split()


def test_sidecar_is_read_once_and_again_when_it_changes(tmp_path):
    """A changed sidecar replaces the caption. Spec: docs/spec/stage2.md#caption-sources"""
    approved = tmp_path / "approved"
    approved.mkdir()
    touch(approved, "a.jpg")
    (approved / "a.txt").write_text("\ufeffA  red\n\nball\n", encoding="utf-8")
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        survey(approved, ledger)
        first = ledger.captions()["a"]
        assert (first.text, first.origin) == ("A red ball", "sidecar")
        ledger.record_masks([("a", first.fingerprint, [1] * 77, False)])

        os.utime(approved / "a.txt", ns=(1, 1))
        survey(approved, ledger)
        assert ledger.captions()["a"].mask == "1" * 77, "same text keeps its mask"

        (approved / "a.txt").write_text("A blue ball")
        survey(approved, ledger)
        assert (ledger.captions()["a"].text, ledger.captions()["a"].mask) == ("A blue ball", None)


def test_sidecar_that_is_not_utf8_is_reported_and_not_used(tmp_path):
    approved = tmp_path / "approved"
    approved.mkdir()
    touch(approved, "a.jpg")
    (approved / "a.txt").write_bytes(b"caf\xe9")
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        survey(approved, ledger)

        assert ledger.captions() == {}
        assert [(p.item, p.reason) for p in ledger.problems()] == [("a", "bad_caption")]


@pytest.mark.parametrize(
    ("content", "reason", "remedy"),
    [
        (
            b"caf\xe9",
            "bad_caption",
            "save the caption as UTF-8, or name its encoding as captions.encoding in imagemill.yaml",
        ),
        (b"x" * (MAX_CAPTION_BYTES + 1), "caption_too_long", "write one line of text"),
    ],
    ids=["not UTF-8", "too long"],
)
def test_unusable_sidecar_is_the_only_row_of_its_image(data_root, content, reason, remedy):
    """Each input has one row with the true reason: the caption is not blank.

    Spec: docs/spec/conventions.md#completion-and-identity
    """
    photos(data_root, "a", captions=False)
    (data_root.approved / "a.txt").write_bytes(content)

    embed(data_root)
    with Ledger(data_root.ledger) as ledger:
        note_missing_captions(survey(data_root.approved, ledger), ledger)
        problems = current_problems(scan_approved(data_root.approved), ledger)

    assert [(p.item, p.outcome, p.reason, p.remedy) for p in problems] == [("a", "refused", reason, remedy)]
    assert plan_of_captions(data_root).refused == problems


def test_unusable_sidecar_replaces_the_row_of_an_image_that_had_no_caption(data_root):
    photos(data_root, "a", captions=False)
    embed(data_root)
    (data_root.approved / "a.txt").write_bytes(b"caf\xe9")

    with Ledger(data_root.ledger) as ledger:
        problems = current_problems(survey(data_root.approved, ledger), ledger)

    assert [p.reason for p in problems] == ["bad_caption"]


def test_unreadable_sidecar_is_not_reported_as_blank(data_root, monkeypatch):
    photos(data_root, "a")

    def unreadable(folder, path, signature, source, inputs):
        return sidecars._read_error(source, os.path.basename(path), "Input/output error")

    monkeypatch.setattr(sidecars, "_read_file", unreadable)
    embed(data_root)
    with Ledger(data_root.ledger) as ledger:
        note_missing_captions(survey(data_root.approved, ledger), ledger)
        problems = current_problems(scan_approved(data_root.approved), ledger)

    assert [(p.item, p.outcome, p.reason) for p in problems] == [("a", "failed", "read_error")]


def plan_of_captions(root):
    with Ledger(root.ledger) as ledger:
        return plan_of(root, T5, ledger)


@pytest.mark.parametrize(
    ("names", "detail"),
    [
        (["a.jpg"], "a folder below approved/ that contains images"),
        (["a.txt"], "a folder below approved/ that contains captions"),
        (["a.jpg", "a.txt"], "a folder below approved/ that contains images and captions"),
        ([], "a folder below approved/"),
    ],
)
def test_folder_that_is_not_read_is_reported_with_what_it_contains(tmp_path, names, detail):
    (tmp_path / "folder").mkdir()
    touch(tmp_path / "folder", *names)

    (problem,) = scan_approved(tmp_path, InputSettings(recursive=False)).problems

    assert (problem.item, problem.reason, problem.detail) == ("folder", "sub_folder", detail)
    assert "inputs.recursive: true" in problem.remedy


def test_folder_named_like_a_caption_is_reported_where_folders_are_not_read(tmp_path):
    """Without an image it is a folder; with one, the caption cannot be read."""
    (tmp_path / "a.txt").mkdir()
    flat = InputSettings(recursive=False)
    assert reasons(scan_approved(tmp_path, flat)) == {"a.txt": "sub_folder"}

    touch(tmp_path, "a.jpg")
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        survey(tmp_path, ledger, inputs=flat)
        (problem,) = (each for each in ledger.problems() if each.item == "a")

    assert (problem.reason, problem.detail) == ("bad_caption", "a.txt is a folder")
    assert problem.remedy == "rename or move the folder, then write the caption to a file a.txt"


def test_sidecar_of_a_root_of_an_earlier_release_has_the_exact_name(tmp_path):
    """Sidecars have the exact name `{image_id}.txt`. Spec: docs/spec/conventions.md#old-data-roots"""
    touch(tmp_path, "up.jpg", "UP.TXT", "both.jpg", "both.Txt", "both.txt")

    problems = {p.item: (p.reason, p.remedy) for p in scan_approved(tmp_path, OLD_INPUTS).problems}

    assert problems == {
        "UP.TXT": ("caption_extension", "rename it to UP.txt"),
        "both.Txt": ("caption_extension", "remove it: both.txt is read"),
    }


def test_blanked_sidecar_keeps_the_caption_and_is_reported(tmp_path):
    """Reference: docs/decisions/0021."""
    approved = tmp_path / "approved"
    approved.mkdir()
    touch(approved, "a.jpg", "b.jpg")
    (approved / "a.txt").write_text("A red ball")
    (approved / "b.txt").write_text(" \n")
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        survey(approved, ledger)
        assert ledger.problems() == [], "b never had one: the T5 pass calls that missing_caption"

        (approved / "a.txt").write_text("\n")
        survey(approved, ledger)
        assert ledger.captions()["a"].text == "A red ball"
        assert [(p.item, p.reason) for p in ledger.problems()] == [("a", "blank_caption")]

        (approved / "a.txt").write_text("A blue ball")
        survey(approved, ledger)
        assert (ledger.captions()["a"].text, ledger.problems()) == ("A blue ball", [])


def test_symlink_to_itself_is_refused_and_the_scan_continues(tmp_path):
    touch(tmp_path, "a.jpg")
    for name in ("loop.jpg", "a.txt", "folder"):
        (tmp_path / name).symlink_to(name)

    scan = scan_approved(tmp_path)

    assert list(scan.sources) == ["a"]
    assert reasons(scan) == {"a.txt": "not_a_file", "folder": "not_a_file", "loop.jpg": "not_a_file"}
    assert all("leads back to itself" in problem.detail for problem in scan.problems)


@pytest.mark.slow
def test_caption_over_a_mebibyte_is_refused_without_reading_it(tmp_path):
    touch(tmp_path, "a.jpg", "b.jpg")
    with open(tmp_path / "a.txt", "wb") as file:
        file.truncate(1536 * 1024 * 1024)
    (tmp_path / "b.txt").write_bytes(b"x" * MAX_CAPTION_BYTES)

    tracemalloc.start()
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        survey(tmp_path, ledger)
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()

        assert list(ledger.captions()) == ["b"]
        (problem,) = [p for p in ledger.problems() if p.asset == "captions"]
        assert (problem.item, problem.reason, problem.remedy) == ("a", "caption_too_long", "write one line of text")
        assert current_problems(scan_approved(tmp_path), ledger).count(problem) == 1
    assert most < 16 * MAX_CAPTION_BYTES


def test_every_entry_counts_once(tmp_path):
    """Images, captions, companions, ignored entries and problems add up. Spec: docs/spec/stage2.md#inputs"""
    touch(tmp_path, "a.jpg", "a.txt", "a.json", "a-masklabel.png", "a-condlabel.png", "lonely-masklabel.png")
    touch(tmp_path, "b.JPG", "b.caption", "b.npz", "00000.parquet", "00000_stats.json", "Thumbs.db", ".DS_Store")
    touch(tmp_path, "c.jpg", "c.png", "c.txt", "orphan.txt", "data.json", "images.tar.gz", "notes.psd")
    for name in ("__MACOSX", "_latent_cache", "10_cat"):
        (tmp_path / name).mkdir()
        touch(tmp_path / name, "x.jpg")

    scan = scan_approved(tmp_path)

    assert list(scan.sources) == ["10_cat%2Fx", "a", "b", "lonely-masklabel"]
    assert scan.companions == ("a-condlabel.png", "a-masklabel.png")
    assert (len(scan.captions), len(scan.ignored)) == (3, 8)
    assert reasons(scan) == {
        "c.jpg": "id_collision", "c.png": "id_collision", "orphan.txt": "orphan_caption", "data.json": "unsupported_type",
        "images.tar.gz": "archive", "notes.psd": "unsupported_type",
    }  # fmt: skip
    entries = len(list(tmp_path.iterdir()))
    assert sum(map(len, (scan.sources, scan.captions, scan.companions, scan.ignored, scan.problems))) == entries


def test_excluded_names_are_ignored(tmp_path):
    touch(tmp_path, "a.jpg", "IMG_1.HEIC", "IMG_1.JPG")

    scan = scan_approved(tmp_path, InputSettings(exclude=("*.HEIC",)))

    assert (list(scan.sources), scan.problems, len(scan.ignored)) == (["IMG_1", "a"], [], 1)


def test_masks_of_a_root_of_an_earlier_release_stay_images(tmp_path):
    """Spec: docs/spec/conventions.md#old-data-roots"""
    touch(tmp_path, "a.jpg", "a-masklabel.png")

    assert list(scan_approved(tmp_path, OLD_INPUTS).sources) == ["a-masklabel", "a"]


@pytest.mark.parametrize(
    "inputs",
    [
        NEW_INPUTS,
        OLD_INPUTS,
        msgspec.structs.replace(NEW_INPUTS, exclude=("b/*",), share="1/2", metadata="rows.csv", formats=("png",)),
    ],
)
def test_listing_in_another_process_is_that_of_this_one(tmp_path, inputs):
    approved, own = tmp_path / "approved", tmp_path / "derived"
    for name in (
        "a.png",
        "a.txt",
        "b/c.jpg",
        "d e/f.webp",
        "rows.csv",
        ".hidden",
        "bell\a.png",
        "a.png\x01",
        "a.png\n",
    ):
        (approved / name).parent.mkdir(parents=True, exist_ok=True)
        (approved / name).write_text(name)
    own.mkdir()
    (approved / "linked").symlink_to(own)

    here = list_approved(approved, inputs, [own])
    with ListingAhead(approved, inputs, [own]) as ahead:
        assert ahead.digest() == here.digest
    with ListingAhead(approved, inputs, [own]) as ahead:
        ahead.digest()
        assert ahead.listed().scan == here.scan


def test_entries_of_another_process_arrive_in_parts(tmp_path):
    for number in range(IMAGES_TOGETHER + 1):
        (tmp_path / f"{number:05d}.jpg").touch()

    with ListingAhead(tmp_path, NEW_INPUTS, []) as ahead:
        ahead.digest()
        assert list(ahead.listed().scan.sources) == list(list_approved(tmp_path).scan.sources)


def test_listing_in_another_process_raises_for_a_missing_folder(tmp_path):
    with (
        ListingAhead(tmp_path / "approved", NEW_INPUTS, []) as ahead,
        pytest.raises(MissingInput, match="no folder of approved images"),
    ):
        ahead.digest()


def test_process_that_lists_ahead_may_die(tmp_path):
    (tmp_path / "a.png").write_bytes(b"")
    with ListingAhead(tmp_path, NEW_INPUTS, []) as ahead:
        ahead._process.kill()
        assert ahead.digest() == list_approved(tmp_path).digest
        assert ahead.listed().scan == list_approved(tmp_path).scan
    with ListingAhead(tmp_path, NEW_INPUTS, []) as ahead:
        ahead.digest()
        ahead._process.kill()
        assert ahead.listed().scan == list_approved(tmp_path).scan
    with ListingAhead(tmp_path, NEW_INPUTS, []) as ahead:
        pass
    assert ahead._process.returncode is not None


def test_list_of_a_folder_needs_little_more_memory_than_its_entries(tmp_path):
    """Not the results of looking up its files, which take three times as much."""
    for number in range(1000):
        (tmp_path / f"photo{number:04d}.jpg").touch()
    tracemalloc.start()
    try:
        entries = listing.list_entries(tmp_path, NEW_INPUTS)
        kept, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert len(entries) == 1000
    assert most < 1.5 * kept


@pytest.mark.parametrize("folder", ["", "sub/"])
def test_entries_need_little_more_memory_while_they_are_classified(folder):
    """Each is let go as soon as its image is packed: docs/decisions/0168-memory-of-a-run.md."""
    stems = [f"photo{number:06d}" for number in range(10_000)]
    ids = [sys.intern(image_id_of(f"{folder}{stem}.jpg")) for stem in stems]  # Python's table of such texts grows now
    tracemalloc.start()
    try:
        names = (f"{folder}{stem}.{suffix}" for stem in stems for suffix in ("jpg", "txt"))
        entries = [
            Entry(name, FILE, FileSignature(f"posix:{1000 + n}:{10**18 + n}:{10**6 + n}"), 10**18 + n)
            for n, name in enumerate(names)
        ]
        listed = tracemalloc.get_traced_memory()[0]
        folder_of_entries = ListedFolder(entries, NEW_INPUTS)
        del entries
        scan = folder_of_entries.scan
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()

    assert list(scan.sources) == ids
    assert peak <= 1.8 * listed
