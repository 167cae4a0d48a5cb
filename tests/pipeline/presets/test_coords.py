"""One split in all its forms, written in one pass: kept lines, norm, coord, statistics."""

import hashlib
import json
import os
import subprocess
import sys

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from imagemill.domain.geometry import quantise_box, quantise_polygon
from imagemill.domain.preset_records import violations
from imagemill.fs.atomic import temporaries
from imagemill.pipeline.presets import coord_files
from imagemill.pipeline.presets.coord_files import draft_split
from imagemill.pipeline.presets.coords import is_plainly_valid, to_norm, transform
from imagemill.store.public_data import PresetDir
from tests.helpers.product import PROJECT

BOX = {"desc": "bowl", "bbox_2d": [10, 12, 80, 60]}
POLYGON = {"desc": "dog", "poly": [0, 0, 127, 0, 127, 95], "poly_points": 3}


def record(number=0, objects=(BOX,), **more):
    return {"images": [f"images/{number}.jpg"], "objects": list(objects), "width": 128, "height": 96, **more}


def line(*args, **kwargs):
    return json.dumps(record(*args, **kwargs), ensure_ascii=False).encode() + b"\n"


@pytest.fixture
def base(tmp_path):
    (tmp_path / "base").mkdir()
    return PresetDir(tmp_path / "base")


@pytest.fixture
def derived(tmp_path):
    (tmp_path / "derived").mkdir()
    return PresetDir(tmp_path / "derived")


def draft(base, derived, lines, **options):
    base.jsonl("train").write_bytes(b"".join(lines))
    return draft_split(base, "train", derived.path, **{"max_objects": 2, **options})


def write_split(base, derived, lines, **options):
    split = draft(base, derived, lines, **options)
    assert split.problems == []
    split.publish()
    return split


def read(path):
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


@pytest.mark.parametrize(
    ("box", "bins"),
    [
        ([10, 12, 80, 60], [78, 126, 630, 631]),
        ([0, 0, 128, 96], [0, 0, 999, 999]),
        ([127, 95, 127.5, 95.5], [998, 998, 999, 999]),
        ([127, 95, 128, 96], [998, 998, 999, 999]),
        ([0.0, 0.0, 127.0, 95.0], [0, 0, 999, 999]),
        ([-5, -5, 1e308, 2**70], [0, 0, 999, 999]),
        ([-3, 12, 127, 60], [0, 126, 999, 631]),
        ([10, -3, 80, 95], [78, 0, 630, 999]),
    ],
)
def test_boxes_of_the_goldens(box, bins):
    """Spec: docs/spec/presets.md#quantisation"""
    got = record(objects=[{"desc": "x", "bbox_2d": box}])
    to_norm(got)
    assert got["objects"][0]["bbox_2d"] == bins


sides = st.integers(1, 12) | st.integers(1, 300)
numbers = (
    st.integers(-2, 12)
    | st.integers(-20, 400)
    | st.floats(-20, 400)
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
)


def test_polygon_beyond_the_edge_is_cut_at_it():
    got = record(objects=[{"desc": "x", "poly": [-1, 0, 128, 96, 64, -1]}])
    to_norm(got)
    assert got["objects"][0]["poly"] == [0, 0, 999, 999, 503, 0]


@given(width=sides, height=sides, box=st.tuples(*[numbers] * 4), poly=st.lists(st.tuples(numbers, numbers), min_size=3))
@settings(max_examples=400)
def test_looked_up_bins_are_the_computed_ones(width, height, box, poly):
    """The table is only an optimisation of the rule in geometry.py."""
    assume(box[0] != box[2] and box[1] != box[3])
    box = [min(box[0], box[2]), min(box[1], box[3]), max(box[0], box[2]), max(box[1], box[3])]
    flat = [value for point in poly for value in point]
    got = record(objects=[{"desc": "x", "bbox_2d": list(box)}, {"desc": "x", "poly": list(flat)}])
    got |= {"width": width, "height": height}

    to_norm(got)

    assert got["objects"][0]["bbox_2d"] == quantise_box(box, width, height)
    assert got["objects"][1]["poly"] == quantise_polygon(flat, width, height)


