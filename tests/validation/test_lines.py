"""Lines of any bytes give findings, never a traceback; the fast path never accepts what the rules refuse.

Spec: docs/spec/conventions.md#jsonl-input, docs/spec/validation.md#strict-json
"""

import json
import subprocess
import sys
import tracemalloc

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from imagemill.domain.preset_records import PresetRules
from imagemill.formats.jsonl import decode_canonical, parse_line
from imagemill.validation.findings import collect
from imagemill.validation.images import ImageLook
from imagemill.validation.lines import check_lines, key_given_twice
from imagemill.validation.presets import _PresetLines, preset_records
from imagemill.validation.stage2 import _Stage2Lines, stage2_records
from imagemill.validation.stage_a import _StageALines, stage_a_records
from tests.helpers.product import PROJECT
from tests.helpers.situations import GROUP, PRESET_RECORD
from tests.helpers.stage2 import record_of, write_text

NORM = {
    "images": ["images/a.jpg"],
    "objects": [{"desc": "bowl", "bbox_2d": [0, 1, 998, 999]}, {"desc": "cup", "poly": [0, 0, 9, 0, 9, 999]}],
    "width": 64,
    "height": 32,
}
COORD = {
    **NORM,
    "objects": [
        {"desc": "bowl", "bbox_2d": [f"<|coord_{n}|>" for n in (0, 1, 998, 999)]},
        {"desc": "cup", "poly": [f"<|coord_{n}|>" for n in (0, 0, 9, 0, 9, 999)], "poly_points": 3},
    ],
}
LIMITS = PresetRules(64 * 64, 32)


def accepts(lines, raw):
    """Return whether a line, without its ending, is accepted without the rules."""
    (found,) = decode_canonical(raw + b"\n", lines.decoder) if b"\n" not in raw else (raw,)
    return not isinstance(found, bytes) and lines.accept(found, 1)


def stage2_lines(tmp):
    return _Stage2Lines("x.jsonl", None, False, None, None, None)


def preset_lines(space):
    def make(tmp):
        return _PresetLines(tmp / "x.jsonl", space, LIMITS, ImageLook("none"), None)

    return make


def with_ids(record):
    """Return a preset's record as adapters write it, with `metadata`."""
    objects = [{**item, "metadata": {"category_id": 7}} for item in record["objects"]]
    return {**record, "objects": objects, "metadata": {"image_id": 9, "file_name": "a.jpg"}}


# kind → (a valid record, the checks of its lines)
KINDS = {
    "stage2": (record_of("a-1", size=(24, 24)), stage2_lines),
    "pixel": (PRESET_RECORD, preset_lines("pixel")),
    "norm": (NORM, preset_lines("norm")),
    "coord": (COORD, preset_lines("coord")),
    "pixel with ids": (with_ids(PRESET_RECORD), preset_lines("pixel")),
    "coord with ids": (with_ids(COORD), preset_lines("coord")),
    "stage-a": (GROUP, lambda tmp: _StageALines("m_stage_a.jsonl")),
}

STRANGE = [
    True, False, None, 0, -1, 1.0, -0.0, 1e3, 999, 1000, 2**53 + 1, 2**31 - 1, 2**31, 2**32, 10**40, 1e308, "", " ",
    "\x00", "\ud800", "\x85", "a <|x|>", "<|coord_1|>", "<|coord_01|>", "<|coord_1000|>", "..", "a/b", "../a", "a//b",
    "./a", "/a", "a\\b", "a\u2028b", [], {}, [[]], ["a", "b"], [1, 2, 3, 4], [1, 2, 1, 4], [True, 2, 3, 4], [1, 2, 3, 4.5],
    [1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 6, 7], [0] * 77, [1] * 77, [1.0] * 77, ["<|coord_3|>"] * 4,
]  # fmt: skip
PIECES = [b'"', b',"width":64', b'"desc":"', b"\\u0061", b"\\", b" ", b"1", b"."]
strange = st.sampled_from(STRANGE) | st.integers() | st.floats() | st.text(max_size=4)
keys = st.sampled_from(
    ["images", "objects", "width", "height", "desc", "bbox_2d", "poly", "poly_points", "bbox", "line", "image_id", "caption",
     "image_path", "t5_attention_mask", "aspect_bucket", "format_version", "dinov3_embedding", "other", "group_id", "per_image"]
)  # fmt: skip


def places(value, at=()):
    """Return all places in a value, as keys and positions; only the first items of lists, so that a mask does not dominate."""
    yield at
    items = value.items() if isinstance(value, dict) else enumerate(value[:4]) if isinstance(value, list) else ()
    for key, inner in items:
        yield from places(inner, (*at, key))


def changed(value, at, new):
    if not at:
        return new
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[at[0]] = changed(copy[at[0]], at[1:], new)
    return copy


def lookup(value, at):
    for key in at:
        value = value[key]
    return value


