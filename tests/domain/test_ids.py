"""Image ids: derivation from file names, and conversion to tar member names and back."""

import re
from pathlib import PurePath

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from imagemill.domain.ids import id_of_member_key, id_problem, image_id_of, member_key, suffix_of

# WebDataset's own rule for splitting a member name into key and suffix (tariterators.base_plus_ext).
WEBDATASET_SPLIT = re.compile(r"^((?:.*/|)[^.]+)[.]([^/]*)$", re.DOTALL)


@pytest.mark.parametrize(
    ("file_name", "image_id"),
    [
        ("abc123xyz.jpg", "abc123xyz"),
        ("a.b.png", "a.b"),
        ("Photo 1.JPEG", "Photo 1"),
        ("äöü 漢字.webp", "äöü 漢字"),
        ("no_extension", "no_extension"),
    ],
)
def test_image_id_is_the_stem_of_the_file_name(file_name, image_id):
    """Spec: docs/spec/stage2.md#image-id"""
    assert image_id_of(file_name) == image_id


@pytest.mark.parametrize(
    ("image_id", "key"),
    [("abc123", "abc123"), ("a.b", "a%2Eb"), ("100%", "100%25"), ("%2E", "%252E"), ("..", "%2E%2E")],
)
def test_member_key_encodes_dots_and_percent_signs_only(image_id, key):
    """Spec: docs/spec/shards.md#members"""
    assert member_key(image_id) == key


@given(st.text())
@example("%2E.%25%")
def test_member_key_comes_back_as_the_id(image_id):
    """The record contains the id itself; the key must map back to it."""
    assert id_of_member_key(member_key(image_id)) == image_id


@given(st.text(st.characters(exclude_categories=["Cc", "Cs"], exclude_characters="/\\"), min_size=1))
def test_webdataset_splits_a_member_name_where_the_key_ends(image_id):
    """A key ends at the first dot, so it contains none. Spec: docs/spec/shards.md#updating-a-set"""
    match = WEBDATASET_SPLIT.match(f"{member_key(image_id)}.t5h.npy")
    assert match
    assert match.groups() == (member_key(image_id), "t5h.npy")


@pytest.mark.parametrize("image_id", ["abc123xyz", "a.b", "äöü 漢字", "%2E", "-rf", "👩‍🚀", "..."])
def test_usual_id_has_no_problem(image_id):
    """Only separators, control characters, `.` and `..` are refused."""
    assert id_problem(image_id) is None


@pytest.mark.parametrize(
    ("image_id", "problem"),
    [
        ("", "not a non-empty string"),
        (None, "not a non-empty string"),
        (7, "not a non-empty string"),
        ("../etc/passwd", "contains a path separator"),
        ("a\\b", "contains a path separator"),
        (".", "is a relative path"),
        ("..", "is a relative path"),
        ("a\nb", "contains a control character"),
        ("a\x00b", "contains a control character"),
        ("a\x7fb", "contains a control character"),
        ("a\udcffb", "contains a control character"),
    ],
)
def test_id_that_could_leave_the_folder_or_break_a_name_is_refused(image_id, problem):
    """Spec: docs/spec/shards.md#names"""
    assert id_problem(image_id) == problem


@given(st.text(alphabet="a.bé%", min_size=1, max_size=8).filter(lambda name: name not in (".", "..")))
def test_suffix_and_stem_are_those_of_pathlib(name):
    assert (image_id_of(name), suffix_of(name)) == (PurePath(name).stem, PurePath(name).suffix)
