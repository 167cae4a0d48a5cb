"""Manifests: equal objects give equal bytes, and the error for a broken file contains the remedy."""

import hashlib
import json
import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from imagemill.errors import ImagemillError, MissingInput
from imagemill.formats.manifest import read_json, sha256_file, write_json


def test_document_is_sorted_and_indented_with_one_newline(tmp_path):
    """This form is readable for people and in a diff of two runs."""
    path = tmp_path / "folder" / "manifest.json"
    write_json(path, {"b": [1, 2], "a": {"z": None, "y": "ä"}})
    assert (
        path.read_text("utf-8") == '{\n  "a": {\n    "y": "ä",\n    "z": null\n  },\n  "b": [\n    1,\n    2\n  ]\n}\n'
    )


@given(
    st.dictionaries(
        st.text(st.characters(exclude_categories=["Cs"])),
        st.integers(0, 9) | st.lists(st.booleans(), max_size=2),
        max_size=5,
    )
)
@settings(max_examples=25, deadline=None)
def test_document_comes_back_whatever_order_it_was_given_in(tmp_path_factory, document):
    folder = tmp_path_factory.mktemp("manifest")
    write_json(folder / "one.json", document)
    write_json(folder / "two.json", dict(reversed(document.items())))
    assert (folder / "one.json").read_bytes() == (folder / "two.json").read_bytes()
    assert read_json(folder / "one.json") == document == json.loads((folder / "one.json").read_bytes())


def test_old_document_stands_when_the_new_one_cannot_be_written(tmp_path):
    """Spec: docs/spec/conventions.md#atomic-names"""
    path = tmp_path / "manifest.json"
    write_json(path, {"a": 1})
    with pytest.raises(TypeError):
        write_json(path, {"a": object()})
    assert read_json(path) == {"a": 1}
    assert os.listdir(tmp_path) == ["manifest.json"]


@pytest.mark.parametrize(
    "data",
    [b"", b"{", b"{'a': 1}", b'{"a": NaN}', b"\xff", b'{"a": "\xff"}', b"[" * 100_000],
    ids=lambda data: repr(data[:8]),
)
def test_document_that_is_no_json_says_where_and_what_to_do(tmp_path, data):
    path = tmp_path / "manifest.json"
    path.write_bytes(data)
    with pytest.raises(ImagemillError, match=r"manifest\.json is not valid JSON") as caught:
        read_json(path)
    assert (caught.value.where, bool(caught.value.why), bool(caught.value.do)) == (path, True, True)


def test_missing_document_is_a_missing_input(tmp_path):
    """The same applies if its folder is a file."""
    (tmp_path / "file").touch()
    for path in (tmp_path / "manifest.json", tmp_path / "file" / "manifest.json"):
        with pytest.raises(MissingInput) as caught:
            read_json(path)
        assert caught.value.where == path


@pytest.mark.parametrize("size", [0, 1, 3_000_000])
def test_checksum_is_that_of_the_whole_file(tmp_path, size):
    """It equals the output of `sha256sum`, so that a shard can be checked without imagemill."""
    path = tmp_path / "file"
    data = bytes(range(256)) * (size // 256 + 1)
    path.write_bytes(data[:size])
    assert sha256_file(path) == hashlib.sha256(data[:size]).hexdigest()
    if not size:
        assert sha256_file(path) == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
