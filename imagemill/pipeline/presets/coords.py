"""Conversion of a preset's records from pixels to the other spaces.

`bbox_2d` and `poly` become ints 0…999 (norm), then tokens `<|coord_K|>` (coord):

    {"desc": "bowl", "bbox_2d": [10, 12, 80, 60]}                                           pixels of a 128x96 image
    {"desc": "bowl", "bbox_2d": [78, 126, 630, 631]}                                        norm
    {"desc": "bowl", "bbox_2d": ["<|coord_78|>", "<|coord_126|>", "<|coord_630|>", …]}      coord

Records with more than `max_objects` objects are dropped whole, never truncated. Unknown keys are kept, and so is the
order of a polygon's points. Objects keep their order, or are sorted by (min y, min x) in all three spaces.

Rules for valid records are in preset_records.py, the arithmetic in geometry.py, whole files in coord_files.py.

Spec: docs/spec/presets.md#quantisation, docs/spec/presets.md#object-order, docs/spec/presets.md#strictness,
docs/spec/presets.md#hardlinks
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from imagemill.domain.geometry import in_top_left_order, quantise_objects
from imagemill.domain.preset_records import (
    DEFAULT_ORDER,
    RECORD_TYPES,
    TOKENS,
    ObjectOrder,
    is_plain,
    violations,
)
from imagemill.formats.jsonl import encode_line, parse_line, parse_object

Record = dict[str, Any]
Number = int | float

_encoder = msgspec.json.Encoder()


# ---- one record


def is_plainly_valid(record: Record) -> bool:
    """Return True if a record in pixels is certainly valid; False means that `violations` must decide."""
    try:
        typed = msgspec.convert(record, RECORD_TYPES["pixel"])
    except msgspec.ValidationError:
        return False
    return is_plain(typed, "pixel")


def to_norm(record: Record) -> list[tuple[Record, str, list[int]]]:
    """Convert a valid record's geometry to 0…999 in place; return each object with its key and bins."""
    objects: list[Record] = record["objects"]
    quantised = quantise_objects(objects, record["width"], record["height"])
    geometries = [
        (item, "bbox_2d" if "bbox_2d" in item else "poly", bins) for item, bins in zip(objects, quantised, strict=True)
    ]
    for item, key, bins in geometries:
        item[key] = bins
    return geometries


# ---- some lines


class RecordCounts(NamedTuple):
    """Counts of a split's records; `largest` is the highest number of objects in one record."""

    records: int = 0
    dropped: int = 0
    objects: int = 0
    dropped_objects: int = 0
    largest: int = 0

    def plus(self, other: "RecordCounts") -> "RecordCounts":
        """Return the counts of both."""
        sums = RecordCounts(*map(sum, zip(self, other, strict=True)))
        return sums._replace(largest=max(self.largest, other.largest))

    @property
    def kept(self) -> int:
        """Number of records that were not dropped."""
        return self.records - self.dropped


class Chunk(NamedTuple):
    """The results of some lines: bytes for the three files, images of the kept records, and problems by line."""

    pixel: bytes
    norm: bytes
    coord: bytes
    images: list[str]
    counts: RecordCounts
    problems: list[str]


def transform(first: int, lines: Sequence[bytes], max_objects: int | None, order: ObjectOrder = DEFAULT_ORDER) -> Chunk:
    """Convert some lines of `<split>.jsonl` to all spaces; `first` is the number of the first line.

    A pixel line keeps its bytes unless its objects have to be sorted.
    """
    kept: list[Record] = []
    pixel: list[bytes] = []
    problems: list[str] = []
    objects = dropped = dropped_objects = largest = 0
    for number, line in enumerate(lines, start=first):
        raw = line.rstrip(b"\r\n")
        record, wrong = _read(number, raw)
        problems += wrong
        if record is None:
            continue
        count = len(record["objects"])
        objects, largest = objects + count, max(largest, count)
        if max_objects is not None and count > max_objects:
            dropped, dropped_objects = dropped + 1, dropped_objects + count
            continue
        kept.append(record)
        pixel.append(raw + b"\n")
    counts = RecordCounts(len(lines), dropped, objects, dropped_objects, largest)
    geometries: list[tuple[Record, str, list[int]]] = []
    for n, record in enumerate(kept):
        of_record = to_norm(record)
        geometries += of_record
        if order == "top_left":
            pixel[n] = _sort_objects(record, [bins for _, _, bins in of_record], pixel[n])
    norm = _encoder.encode_lines(kept)
    for item, key, bins in geometries:
        item[key] = [TOKENS[bin_] for bin_ in bins]
    images = [record["images"][0] for record in kept]
    return Chunk(b"".join(pixel), norm, _encoder.encode_lines(kept), images, counts, problems)


def _sort_objects(record: Record, shapes: Sequence[Sequence[int]], pixel: bytes) -> bytes:
    """Sort a norm record's objects in place; return its pixel line with the objects in the same order."""
    now = list(range(len(shapes)))
    sorted_ = in_top_left_order(now, shapes)
    if sorted_ == now:
        return pixel
    record["objects"] = [record["objects"][n] for n in sorted_]
    in_pixels = parse_object(pixel) or {}
    return encode_line({**in_pixels, "objects": [in_pixels["objects"][n] for n in sorted_]})


def _read(number: int, raw: bytes) -> tuple[Record | None, list[str]]:
    """Return a line's record, or None and its problems."""
    record = parse_object(raw)
    if record is None:
        return None, [f"line {number}: {parse_line(number, raw).problem}"]
    if is_plainly_valid(record):
        return record, []
    wrong = [f"line {number}: {p.field}: {p.rule}: {p.message}" for p in violations(record, "pixel")]
    return (None, wrong) if wrong else (record, [])