@given(
    width=st.integers(2, 300),
    height=st.integers(2, 300),
    corners=st.tuples(st.integers(0, 299), st.integers(0, 299), st.integers(1, 300), st.integers(1, 300)),
)
def test_bins_of_a_box_are_in_order_and_cover_it(width, height, corners):
    """x1, y1 are rounded down and x2, y2 up; norm records keep x2 > x1. Spec: docs/spec/presets.md#layout"""
    x1, y1 = min(corners[0], width - 2), min(corners[1], height - 2)
    x2, y2 = min(x1 + corners[2], width - 1), min(y1 + corners[3], height - 1)
    got = record(objects=[{"desc": "x", "bbox_2d": [x1, y1, x2, y2]}]) | {"width": width, "height": height}
    to_norm(got)
    assert violations(got, "norm") == []
    left, top, right, bottom = got["objects"][0]["bbox_2d"]
    assert left * (width - 1) <= x1 * 999 < x2 * 999 <= right * (width - 1)
    assert top * (height - 1) <= y1 * 999 < y2 * 999 <= bottom * (height - 1)


def test_three_spaces_of_one_record(base, derived):
    """Pixel records keep their bytes; all spaces keep unknown keys, orders and vertices. Spec: docs/spec/presets.md#layout"""
    objects = [POLYGON, {"z": 1, **BOX, "score": 1.50, "nested": {"bbox_2d": [1, 2, 3, 4]}}]
    source = line(objects=objects, extra={"ü": [1e3, None, 2**70]})

    write_split(base, derived, [source])

    norm, coord = read(derived.records("train", "norm"))[0], read(derived.records("train", "coord"))[0]
    assert derived.jsonl("train").read_bytes() == source
    assert norm["objects"] == [
        {"desc": "dog", "poly": [0, 0, 999, 0, 999, 999], "poly_points": 3},
        {**objects[1], "bbox_2d": [78, 126, 630, 631]},
    ]
    tokens = ["<|coord_78|>", "<|coord_126|>", "<|coord_630|>", "<|coord_631|>"]
    assert coord["objects"][1] == {**objects[1], "bbox_2d": tokens}
    assert coord["objects"][0]["poly"] == [f"<|coord_{bin_}|>" for bin_ in (0, 0, 999, 0, 999, 999)]
    for one in (norm, coord):
        assert list(one) == list(record(extra=0))
        assert list(one["objects"][1]) == list(objects[1])
        assert one["extra"] == {"ü": [1000, None, 2**70]}
    assert violations(norm, "norm") == violations(coord, "coord") == []


def test_record_with_more_objects_is_dropped_whole(base, derived):
    """Records are never truncated. Spec: docs/spec/presets.md#maximum-number-of-objects"""
    lines = [line(n, objects=[BOX] * n) for n in range(5)]

    split = write_split(base, derived, lines, max_objects=2)

    for path in (derived.jsonl("train"), derived.records("train", "norm"), derived.records("train", "coord")):
        assert [len(one["objects"]) for one in read(path)] == [0, 1, 2]
    assert derived.jsonl("train").read_bytes() == b"".join(lines[:3])
    assert list(split.images) == ["images/0.jpg", "images/1.jpg", "images/2.jpg"]
    assert json.loads(derived.filter_stats("train").read_text()) == {
        "base": "base",
        "split": "train",
        "source": "sha256:" + hashlib.sha256(b"".join(lines)).hexdigest(),
        "max_objects": 2,
        "records": {"read": 5, "kept": 3, "dropped": 2},
        "objects": {"read": 10, "kept": 3},
        "most_objects_in_a_record": 4,
    }


def test_base_gets_norm_and_coord_beside_its_own_records(base):
    """Without a filter there are no statistics and no aliases, and the base's JSONL is not modified.

    Spec: docs/spec/presets.md#dataset-layout
    """
    split = write_split(base, base, [line(n) for n in range(3)], max_objects=None)
    assert sorted(os.listdir(base.path)) == ["train.coord.jsonl", "train.jsonl", "train.norm.jsonl"]
    assert split.images == {}


