"""Images in sub-folders: which folders are read, and the ids of their images.

Spec: docs/spec/stage2.md#inputs, docs/spec/stage2.md#image-id
"""

import errno
import os

from hypothesis import example, given, settings
from hypothesis import strategies as st

from imagemill.domain.ids import id_problem, image_id_of, member_key, path_of_id, path_problem, stem_of
from imagemill.domain.inputs import OLD_INPUTS, InputSettings
from imagemill.fs.fingerprints import file_signature
from imagemill.inputs.listing import Entry, list_paths
from imagemill.inputs.scan import classify, scan_approved


def put(folder, *paths):
    for path in paths:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(b"x")


def reasons(scan):
    return {problem.item: problem.reason for problem in scan.problems}


def test_images_of_sub_folders_have_the_path_in_their_ids(tmp_path):
    """The id of `10_dog/a.jpg` is `10_dog%2Fa`. Spec: docs/spec/stage2.md#image-id"""
    put(tmp_path, "10_dog/a.jpg", "10_dog/a.txt", "10_dog/old/a.png", "a-b.jpg", "a.jpg", "50%/a.JPG", "50%/a.caption")

    scan = scan_approved(tmp_path)

    assert {image_id: (each.file_name, each.captions) for image_id, each in scan.sources.items()} == {
        "10_dog%2Fa": ("10_dog/a.jpg", ("10_dog/a.txt",)),
        "10_dog%2Fold%2Fa": ("10_dog/old/a.png", ()),
        "50%25%2Fa": ("50%/a.JPG", ("50%/a.caption",)),
        "a-b": ("a-b.jpg", ()),
        "a": ("a.jpg", ()),
    }
    assert (scan.problems, len(scan.captions)) == ([], 2)
    assert list(scan.sources) == [
        image_id_of(path) for path in sorted(each.file_name for each in scan.sources.values())
    ]


def test_captions_and_companions_belong_to_images_of_their_folder(tmp_path):
    put(tmp_path, "a/x.jpg", "b/x.txt", "b/x-masklabel.png", "A/x.txt")

    scan = scan_approved(tmp_path)

    assert list(scan.sources) == ["a%2Fx", "b%2Fx-masklabel"]
    assert reasons(scan) == {"b/x.txt": "orphan_caption", "A/x.txt": "orphan_caption"}


def test_patterns_apply_to_the_whole_path_and_ignored_folders_count_once(tmp_path):
    put(tmp_path, "drafts/a.jpg", "drafts/b.jpg", "x/.cache/a.jpg", "x/a.jpg", "x/_latent_cache/a.npz")

    scan = scan_approved(tmp_path, InputSettings(exclude=("drafts*",)))

    assert (list(scan.sources), len(scan.ignored)) == (["x%2Fa"], 3)


def test_image_at_the_top_level_may_have_the_id_of_one_in_a_folder(tmp_path):
    """Both are refused, each naming the other's path. Spec: docs/spec/stage2.md#image-id"""
    put(tmp_path, "a%2Fb.jpg", "a/b.png", "a/c.jpg")

    scan = scan_approved(tmp_path)

    assert list(scan.sources) == ["a%2Fc"]
    assert {problem.item: problem.detail for problem in scan.problems} == {
        "a%2Fb.jpg": "the same id as a/b.png",
        "a/b.png": "the same id as a%2Fb.jpg",
    }


def test_root_of_an_earlier_release_does_not_read_folders(tmp_path):
    """Spec: docs/spec/conventions.md#old-data-roots"""
    put(tmp_path, "a.jpg", "b/c.jpg")

    scan = scan_approved(tmp_path, OLD_INPUTS)

    assert (list(scan.sources), reasons(scan)) == (["a"], {"b": "sub_folder"})


# ---- links


def test_every_real_folder_is_read_once(tmp_path):
    """Real folders come first, then links in order of their names; loops end. Spec: docs/spec/stage2.md#inputs"""
    approved, elsewhere = tmp_path / "approved", tmp_path / "elsewhere"
    put(approved, "z/a.jpg")
    put(elsewhere, "b.jpg", "deep/c.jpg")
    (approved / "a").symlink_to("z")
    (approved / "z" / "up").symlink_to("..")
    (approved / "l1").symlink_to(elsewhere / "deep")
    (approved / "l2").symlink_to(elsewhere)
    (approved / "l3").symlink_to(elsewhere)

    scan = scan_approved(approved)

    assert list(scan.sources) == ["l1%2Fc", "l2%2Fb", "z%2Fa"]
    assert {problem.item: problem.detail for problem in scan.problems} == {
        "a": "a folder that is already read as z",
        "l2/deep": "a folder that is already read as l1",
        "l3": "a folder that is already read as l2",
        "z/up": "a folder that is already read as .",
    }
    assert {problem.reason for problem in scan.problems} == {"sub_folder"}


def test_links_into_the_data_root_are_not_followed(tmp_path):
    approved, derived = tmp_path / "approved", tmp_path / "derived"
    put(approved, "a.jpg")
    put(derived, "report/b.jpg")
    (approved / "inside").symlink_to(derived / "report")
    (approved / "same").symlink_to(derived)
    (approved / "around").symlink_to(tmp_path)

    scan = scan_approved(approved, own=(derived, tmp_path / "shards"))

    assert list(scan.sources) == ["a"]
    assert reasons(scan) == {"inside": "sub_folder", "same": "sub_folder", "around": "sub_folder"}
    assert all(str(derived) in problem.detail for problem in scan.problems)