@st.composite
def lines_like(draw, record):
    """Return a valid line with a change in its values, its keys or its bytes."""
    for _ in range(draw(st.integers(0, 2))):
        at = draw(st.sampled_from([*places(record)]))
        item = lookup(record, at)
        if isinstance(item, dict) and draw(st.booleans()):
            record = changed(record, at, {**item, draw(keys): draw(strange)})
        else:
            record = changed(record, at, draw(strange))
    separators = draw(st.sampled_from([(",", ":"), (", ", ": ")]))
    raw = json.dumps(record, ensure_ascii=draw(st.booleans()), separators=separators).encode("utf-8", "surrogatepass")
    if draw(st.integers(0, 3)) == 0:
        start = draw(st.integers(0, len(raw)))
        cut = draw(st.integers(0, 3))
        piece = draw(
            st.binary(max_size=3)
            | st.sampled_from([b'"', b',"width":64', b'"desc":"', b"\\u0061", b"\\", b" ", b"1", b"."])
        )
        raw = raw[:start] + piece + raw[start + cut :]
    return raw


@pytest.mark.parametrize("kind", KINDS)
def test_fast_look_takes_only_what_the_rules_take(tmp_path, kind):
    """An accepted line has no finding on the slow path, and no bytes cause an exception."""
    record, make = KINDS[kind]
    taken = []

    @settings(deadline=None, max_examples=400)
    @given(lines_like(record))
    def attack(raw):
        accepted = accepts(make(tmp_path), raw)
        line = parse_line(1, raw)
        if line.value is None:
            assert not accepted, raw
            return
        judged = [*make(tmp_path).judge(line.value, 1)]
        if accepted:
            assert judged == [], raw
            assert key_given_twice(raw, line.value) is None, raw
            taken.append(raw)

    attack()
    assert taken or kind == "stage-a", "the fast look takes nothing at all"


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "stage-a"])
def test_line_as_this_program_writes_it_is_taken_fast(tmp_path, kind):
    record, make = KINDS[kind]

    assert accepts(make(tmp_path), msgspec.json.encode(record))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "stage-a"])
@pytest.mark.parametrize(
    "spoil",
    [
        lambda raw: raw.replace(b"{", b'{"other":1,', 1),
        lambda raw: raw.replace(b'"width"', b'"width":7,"width"'),
        lambda raw: raw.replace(b'"width"', b'"w\\u0069dth":7,"width"'),
        lambda raw: raw.replace(b'"width":', b'"width":1'),
        lambda raw: raw.replace(b'"height":', b'"height":-'),
        lambda raw: raw[:-2],
        lambda raw: b"\xff" + raw,
        lambda raw: b"",
        lambda raw: b"null",
    ],
)
def test_line_out_of_the_ordinary_is_left_to_the_rules(tmp_path, kind, spoil):
    record, make = KINDS[kind]
    raw = msgspec.json.encode(record)
    assert spoil(raw) != raw

    assert not accepts(make(tmp_path), spoil(raw))


texts = st.dictionaries(st.text(max_size=3), st.text(max_size=3) | st.integers(), max_size=3)


