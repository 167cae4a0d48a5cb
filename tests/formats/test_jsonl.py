"""JSON lines, compared with the standard library's parser in a strict form."""

import itertools
import json
import math
import os
from pathlib import Path
from unittest import mock

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from imagemill.formats import diff_writer, jsonl
from imagemill.formats.jsonl import (
    Line,
    Span,
    SpanReader,
    encode_line,
    encode_sorted,
    parse_line,
    parse_object,
    parse_tolerating,
    read_jsonl,
    read_typed,
    read_typed_spans,
    replace_lines,
    tolerate,
    write_jsonl,
)
from imagemill.fs.fingerprints import file_signature

# Values that survive a round trip through JSON: no NaN, no lone surrogates.
texts = st.text(st.characters(exclude_categories=["Cs"]))
scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | texts
)
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3), max_leaves=8
)
objects = st.dictionaries(texts, values, max_size=5)


def read(folder, data: bytes) -> list[Line]:
    path = folder / "lines.jsonl"
    path.write_bytes(data)
    return list(read_jsonl(path))


# ---- typed reading


class Point(msgspec.Struct):
    x: int
    name: str


POINT = encode_line(Point(1, "é"))


@pytest.mark.parametrize(
    "line",
    [
        b'{"x":1,"x":1,"name":""}\n', b'{"x":1,"name":"","more":2}\n', b'{"name":"","x":1}\n', b'{"x": 1,"name":""}\n',
        b'{"x":1,"name":"\\u0061"}\n', b'{"x":1.0,"name":""}\n', b'{"x":"1","name":""}\n', b'{"x":1}\n', b"\n", b"{\n",
        b"null\n", b"\xff\n", b"[" * 5000 + b"\n", POINT[:-1] + b"\r\n", POINT[:-1] + b" \n", b" " + POINT,
    ],
)  # fmt: skip
@pytest.mark.parametrize("blocks", [0, 2])
def test_line_that_is_not_its_records_encoding_stays_bytes(tmp_path, line, blocks):
    """Its neighbours are still decoded, in the same block and in others."""
    many = blocks * 10_000
    (tmp_path / "x.jsonl").write_bytes(POINT * many + POINT + line + POINT * many + POINT[:-1])

    found = list(read_typed(tmp_path / "x.jsonl", msgspec.json.Decoder(Point)))

    assert found == [Point(1, "é")] * (many + 1) + [line] + [Point(1, "é")] * many + [POINT[:-1]]
    spans = list(read_typed_spans(tmp_path / "x.jsonl", msgspec.json.Decoder(Point)))
    assert [each for _, each in spans] == found
    assert [(span.number, span.offset, span.length) for span, _ in spans] == [
        (line.number, line.offset, len(line.raw)) for line in read_jsonl(tmp_path / "x.jsonl")
    ]


# ---- reading


@pytest.mark.parametrize(
    ("raw", "problem"),
    [
        (b"", "blank"),
        (b" \t ", "blank"),
        (b"null", "null"),
        (b"[]", "a list"),
        (b'["a"]', "a list"),
        (b"7", "a number"),
        (b"-1.5e3", "a number"),
        (b"true", "true or false"),
        (b'"text"', "a string"),
        (b'{"a": 1', "malformed"),
        (b"{'a': 1}", "malformed"),
        (b'{"a": 1} {"b": 2}', "malformed"),
        (b'{"a": 01}', "malformed"),
        (b'{"a": NaN}', "malformed"),
        (b'{"a": Infinity}', "malformed"),
        (b'{"a": -Infinity}', "malformed"),
        (b'{"a": 1e999}', "malformed"),
        (b'{"a": "\\ud800"}', "malformed: cut off, or an unpaired surrogate"),
        (b'{"a": "\\udc00 alone"}', "malformed: invalid utf-16 surrogate pair (byte 13)"),
        (b'{"\\ud800": 1}', "malformed: cut off, or an unpaired surrogate"),
        (b'{"a": "\xff"}', "malformed: invalid UTF-8"),
        (b'{"a": "\xed\xa0\x80"}', "malformed: invalid UTF-8"),
        (b"\xef\xbb\xbf{}", "malformed: a byte order mark before the object"),
        (b'{"a": ' * 100_000, "malformed: nested too deeply"),
        (b"\x00\x01\x02", "malformed"),
    ],
    ids=repr,
)
def test_line_that_holds_no_object_is_reported_with_its_number(tmp_path, raw, problem):
    """It never crashes the reader, and its neighbours are read. Spec: docs/spec/conventions.md#jsonl-input"""
    before, line, after = read(tmp_path, b'{"n": 1}\n' + raw + b'\n{"n": 3}\n')
    assert (before.value, after.value) == ({"n": 1}, {"n": 3})
    assert (line.number, line.raw, line.value) == (2, raw, None)
    assert line.problem
    assert line.problem.startswith(problem)
    assert parse_object(raw) is None


