"""Pairing of new images with those that are gone.

Spec: docs/spec/stage2.md#renames
"""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from imagemill.domain.ids import image_id_of
from imagemill.fs.fingerprints import FileSignature
from imagemill.pipeline.stage2.renames import find_renames, note_arrivals, pair_renames
from imagemill.store.ledger import Ledger, SourceRow
from tests.helpers.stage2 import embed, photos, surveyed


def image(path, content="1"):
    return SourceRow(image_id_of(path), path, FileSignature(f"posix:1:1:{len(path)}"), content, 8, 8)


def paired(gone, new):
    found = pair_renames([image(path) for path in gone], [image(path) for path in new])
    return {former.file_name: now.file_name for former, now in found.pairs}


def test_equal_file_names_are_paired_first():
    """An image that was moved keeps its name."""
    assert paired(["a/x.jpg", "a/y.jpg"], ["b/y.jpg", "0/x.jpg"]) == {"a/x.jpg": "0/x.jpg", "a/y.jpg": "b/y.jpg"}


def test_the_rest_is_paired_in_name_order():
    assert paired(["b.jpg", "x.jpg", "a.jpg"], ["d/2.jpg", "d/1.jpg", "d/x.jpg"]) == {
        "x.jpg": "d/x.jpg",
        "a.jpg": "d/1.jpg",
        "b.jpg": "d/2.jpg",
    }


def test_several_images_of_one_file_name_are_paired_in_name_order():
    assert paired(["a/x.jpg", "b/x.jpg"], ["d/x.jpg", "c/x.jpg"]) == {"a/x.jpg": "c/x.jpg", "b/x.jpg": "d/x.jpg"}


def test_different_numbers_are_not_paired():
    found = pair_renames([image("a.jpg"), image("b.jpg")], [image("c.jpg")])

    assert found.pairs == ()
    assert [(row.file_name, [each.file_name for each in new]) for row, new in found.unpaired] == [
        ("a.jpg", ["c.jpg"]),
        ("b.jpg", ["c.jpg"]),
    ]


def test_images_of_other_bytes_are_not_paired():
    assert pair_renames([image("a.jpg", "1")], [image("b/a.jpg", "2")]) == pair_renames([], [])


PATHS = st.lists(
    st.tuples(st.sampled_from(["", "a/", "b/", "b/c/"]), st.sampled_from("xyz")).map(
        lambda parts: f"{''.join(parts)}.png"
    ),
    unique=True,
)
CONTENTS = st.lists(st.sampled_from("12"), min_size=12, max_size=12)


@given(PATHS, PATHS, CONTENTS, st.randoms())
def test_pairs_have_equal_bytes_and_each_image_is_in_at_most_one(gone, new, contents, random):
    lost = [image(path, content) for path, content in zip(gone, contents, strict=False)]
    found = [image(path, content) for path, content in zip(new, reversed(contents), strict=False) if path not in gone]
    pairing = pair_renames(lost, found)

    for former, now in pairing.pairs:
        assert former.fingerprint == now.fingerprint
        assert former in lost
        assert now in found
    used = Counter(row.image_id for pair in pairing.pairs for row in pair)
    assert set(used.values()) <= {1}
    # An image that is neither paired nor unpaired has no equal image left on the other side.
    paired_ids = set(used)
    unpaired = {row.image_id for row, _ in pairing.unpaired}
    left = [row for row in found if row.image_id not in paired_ids]
    for row in lost:
        if row.image_id not in paired_ids | unpaired:
            assert row.fingerprint not in {other.fingerprint for other in left}
    # The result does not depend on the order of the listings.
    random.shuffle(lost)
    random.shuffle(found)
    assert pair_renames(lost, found) == pairing


@given(st.lists(st.integers(0, 3), min_size=1, max_size=12), st.sampled_from(["d/", "d/e/"]))
def test_every_image_moved_into_one_folder_is_paired_with_itself(contents, folder):
    """File names decide, regardless of which images are equal."""
    gone = [image(f"{n:02}.png", str(content)) for n, content in enumerate(contents)]
    new = [image(f"{folder}{row.file_name}", row.fingerprint) for row in gone]

    pairing = pair_renames(gone, new)

    assert [(former.file_name, now.file_name) for former, now in pairing.pairs] == [
        (row.file_name, f"{folder}{row.file_name}") for row in gone
    ]
    back = pair_renames(new, gone)
    assert [(now, former) for former, now in back.pairs] == list(pairing.pairs)


# ---- what counts as new


def renames(root):
    with Ledger(root.ledger) as ledger:
        scan = surveyed(root, ledger).scan
        return [(former.image_id, now.image_id) for former, now in find_renames(scan, ledger).pairs]


def test_image_that_appears_while_an_equal_one_is_gone_is_renamed(data_root):
    photos(data_root, "a")
    embed(data_root)
    (data_root.approved / "a.png").rename(data_root.approved / "b.png")
    embed(data_root)

    assert renames(data_root) == [("a", "b")]


def test_deletion_of_one_of_two_equal_images_is_no_rename(data_root):
    photos(data_root, "a")
    (data_root.approved / "b.png").write_bytes((data_root.approved / "a.png").read_bytes())
    embed(data_root)
    surveyed_once = renames(data_root)
    (data_root.approved / "a.png").unlink()

    assert (surveyed_once, renames(data_root)) == ([], [])


def test_image_that_returns_before_the_rename_was_accepted_is_renamed_back(data_root):
    photos(data_root, "a")
    embed(data_root)
    (data_root.approved / "a.png").rename(data_root.approved / "b.png")
    embed(data_root)
    assert renames(data_root) == [("a", "b")]
    (data_root.approved / "b.png").rename(data_root.approved / "a.png")

    assert renames(data_root) == [("b", "a")]


def test_without_an_arrival_no_image_is_read_from_the_ledger(data_root, monkeypatch):
    photos(data_root, "a", "b")
    embed(data_root)
    (data_root.approved / "a.png").unlink()
    with Ledger(data_root.ledger) as ledger:
        scan = surveyed(data_root, ledger).scan
        monkeypatch.setattr(Ledger, "sources", lambda *_: 1 / 0)
        monkeypatch.setattr(Ledger, "sources_with", lambda *_: 1 / 0)
        note_arrivals(scan, ledger)

        assert find_renames(scan, ledger).pairs == ()