@given(
    st.recursive(
        texts, lambda inner: st.dictionaries(st.text(max_size=3), inner | st.lists(inner, max_size=2), max_size=3)
    )
)
@example({"a": 'quote " \\" \\u0022', "b": "\\"})
def test_object_without_a_key_twice_has_none(value):
    for ascii_only in (True, False):
        raw = json.dumps(value, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass")
        parsed = parse_line(1, raw).value
        if parsed is not None:
            assert key_given_twice(raw, parsed) is None


@pytest.mark.parametrize(
    ("raw", "key"),
    [
        (b'{"a":1,"a":1}', "a"), (b'{"a":1,"\\u0061":2}', "a"), (b'{"x":[{"b":"","b":""}]}', "b"),
        (b'{"a":"\\u0022\\u0022","b":1,"b":2}', "b"), (b'{"a":{"a":1}}', None), (b'{"a":"\\u0022"}', None),
        (b'{"a":"\\""}', None),
    ],
)  # fmt: skip
def test_key_twice_is_found_however_it_is_spelled(raw, key):
    """Parsers silently keep the last one, so that two readers may disagree about such a line."""
    assert key_given_twice(raw, parse_line(1, raw).value) == key


def test_key_twice_is_a_finding(tmp_path):
    write_text(tmp_path / "x.jsonl", json.dumps(record_of("a")).replace('"caption"', '"caption": "b", "caption"'))

    (found,) = collect("x", "stage2", stage2_records(tmp_path / "x.jsonl")).findings
    assert (found.rule, found.line) == ("duplicate_key", 1)
    assert "'caption'" in found.message


BAD = [b"", b"  ", b"null", b"[]", b"7", b'"x"', b"true", b"{", b"\xff", b'{"a": NaN}', b'{"a": -Infinity}', b'{"a": "\\ud800"}',
       b"\xef\xbb\xbf{}", b"[" * 5000, b'{"a": 1e999}', b'{"a":' + b"1" * 5000 + b"}",
       b'{"a":1}{"b":2}', b'{"a":"\x00"}']  # fmt: skip


@pytest.mark.parametrize("check", [stage2_records, preset_records, stage_a_records])
def test_every_bad_line_is_a_finding_with_its_number(tmp_path, check):
    write_text(tmp_path / "x.jsonl", *BAD)

    report = collect("x", "any", check(tmp_path / "x.jsonl"))

    assert report.checked == len(BAD)
    assert report.rules == {"strict_json": len(BAD)}
    assert [found.line for found in report.findings] == [*range(1, len(BAD) + 1)]


@pytest.mark.parametrize("check", [stage2_records, preset_records, stage_a_records])
@pytest.mark.parametrize("data", [b"", b"\n", b"{}", b"\n\n{}\n"])
def test_line_ends_count_as_lines_do(tmp_path, check, data):
    (tmp_path / "x.jsonl").write_bytes(data)

    assert collect("x", "any", check(tmp_path / "x.jsonl")).checked == len(data.splitlines())


def test_file_that_does_not_open_is_a_finding(tmp_path):
    """It is a finding like any other. The test uses a folder in place of an unreadable file, because tests run as root."""
    (tmp_path / "x.jsonl").mkdir()

    report = collect("x", "any", check_lines(tmp_path / "x.jsonl", stage2_lines(tmp_path)))

    assert report.rules == {"read_error": 1}


def test_number_of_thousands_of_digits_is_judged_like_any_other(tmp_path):
    """Python refuses to convert it to text, so messages must not contain it."""
    huge = b"1" * 4300
    path = tmp_path / "train.jsonl"
    spoilt = msgspec.json.encode(PRESET_RECORD).replace(b"[1,2.5,30,31]", b"[" + huge + b",2,3,4]")
    write_text(path, spoilt, spoilt.replace(b":64", b":" + huge), b'{"images":' + huge + b"}")
    report = collect("x", "preset", preset_records(path, limits=LIMITS))
    assert {"out_of_range", "image_size", "images"} <= report.rules.keys()

    write_text(path, json.dumps(record_of("a")).replace("32", huge.decode()), b'{"image_id":' + huge + b"}")
    assert not collect("x", "stage2", stage2_records(path)).passed
    write_text(path, b'{"label":' + huge + b',"images":[' + huge + b'],"per_image":{"image_1":' + huge + b"}}")
    assert not collect("x", "stage-a", stage_a_records(path)).passed


@pytest.mark.slow
@pytest.mark.parametrize(
    ("check", "line"),
    [
        (stage2_records, b"{"), (stage2_records, b'{"image_id": 7}'), (preset_records, b'{"images": ["' + b"x" * 999 + b'"]}'),
        (stage_a_records, b"null"),
    ],
)  # fmt: skip
def test_endless_bad_lines_stay_small(tmp_path, check, line):
    """Memory does not grow with the number of bad lines. Spec: docs/spec/validation.md#strict-json"""
    (tmp_path / "x.jsonl").write_bytes((line + b"\n") * 5_000)
    tracemalloc.start()
    try:
        report = collect("x", "any", check(tmp_path / "x.jsonl"))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert report.checked == 5_000
    assert report.errors >= 5_000
    assert peak < 2_000_000, "5,000 findings alone would take more"


MILLION = """
import sys
from pathlib import Path
from imagemill.validation.validator import validate
report = validate(Path(sys.argv[1]), kind=sys.argv[2])
peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(report.checked, report.errors, int(peak.split()[1]) >> 10)
"""
BAD_RECORD = {
    "stage2": record_of("a", caption=""),
    "preset": {**PRESET_RECORD, "width": 0},
    "stage-a": {**GROUP, "label": ""},
}


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.parametrize("kind", ["stage2", "preset", "stage-a"])
@pytest.mark.parametrize("make", ["not json", "bad records", "all different"])
def test_million_lines_stay_under_300_mb(tmp_path, kind, make):
    """The check of a million lines needs less than 300 MB."""
    record = BAD_RECORD[kind]
    with open(tmp_path / "x.jsonl", "wb") as file:
        for n in range(1_000_000):
            own = {
                "image_id": f"image{n:07d}",
                "group_id": f"group{n:07d}",
                "images": [f"images/train2017/{n:012d}.jpg"],
            }
            own = {key: value for key, value in own.items() if key in record} if make == "all different" else {}
            file.write(b"{\n" if make == "not json" else msgspec.json.encode({**record, **own}) + b"\n")

    done = subprocess.run(
        [sys.executable, "-c", MILLION, str(tmp_path / "x.jsonl"), kind],
        cwd=PROJECT,
        capture_output=True,
        text=True,
        check=True,
    )

    checked, errors, megabytes = map(int, done.stdout.split())
    assert checked == 1_000_000
    assert errors >= 1_000_000
    assert megabytes < 300