def test_object_comes_with_its_raw_bytes(tmp_path):
    raw = b'{ "image_id" : "\xc3\xa4",\t"x": [1, 2.0, null, "\\u00e4\\ud83d\\ude00"] }'
    value = {"image_id": "ä", "x": [1, 2.0, None, "ä😀"]}
    assert read(tmp_path, raw + b"\n") == [Line(1, raw, value, None)]
    assert parse_object(raw) == value


@pytest.mark.parametrize("ending", [b"\n", b"\r\n"])
def test_line_ending_of_either_kind_is_no_part_of_the_line(tmp_path, ending):
    lines = read(tmp_path, b'{"a": 1}' + ending + b'{"a": 2}' + ending)
    assert [(line.raw, line.value) for line in lines] == [(b'{"a": 1}', {"a": 1}), (b'{"a": 2}', {"a": 2})]


def test_last_line_without_a_newline_is_read(tmp_path):
    """Many programs write no final newline."""
    assert read(tmp_path, b'{"a": 1}\n{"a": 2}')[-1] == Line(2, b'{"a": 2}', {"a": 2}, None, offset=9)


def test_last_line_cut_off_is_torn(tmp_path):
    """The case of a kill during an append. Spec: docs/spec/stage2.md#merge"""
    good, torn = read(tmp_path, b'{"a": 1}\n{"a": ')
    assert good.value == {"a": 1}
    assert torn.problem


def test_empty_file_has_no_lines(tmp_path):
    assert read(tmp_path, b"") == []


@given(st.binary(max_size=300))
@example(b"\r\n\r\n{}\r")
@settings(deadline=None)
def test_any_bytes_are_read_line_by_line(tmp_path_factory, data):
    """Each line is an object or has a problem, numbers run from 1, and no byte is lost but line endings."""
    lines = read(tmp_path_factory.mktemp("jsonl"), data)
    assert [line.number for line in lines] == list(range(1, len(lines) + 1))
    assert all((line.value is None) != (line.problem is None) for line in lines)
    wholes = data.split(b"\n")
    assert [line.raw for line in lines] == [w.removesuffix(b"\r") for w in (wholes if wholes[-1] else wholes[:-1])]


def strict(text: str):
    """The standard library's value, without its extensions of JSON."""

    def refuse(constant):
        raise ValueError(constant)

    value = json.loads(text, parse_constant=refuse)
    json.dumps(value, ensure_ascii=False).encode("utf-8")  # a lone surrogate has no UTF-8
    return value


json_like = st.one_of(
    st.text('{}[]:,"\\ue0123456789.-+ntrfalsd \t', max_size=30).map(lambda text: f'{{"a": {text}}}'),
    objects.map(json.dumps),
    st.lists(st.sampled_from(["\\ud83d", "\\ude00", "\\u0041", "x", "\\n", "\\"]), max_size=6).map(
        lambda parts: f'{{"a": "{"".join(parts)}"}}'
    ),
)


@given(json_like)
@settings(max_examples=200, deadline=None)
def test_accepted_objects_are_those_of_the_standard_library(text):
    """An accepted line has the same value for every reader; a refused one is not strict JSON, or has a number out of range."""
    value = parse_object(text.encode("utf-8"))
    try:
        expected = strict(text)
    except (ValueError, RecursionError):
        assert value is None
        return
    assert value == expected or (value is None and has_infinity(expected))


def has_infinity(value) -> bool:
    if isinstance(value, dict):
        return any(map(has_infinity, value.values()))
    if isinstance(value, list):
        return any(map(has_infinity, value))
    return isinstance(value, float) and math.isinf(value)


# ---- writing


def test_line_is_utf8_in_the_given_order_with_one_newline():
    assert encode_line({"b": 1, "a": "ä\n😀", "c": [1.5, None]}) == '{"b":1,"a":"ä\\n😀","c":[1.5,null]}\n'.encode()


def test_sorted_line_has_its_keys_in_order_at_every_level():
    """The json member of a sample. Spec: docs/spec/shards.md#members"""
    assert (
        encode_sorted({"b": {"z": 1, "y": 2}, "ä": 0, "a": [{"d": 1, "c": 2}]})
        == '{"a":[{"c":2,"d":1}],"b":{"y":2,"z":1},"ä":0}\n'.encode()
    )


