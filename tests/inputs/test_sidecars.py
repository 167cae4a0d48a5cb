"""The text of caption files.

Spec: docs/spec/stage2.md#caption-text
"""

import codecs

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from imagemill.domain.inputs import NEW_INPUTS
from imagemill.inputs.scan import scan_approved
from imagemill.inputs.sidecars import is_annotation, read_captions, read_lines
from imagemill.text.encodings import BadEncoding, decode_text

TEXT = "a café by the sea"


@pytest.mark.parametrize(
    "data",
    [
        TEXT.encode(),
        codecs.BOM_UTF8 + TEXT.encode(),
        TEXT.encode("utf-16"),
        codecs.BOM_UTF16_BE + TEXT.encode("utf-16-be"),
        TEXT.encode("utf-16-le"),
        TEXT.encode("utf-16-be"),
    ],
    ids=["UTF-8", "UTF-8 with mark", "UTF-16 LE with mark", "UTF-16 BE with mark", "UTF-16 LE", "UTF-16 BE"],
)
def test_encoding_is_recognised(data):
    assert decode_text(data) == TEXT


def test_other_encodings_are_refused_unless_one_is_named():
    with pytest.raises(BadEncoding, match="is not UTF-8"):
        decode_text(TEXT.encode("latin-1"))
    assert decode_text(TEXT.encode("latin-1"), "latin-1") == TEXT


@pytest.mark.parametrize("data", [b"a\0\0\0b\0\0\0", codecs.BOM_UTF16_LE + b"\x00\xd8", b"\0\0"])
def test_bytes_that_are_no_text_are_refused(data):
    with pytest.raises(BadEncoding):
        decode_text(data, "latin-1")


@given(st.binary(max_size=40), st.sampled_from(["", "latin-1", "shift_jis"]))
def test_any_bytes_are_text_or_refused(data, otherwise):
    try:
        assert isinstance(decode_text(data, otherwise), str)
    except BadEncoding as refused:
        assert str(refused)


def test_lines_are_joined_or_the_first_is_taken_or_each_is_a_caption():
    text = "\n one cat \n\n two\tcats\none  cat\n"

    assert read_lines(text) == (("one cat two cats one cat",), 3)
    assert read_lines(text, "first") == (("one cat",), 3)
    assert read_lines(text, "each") == (("one cat", "two cats"), 3)
    assert read_lines(" \n", "each") == ((), 0)


@pytest.mark.parametrize(
    "text",
    [
        "0 0.5 0.5 0.25 0.25",
        "0 0.5 0.5 0.25 0.25\n12 1 1.0 0 .5\n\n",
        "3 0.1 0.2 0.3 0.4 0.5 0.6",
        "0 1e-05 0.5 0.25 0.25\r\n",
    ],
)
def test_labels_are_recognised(text):
    assert is_annotation(text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "  ",
        "3 cats",
        "0 0.5 0.5 0.25",
        "0 0.5 0.5 0.25 1.5",
        "2 1 0 1 0 cats",
        "0 0.5 0.5 0.25 0.25\na cat",
        "1 2 3 4 5",
    ],
)
def test_other_texts_are_captions(text):
    assert not is_annotation(text)


def read(folder, **changes):
    inputs = msgspec.structs.replace(NEW_INPUTS, **changes)
    rows, problems = read_captions(folder, scan_approved(folder, inputs).sources.values(), {}, inputs)
    return {r.image_id: (r.text, r.lines, r.conflict) for r in rows}, {p.item: p.reason for p in problems}


def test_labels_are_named_and_no_lower_source_takes_their_place(tmp_path):
    for name, text in {"a.jpg": "x", "a.txt": "0 0.5 0.5 0.2 0.2", "a.caption": "a cat"}.items():
        (tmp_path / name).write_text(text)

    assert read(tmp_path) == ({}, {"a": "annotation_not_caption"})


def test_blank_caption_gives_way_and_another_text_is_counted(tmp_path):
    files = {
        "a.jpg": "x", "a.txt": " \n", "a.caption": "a cat",
        "b.jpg": "x", "b.txt": "one\ntwo", "b.caption": "one",
        "c.jpg": "x", "c.txt": "same", "c.caption": "same\n",
    }  # fmt: skip
    for name, text in files.items():
        (tmp_path / name).write_text(text)

    assert read(tmp_path)[0] == {"a": ("a cat", 1, False), "b": ("one two", 2, True), "c": ("same", 1, False)}
    assert read(tmp_path, lines="first")[0]["b"] == ("one", 2, False)