def test_two_records_may_share_an_image(base, derived):
    """Spec: docs/spec/presets.md#declared-sizes"""
    split = write_split(base, derived, [line(7), line(7)])
    assert (list(split.images), split.counts.kept) == (["images/7.jpg"], 2)


BAD = {
    "blank": b"\n",
    "malformed": b"{\n",
    "utf-8": b'{"a": "\xff"}\n',
    "null": b"null\n",
    "NaN": line().replace(b"10", b"NaN"),
    "true": line().replace(b"10", b"true"),
    "inverted": line(objects=[{"desc": "x", "bbox_2d": [5, 5, 5, 9]}]),
    "three values": line(objects=[{"desc": "x", "bbox_2d": [5, 5, 7]}]),
    "odd": line(objects=[{"desc": "x", "poly": [1, 2, 3, 4, 5, 6, 7]}]),
    "points": line(objects=[{**POLYGON, "poly_points": 4}]),
    "both": line(objects=[{**POLYGON, **BOX}]),
    "neither": line(objects=[{"desc": "x"}]),
    "desc": line(objects=[{**BOX, "desc": " "}]),
    "legacy": line(objects=[{**BOX, "bbox": [1, 2, 3, 4]}]),
    "line": line(objects=[{**BOX, "line": None}]),
    "upwards": line(images=["images/../x.jpg"]),
    "two images": line(images=["images/a.jpg", "images/b.jpg"]),
    "width": line(width=0),
    "tokens": line(objects=[{"desc": "x", "bbox_2d": ["<|coord_1|>"] * 4}]),
}


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD.keys())
def test_bad_line_is_reported_by_its_number(base, derived, bad):
    """Spec: docs/spec/presets.md#strictness"""
    split = draft(base, derived, [line(0), bad, line(1)])
    assert [problem.split(":")[0] for problem in split.problems] == ["line 2"]


def test_all_bad_lines_are_reported(base, derived):
    split = draft(base, derived, [piece for bad in BAD.values() for piece in (line(), bad)])
    assert [problem.split(":")[0] for problem in split.problems] == [f"line {2 * n}" for n in range(1, len(BAD) + 1)]
    split.discard()
    assert os.listdir(derived.path) == []


def test_very_many_bad_lines_are_counted(base, derived, monkeypatch):
    monkeypatch.setattr(coord_files, "KEPT_PROBLEMS", 40)
    monkeypatch.setattr(coord_files, "CHUNK_BYTES", 30)
    split = draft(base, derived, [*[line()] * 50, *[b"{\n"] * 100])
    assert [problem.split(":")[0] for problem in split.problems] == [f"line {n}" for n in range(51, 91)]
    assert split.more == 60


def test_last_line_may_lack_its_newline(base, derived):
    write_split(base, derived, [line(0), line(1).rstrip(b"\n")])
    assert derived.jsonl("train").read_bytes() == line(0) + line(1)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-300, 300) | st.floats(allow_nan=False) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=2), inner, max_size=2),
    max_leaves=6,
)
boxes = st.lists(st.integers(-9, 300) | st.floats(-9, 300), min_size=4, max_size=4)
polygons = st.lists(st.integers(-9, 300), min_size=5, max_size=9)
items = st.fixed_dictionaries(
    {},
    optional={
        "desc": st.sampled_from(["cat", "", " ", "\u2003", "犬"]) | json_values,
        "bbox_2d": boxes | json_values,
        "poly": polygons | json_values,
        "poly_points": st.integers(0, 4) | json_values,
        "line": json_values,
        "other": json_values,
    },
)
records = st.fixed_dictionaries(
    {},
    optional={
        "images": st.lists(st.sampled_from(["images/a.jpg", "images/b/c.jpg", "../a.jpg", "/a", ""]), max_size=2)
        | json_values,
        "objects": st.lists(items | json_values, max_size=3) | json_values,
        "width": st.integers(-1, 300) | json_values,
        "height": st.integers(-1, 300) | json_values,
        "other": json_values,
    },
)