@given(objects)
@settings(deadline=None)
def test_object_comes_back_as_it_was_written(obj):
    assert parse_object(encode_line(obj)) == parse_object(encode_sorted(obj)) == obj == json.loads(encode_line(obj))
    assert encode_line(obj).count(b"\n") == 1


@given(objects)
@settings(deadline=None)
def test_equal_objects_give_equal_sorted_bytes(obj):
    shuffled = dict(reversed(obj.items()))
    assert encode_sorted(shuffled) == encode_sorted(obj)


@given(st.lists(objects, max_size=5))
@settings(max_examples=20, deadline=None)
def test_rows_come_back_as_written(tmp_path_factory, rows):
    path = tmp_path_factory.mktemp("jsonl") / "folder" / "rows.jsonl"
    assert write_jsonl(path, iter(rows)) == len(rows)
    assert [line.value for line in read_jsonl(path)] == rows


def test_old_file_stands_when_a_row_fails(tmp_path):
    """Spec: docs/spec/stage2.md#merge"""
    path = tmp_path / "rows.jsonl"
    write_jsonl(path, [{"a": 1}])
    with pytest.raises(TypeError):
        write_jsonl(path, [{"a": 2}, object()])
    assert path.read_bytes() == b'{"a":1}\n'
    assert os.listdir(tmp_path) == ["rows.jsonl"]


LINES = [b'{"a":1}\n', b'{"a":2}\n']


@pytest.mark.parametrize("old", [None, b"", b'{"a":1}\n', b'{"a":1}\n{"a":2}\n{"a":3}\n', b'{"a":1}\n{"a":7}\n'])
def test_lines_replace_a_file_that_holds_others(tmp_path, old):
    path, temporary = tmp_path / "new" / "main.jsonl", tmp_path / "new" / "main.jsonl.tmp"
    if old is not None:
        path.parent.mkdir()
        path.write_bytes(old)
    assert replace_lines(path, LINES, temporary=temporary) is True
    assert path.read_bytes() == b"".join(LINES)
    assert os.listdir(path.parent) == ["main.jsonl"]


def test_file_that_holds_these_lines_keeps_bytes_and_mtime(tmp_path):
    """A second run changes and writes nothing. Spec: docs/spec/conventions.md#completion-and-identity"""
    path, temporary = tmp_path / "main.jsonl", tmp_path / "main.jsonl.tmp"
    replace_lines(path, LINES)
    before = file_signature(path)  # not all of its state: reading may change the access time
    assert replace_lines(path, LINES, temporary=temporary) is False
    assert file_signature(path) == before
    assert os.listdir(tmp_path) == ["main.jsonl"]


@given(st.lists(st.binary(max_size=4)), st.lists(st.binary(max_size=4)))
def test_file_holds_the_new_lines_whatever_it_held(tmp_path_factory, old, new):
    """This includes contents with a common beginning: the old bytes up to the first difference are copied."""
    path = tmp_path_factory.mktemp("lines") / "main.jsonl"
    old, new = ([line.replace(b"\n", b"") + b"\n" for line in lines] for lines in (old, new))
    path.write_bytes(b"".join(old))
    assert replace_lines(path, iter(new)) is (old != new)
    assert path.read_bytes() == b"".join(new)


def test_lines_are_written_to_the_temporary_name_first(tmp_path, monkeypatch):
    """Spec: docs/spec/stage2.md#merge"""
    path, temporary = tmp_path / "main.jsonl", tmp_path / "main.jsonl.tmp"
    path.write_bytes(b"old\n")
    seen = {}

    def look(handle):
        seen.update(main=path.read_bytes(), temporary=temporary.read_bytes())
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(diff_writer, "flush", look)
    with pytest.raises(OSError, match="No space"):
        replace_lines(path, LINES, temporary=temporary)
    assert seen == {"main": b"old\n", "temporary": b"".join(LINES)}
    assert path.read_bytes() == b"old\n"
    assert os.listdir(tmp_path) == ["main.jsonl"]


VECTOR = "dinov3_embedding"


@pytest.mark.parametrize("value", ["NaN", "[0.5, NaN]", "[Infinity]", "[-Infinity, 1]", "[1e999]"])
def test_one_field_may_contain_nan_and_infinity(value):
    """Stage 1 files contain them if Python's json wrote a broken vector."""
    raw = f'{{"image_path": "a.jpg", "{VECTOR}": {value}, "caption": "c"}}'.encode()
    line = parse_line(1, raw)
    assert line.problem

    assert list(parse_tolerating(raw, VECTOR)) == ["image_path", VECTOR, "caption"]
    assert tolerate(line, VECTOR).problem is None
    assert parse_tolerating(raw, "caption") is None, "every other field is strict"