def test_folder_that_cannot_be_listed_is_a_problem(tmp_path, monkeypatch):
    put(tmp_path, "a.jpg", "b/c.jpg")

    def scandir(at, real=os.scandir):
        if os.fspath(at).endswith("/b"):
            raise PermissionError(errno.EACCES, "Permission denied")
        return real(at)

    monkeypatch.setattr(os, "scandir", scandir)

    scan = scan_approved(tmp_path)

    assert (list(scan.sources), reasons(scan)) == (["a"], {"b": "sub_folder"})
    assert scan.problems[0].remedy == "make it readable, or move it elsewhere"


def test_folders_200_levels_deep_are_read(tmp_path):
    put(tmp_path, "/".join(["d"] * 200) + "/a.jpg")

    scan = scan_approved(tmp_path)

    (image_id,) = scan.sources
    assert scan.problems == []
    assert len(image_id.encode()) == 217
    assert "~" in image_id


def test_path_longer_than_the_system_allows_is_a_problem(tmp_path):
    """A path may have 4,096 bytes. Spec: docs/spec/stage2.md#inputs"""
    here = os.open(tmp_path, os.O_RDONLY)
    for _ in range(20):
        os.mkdir("d" * 250, dir_fd=here)
        inner = os.open("d" * 250, os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = inner
    os.close(here)

    (problem,) = scan_approved(tmp_path).problems

    assert (problem.reason, problem.detail) == ("sub_folder", "a folder that cannot be listed: File name too long")


def test_name_that_is_not_utf8_is_a_problem_in_every_part(tmp_path):
    for path in (b"\xff/a.jpg", b"b/\xff.jpg", b"\xfe" * 200 + b"/" + b"c" * 200 + b".jpg"):
        os.makedirs(os.path.dirname(os.fsencode(tmp_path) + b"/" + path), exist_ok=True)
        os.close(os.open(os.fsencode(tmp_path) + b"/" + path, os.O_CREAT))

    scan = scan_approved(tmp_path)

    assert not scan.sources
    assert [problem.reason for problem in scan.problems] == ["bad_id"] * 3


def test_paths_are_listed_without_looking_up_files(tmp_path):
    """The status compares these with the last run's: an entry that a run would list has the same path."""
    put(tmp_path, "a.jpg", "b/c.jpg", "b/.x/d.jpg", "e/f/g.txt")

    assert sorted(list_paths(tmp_path, InputSettings())) == ["a.jpg", "b/.x", "b/c.jpg", "e/f/g.txt"]


def test_examined_ids_of_a_part_are_those_of_the_whole(tmp_path):
    """A run of some images finds them, their captions and problems in every folder."""
    long = "/".join(["d" * 60] * 4)
    put(tmp_path, "a.jpg", "a.txt", "b/a.jpg", "b/a.caption", "b/a.jpg.txt", "b/B.JPG", "b/b.txt", f"{long}/a.jpg")
    put(tmp_path, "c/d.jpg", "c/d.png", "x%2Fy.jpg", "x/y.jpg")
    whole = scan_approved(tmp_path)

    for image_id in (*whole.sources, "c%2Fd", "x%2Fy"):
        part = scan_approved(tmp_path, only={image_id})
        assert part.sources == whole.of({image_id}).sources
        assert {p.item for p in part.problems} == {p.item for p in whole.of({image_id}).problems}


# ---- ids


PART = st.text(st.characters(blacklist_categories=("Cs", "Cc"), blacklist_characters="/\\"), min_size=1, max_size=80)
SPECIAL = st.sampled_from(["%", "%2F", "%25", "a.b", "é", "é", "~", "x" * 255, "漢" * 85, "%2" * 60, "a%"])
PATHS = st.lists(PART | SPECIAL, min_size=1, max_size=5).map("/".join)


@settings(max_examples=2500)
@given(st.lists(PATHS, min_size=4, max_size=8, unique=True))
@example(["a%2Fb", "a/b"])
def test_ids_decode_are_valid_and_differ(paths):
    """Nested ids without `~` decode to their path; every id is a valid name and key; equal ids are reported.

    Spec: docs/spec/stage2.md#image-id
    """
    files = [f"{path}.jpg" for path in paths]
    by_id = {}
    for path, file in zip(paths, files, strict=True):
        image_id = image_id_of(file)
        by_id.setdefault(image_id, []).append(file)
        if path_problem(file):
            continue
        assert id_problem(image_id) is None
        assert len(f"{image_id}.npy".encode()) <= 255
        assert "." not in member_key(image_id)
        if "/" in path and "~" not in image_id:
            assert path_of_id(image_id) == path == stem_of(file)
        if "/" in path:
            assert len(image_id.encode()) <= 240

    signature = file_signature(os.stat(__file__))
    scan = classify(
        [Entry(file, "file", signature) for file in sorted(files)], InputSettings(exclude=(), companions=False)
    )

    reported = {problem.item for problem in scan.problems}
    used = {source.file_name for source in scan.sources.values()}
    for image_id, of_id in by_id.items():
        assert len(of_id) == 1 or not used.intersection(of_id)
        assert all(file in used or file in reported for file in of_id), image_id