@given(record=records)
@settings(max_examples=500, deadline=None)
def test_fast_verdict_is_never_kinder_than_the_rules(record):
    """A record accepted by the fast path has no problem; all others are checked by the rules."""
    if is_plainly_valid(record):
        assert violations(record, "pixel") == []


def test_fast_verdict_accepts_what_is_usual():
    assert is_plainly_valid(record(objects=[BOX, POLYGON, {"desc": "x", "poly": [0.5] * 8, "other": 1}], extra=[1]))
    assert is_plainly_valid(record(objects=[], images=["images/a b/ü.jpg"]))


@given(raw=st.binary(max_size=60) | records.map(lambda value: json.dumps(value).encode()))
@settings(max_examples=300, deadline=None)
def test_any_line_is_transformed_or_reported(raw):
    """Any bytes give a record or a problem, never a traceback."""
    chunk = transform(1, [raw], 2)
    assert bool(chunk.problems) != (chunk.counts.dropped or chunk.pixel != b"")
    for space, lines in (("pixel", chunk.pixel), ("coord", chunk.coord)):
        for one in lines.splitlines():
            assert violations(json.loads(one), space) == []


def test_unchanged_input_leaves_every_file_untouched(base, derived):
    """Neither bytes nor mtime change. Spec: docs/spec/conventions.md#completion"""
    lines = [line(n) for n in range(50)]
    first = write_split(base, derived, lines)
    before = {path.name: (path.stat().st_mtime_ns, path.stat().st_ino) for path in derived.path.iterdir()}

    again = write_split(base, derived, lines)

    assert len(first.changed) == 4
    assert again.changed == []
    assert {path.name: (path.stat().st_mtime_ns, path.stat().st_ino) for path in derived.path.iterdir()} == before


def test_damaged_file_alone_is_made_again(base, derived):
    """Completion means validity, not existence. Spec: docs/spec/conventions.md#completion-and-identity"""
    lines = [line(n) for n in range(50)]
    write_split(base, derived, lines)
    whole = derived.records("train", "norm").read_bytes()
    derived.records("train", "norm").write_bytes(whole[:-20])

    assert write_split(base, derived, lines).changed == ["train.norm.jsonl"]
    assert derived.records("train", "norm").read_bytes() == whole


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_interrupted_draft_leaves_nothing(base, derived, error):
    def stop(_):
        raise error

    with pytest.raises(error):
        draft(base, derived, [line()], advance=stop)
    assert os.listdir(derived.path) == []


def test_pixel_records_are_the_last_to_get_their_name(base, derived, monkeypatch):
    """`<split>.jsonl` publishes the split. Reference: docs of public_data.PresetDir.splits."""
    split = draft(base, derived, [line()])
    order = []
    real = os.replace
    monkeypatch.setattr(os, "replace", lambda a, b: (order.append(b.name), real(a, b)))
    split.publish()
    assert order[-1] == "train.jsonl"
    assert len(order) == 4


MEMORY = """
import resource, sys
from pathlib import Path
from imagemill.pipeline.presets.coord_files import draft_split
from imagemill.store.public_data import PresetDir
here = Path(sys.argv[1])
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
(here / "small.jsonl").write_bytes((here / "train.jsonl").open("rb").readline())
draft_split(PresetDir(here), "small", here).discard()
before = peak()
draft_split(PresetDir(here), "train", here).discard()
print(peak() - before)
"""


@pytest.mark.slow
def test_memory_is_flat_in_the_number_of_records(base):
    """Ten megabytes of records, a third of them bad, need a fraction of that memory."""
    lines = [b"{\n" if n % 3 == 0 else line(n, objects=[BOX] * 40) for n in range(10_000)]
    base.jsonl("train").write_bytes(b"".join(lines))
    assert base.jsonl("train").stat().st_size > 10_000_000
    command = [sys.executable, "-c", MEMORY, base.path]
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, check=True)
    assert int(done.stdout) < 4_000_000
    assert temporaries(base.path) == []