@pytest.mark.parametrize(
    "raw",
    [
        b'{"%b": [NaN], "score": NaN}', b'{"%b": [NaN], "score": 1e999}', b'{"%b": [NaN], "caption": "\\ud800"}',
        b'{"%b": [NaN, "\\ud800"]}', b'{"%b": {"\\udfff": NaN}}',
        b'{"%b": [NaN]', b'["%b", NaN]', b'{"%b": [NaN], "caption": "\xff"}',
        b'{"%b": NaN, "a": ' + b"[" * 500 + b"]" * 500 + b"}",
        b'{"%b": [NaN], "n": ' + b"9" * 5000 + b"}", b'{"a": {"%b": NaN}}', b"\xef\xbb\xbf" + b'{"%b": [NaN]}',
    ],
)  # fmt: skip
def test_line_with_another_fault_stays_malformed(raw):
    assert parse_tolerating(raw.replace(b"%b", VECTOR.encode()), VECTOR) is None


@pytest.mark.parametrize("raw", [b'{"a":' * 101 + b"1" + b"}" * 101, b'{"a":' + b"[" * 100 + b"]" * 100 + b"}"])
def test_line_is_nested_at_most_a_hundred_levels(raw):
    """Encoding, sorting and printing a value are recursive too."""
    line = parse_line(1, raw)
    assert line.problem == "malformed: nested too deeply"

    shallow = parse_line(1, b'{"a":' * 99 + b"{}" + b"}" * 99)
    assert shallow.problem is None
    wide = parse_line(1, b'{"a":[' + b",".join([b"[]"] * 500) + b"]}")
    assert wide.problem is None


def test_lines_that_mention_a_text_are_found_in_any_spelling_without_decoding_the_others(tmp_path, monkeypatch):
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"id": "b"}\n{"id": "\xc3\xa9"}\r\n{"id": "\\u00e9"}\nbroken \xc3\xa9\n')
    decoded, parse = [], jsonl._parse
    monkeypatch.setattr(jsonl, "_parse", lambda raw: decoded.append(raw) or parse(raw))

    found = list(jsonl.read_mentions(path, "é"))

    assert [(line.number, line.value) for line in found] == [(2, {"id": "é"}), (3, {"id": "é"}), (4, None)]
    assert found == [line for line in jsonl.read_jsonl(path) if line.number > 1]
    assert b'{"id": "b"}' not in decoded[:3]


@given(
    st.lists(st.binary(max_size=40).map(lambda raw: raw.replace(b"\n", b"")), min_size=1, max_size=12),
    st.data(), st.integers(0, 30), st.integers(1, 60),
)  # fmt: skip
def test_spans_that_are_read_together_are_those_that_are_read_alone(tmp_path_factory, lines, data, gap, block):
    """In any order, repeated, from two files."""
    folder = tmp_path_factory.mktemp("files")
    spans = []
    for name in ("one", "two"):
        (folder / name).write_bytes(b"".join(line + b"\n" for line in lines))
        offsets = itertools.accumulate((len(line) + 1 for line in lines), initial=0)
        spans += [
            Span(folder / name, n, offset, len(line))
            for n, (line, offset) in enumerate(zip(lines, offsets, strict=False))
        ]
    chosen = data.draw(st.lists(st.sampled_from(spans), max_size=20) | st.just(spans))
    with mock.patch.multiple(jsonl, _GAP_BYTES=gap, _BLOCK_BYTES=block), SpanReader() as reader:
        together = list(reader.read_together(chosen))

    assert together == [span.read() for span in chosen]


_SPANS = st.builds(
    jsonl.Span, st.sampled_from([Path("a"), Path("b")]), st.integers(0, 2**46 - 1), st.integers(0, 2**56 - 1),
    st.integers(0, 2**46 - 1),
)  # fmt: skip


@given(
    first=st.dictionaries(st.text(max_size=2), _SPANS),
    then=st.lists(st.tuples(st.text(max_size=2), st.none() | _SPANS)),
)
def test_table_of_spans_is_a_dict(first, then):
    table, expected = jsonl.SpanTable(first.items()), dict(first)
    for key, span in then:
        if span is None:
            assert table.pop(key, None) == expected.pop(key, None)
        else:
            table[key] = expected[key] = span
    assert list(table.items()) == list(expected.items())
    assert (len(table), table.keys(), table.get("abc")) == (len(expected), expected.keys(), None)
