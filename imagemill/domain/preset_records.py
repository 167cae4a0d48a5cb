"""Records of a preset, in any of its three spaces, and the rules for valid ones.

    {"images": ["images/000000000009.jpg"], "objects": [{"desc": "bowl", "bbox_2d": [1, 188, 613, 474]}],
     "width": 640, "height": 480}

Space `pixel` has numbers in pixels of the image (raw records too), `norm` ints 0…999, `coord` tokens `<|coord_0|>` to
`<|coord_999|>`.

`violations` defines validity; `is_plain` is its fast path for typed records. Files of records and images are checked in
validation/presets.py and validation/images.py.

Spec: docs/spec/presets.md#preset-records, docs/spec/validation.md#rules-of-preset-records
"""

import math
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Generic, Literal, NamedTuple, TypeVar, get_args

import msgspec
from msgspec import UNSET, UnsetType

from imagemill.domain.geometry import LAST_BIN, MAX_SIDE, overlaps
from imagemill.domain.stage2_records import Side, is_side
from imagemill.domain.violations import Violation, is_plain_text, text_warnings

Space = Literal["pixel", "norm", "coord"]

# Order of a record's objects: as annotated, or by (min y, min x) of the values in 0…999.
ObjectOrder = Literal["annotation", "top_left"]
DEFAULT_ORDER: ObjectOrder = "annotation"
ORDERS: tuple[ObjectOrder, ...] = get_args(ObjectOrder)
ResizeLibrary = Literal["torch", "pillow"]

TOKENS = tuple(f"<|coord_{bin_}|>" for bin_ in range(LAST_BIN + 1))
_BINS = {token: bin_ for bin_, token in enumerate(TOKENS)}

Value = TypeVar("Value")
# Geometry that begins left of or above its image is unusual: such records are not decoded here, but checked by
# `violations`.
_PixelValue = Annotated[int, msgspec.Meta(ge=0)] | Annotated[float, msgspec.Meta(ge=0)]


class PresetObject(msgspec.Struct, Generic[Value], gc=False):
    """One object of a record, with values of one space."""

    desc: str
    bbox_2d: tuple[Value, Value, Value, Value] | UnsetType = UNSET
    poly: Annotated[list[Value], msgspec.Meta(min_length=6)] | UnsetType = UNSET
    poly_points: int | UnsetType = UNSET
    metadata: dict[str, Any] | UnsetType = UNSET
    # Keys of _LEGACY_REMEDIES: an object with one of them is not decoded.
    bbox: UnsetType = UNSET
    polygon: UnsetType = UNSET
    line: UnsetType = UNSET
    line_points: UnsetType = UNSET


class PresetRecord(msgspec.Struct, Generic[Value], gc=False):
    """A record with values of one space. Unknown fields are ignored here and kept on disk. Sizes are in pixels."""

    images: tuple[str]
    objects: list[PresetObject[Value]]
    width: Side
    height: Side
    metadata: dict[str, Any] | UnsetType = UNSET


# `msgspec.convert` resolves a class faster than a parametrised alias.
class PixelRecord(PresetRecord[_PixelValue], gc=False):
    """A record with values in pixels."""


RECORD_TYPES: Mapping[Space, Any] = {
    "pixel": PixelRecord,
    "norm": PresetRecord[Annotated[int, msgspec.Meta(ge=0, le=LAST_BIN)]],
    "coord": PresetRecord[Literal[TOKENS]],  # type: ignore[valid-type]
}


DECODERS = {space: msgspec.json.Decoder(kind) for space, kind in RECORD_TYPES.items()}


class PresetRules(NamedTuple):
    """Limits of one preset: largest area in pixels, factor of both sides; None: no limit."""

    max_pixels: int | None = None
    multiple_of: int | None = None


NO_LIMITS = PresetRules()


class PresetRule(NamedTuple):
    """The requirement of a rule, and the remedy for a violation."""

    description: str
    remedy: str


_TABLES = tomllib.loads(Path(__file__).with_name("preset_rules.toml").read_text("utf-8"))
# A record that violates only warnings is valid.
PRESET_RULES, PRESET_WARNINGS = (
    {
        name: PresetRule(row["description"].format(max_side=MAX_SIDE), row["remedy"])
        for name, row in _TABLES[part].items()
    }
    for part in ("rules", "warnings")
)
_LEGACY_REMEDIES: Mapping[str, str] = _TABLES["legacy_keys"]
_Problems = Iterator[Violation]


def violations(record: Mapping[str, Any], space: Space, rules: PresetRules = NO_LIMITS) -> list[Violation]:
    """Return all violations of a record, without accessing files. Raw records have space `pixel` and no `rules`."""
    return [
        *_image_problems(record.get("images")),
        *_size_problems(record, *rules),
        *_objects_problems(record.get("objects"), space),
    ]


def is_plain(record: PresetRecord[Any], space: Space) -> bool:
    """Return True if a typed record certainly has no violation and no warning, except for limits of its preset.

    False means that `violations` and `warnings` must decide.
    """
    right, bottom = (record.width, record.height) if space == "pixel" else (LAST_BIN, LAST_BIN)
    in_tokens, is_plain_name = space == "coord", _plain_names.__getitem__
    for item in record.objects:
        box, poly = item.bbox_2d, item.poly
        if not is_plain_name(item.desc):
            return False
        if box is not UNSET:
            x1, y1, x2, y2 = map(_BINS.__getitem__, box) if in_tokens else box
            if poly is not UNSET or not (x1 < x2 <= right and y1 < y2 <= bottom):
                return False
        elif (
            poly is UNSET
            or len(poly) % 2
            or item.poly_points not in (UNSET, len(poly) // 2)
            or (space == "pixel" and (max(poly[::2]) > right or max(poly[1::2]) > bottom))
        ):
            return False
    return path_problem(record.images[0]) is None


class _PlainNames(dict[str, bool]):
    """Cache of names without warnings. Names are mostly those of categories, which recur in every record."""

    def __missing__(self, name: str) -> bool:
        if len(self) >= _MOST_NAMES:
            self.clear()
        plain = self[name] = is_plain_text(name) and not name.isspace()
        return plain


_MOST_NAMES = 1 << 12
_plain_names = _PlainNames()


def warnings(record: Mapping[str, Any], space: Space) -> list[Violation]:
    """Return warnings about a valid record: about names, and, in pixels, about geometry beyond the image's edge."""
    texts = [
        warning
        for n, item in enumerate(record["objects"])
        for warning in text_warnings(f"objects[{n}].desc", item["desc"])
    ]
    if space != "pixel":
        return texts
    sides = record["width"], record["height"]
    outside = set(outside_objects(record))
    return texts + [
        _problem("outside_image" if n in outside else "beyond_edge", f"objects[{n}]", f"outside {sides[0]}x{sides[1]}")
        for n, item in enumerate(record["objects"])
        if n in outside or is_beyond_edge(item.get("bbox_2d") or item["poly"], *sides)
    ]


def outside_objects(record: Mapping[str, Any]) -> list[int]:
    """Return the positions of the objects of a valid pixel record whose box does not intersect the image."""
    sides = record["width"], record["height"]
    return [n for n, item in enumerate(record["objects"]) if not overlaps(item.get("bbox_2d") or item["poly"], *sides)]


def is_beyond_edge(values: Sequence[float], width: int, height: int) -> bool:
    """Return whether x, y, x, y, … leave the rectangle [0, width] × [0, height], in pixels."""
    return min(values) < 0 or max(values[::2]) > width or max(values[1::2]) > height


# Letters, digits, _, - and single dots: such paths are valid by all rules.
_PLAIN_PATH = re.compile(r"(?:\w[\w-]*/)*\w[\w-]*(?:\.\w[\w-]*)*", re.ASCII).fullmatch


def path_problem(path: object) -> str | None:
    """Return the reason why this is not a path of an image below its file's folder; None if it is."""
    if isinstance(path, str) and _PLAIN_PATH(path):
        return None
    if not isinstance(path, str) or not path.strip():
        return "empty, or no text"
    if "\\" in path or "\0" in path:
        return "contains a backslash or a NUL byte"
    if path.startswith("/") or re.match(r"[A-Za-z]:", path) or "://" in path:
        return "not relative"
    parts = path.split("/")
    if ".." in parts:
        return "leads upwards with '..'"
    return "names a folder" if parts[-1] in {"", "."} else None


def _image_problems(images: object) -> _Problems:
    if not isinstance(images, list) or len(images) != 1:
        yield _problem("images", "images", f"{_shown(images)}, expected a list of one path")
    elif message := path_problem(images[0]):
        yield _problem("image_path", "images", f"{_shown(images[0])}: {message}")


def _size_problems(record: Mapping[str, Any], max_pixels: int | None, multiple_of: int | None) -> _Problems:
    sizes = {name: record.get(name) for name in ("width", "height")}
    bad = [name for name, value in sizes.items() if not is_side(value)]
    for name in bad:
        yield _problem("image_size", name, f"{_shown(sizes[name])}, expected an int from 1 to {MAX_SIDE}")
    if bad:
        return
    width, height = record["width"], record["height"]
    if max_pixels is not None and width * height > max_pixels:
        yield _problem("max_pixels", "width", f"{_shown(width)} x {_shown(height)} is more than {max_pixels} pixels")
    for name, value in sizes.items():
        if multiple_of is not None and record[name] % multiple_of:
            yield _problem("multiple_of", name, f"{_shown(value)} is no multiple of {multiple_of}")


def _objects_problems(objects: object, space: Space) -> _Problems:
    if not isinstance(objects, list):
        yield _problem("objects", "objects", f"{_shown(objects)}, expected a list")
        return
    for n, item in enumerate(objects):
        if isinstance(item, dict):
            yield from _object_problems(item, f"objects[{n}]", space)
        else:
            yield _problem("objects", f"objects[{n}]", f"{_shown(item)}, expected an object")


def _object_problems(item: Mapping[str, Any], at: str, space: Space) -> _Problems:
    desc = item.get("desc")
    if not isinstance(desc, str) or not desc.strip():
        yield _problem("desc", f"{at}.desc", "missing or blank")
    for key, remedy in _LEGACY_REMEDIES.items():
        if key in item:
            yield Violation(f"{at}.{key}", "legacy_key", "a key of older layouts", remedy)
    if ("bbox_2d" in item) == ("poly" in item):
        both = "bbox_2d" in item
        yield _problem("geometry", at, "has bbox_2d and poly" if both else "has neither bbox_2d nor poly")
    elif "bbox_2d" in item:
        yield from _bbox_problems(item["bbox_2d"], f"{at}.bbox_2d", space)
    else:
        yield from _poly_problems(item, f"{at}.poly", space)


def _bbox_problems(box: object, at: str, space: Space) -> _Problems:
    if not isinstance(box, list) or len(box) != 4:
        yield _problem("bbox", at, f"{_shown(box)}, expected four values")
        return
    values: list[Any] = list(map(_VALUE_IN[space], box))
    if None in values:
        yield _space_problem(box, values, at, space)
        return
    if max(map(abs, values)) > MAX_SIDE:
        yield _problem("out_of_range", at, _shown(box))
        return
    x1, y1, x2, y2 = values
    if x2 <= x1 or y2 <= y1:
        yield _problem("inverted", at, _shown(box))


def _poly_problems(item: Mapping[str, Any], at: str, space: Space) -> _Problems:
    poly, points = item["poly"], item.get("poly_points")
    if not isinstance(poly, list) or len(poly) < 6 or len(poly) % 2:
        yield _problem("poly", at, f"{_shown(poly)}, expected x and y of at least three points")
        return
    if "poly_points" in item and (type(points) is not int or points != len(poly) // 2):
        yield _problem("poly", f"{at}_points", f"{_shown(points)}, there are {len(poly) // 2} points")
    values: list[Any] = list(map(_VALUE_IN[space], poly))
    if None in values:
        yield _space_problem(poly, values, at, space)
    elif max(map(abs, values)) > MAX_SIDE:
        yield _problem("out_of_range", at, _shown(max(values, key=abs)))


def _space_problem(given: list[object], values: list[Any], at: str, space: Space) -> Violation:
    expected = {
        "pixel": "a number",
        "norm": f"an int 0…{LAST_BIN}",
        "coord": f"a token <|coord_0|>…<|coord_{LAST_BIN}|>",
    }[space]
    return _problem("space", at, f"{_shown(given[values.index(None)])}, expected {expected}")


def _pixel(value: object) -> float | None:
    if type(value) is float:
        return value if math.isfinite(value) else None
    return value if type(value) is int else None


def _norm(value: object) -> int | None:
    return value if type(value) is int and 0 <= value <= LAST_BIN else None


def _coord(value: object) -> int | None:
    return _BINS.get(value) if isinstance(value, str) else None


# Converters of a value of each space to a number; None for values of another type or space.
_VALUE_IN: dict[Space, Callable[[object], float | None]] = {"pixel": _pixel, "norm": _norm, "coord": _coord}


def _problem(rule: str, field: str, message: str) -> Violation:
    return Violation(field, rule, message, (PRESET_RULES.get(rule) or PRESET_WARNINGS[rule]).remedy)


def _shown(value: object) -> str:
    """Return a value's repr for messages, shortened; Python raises for numbers of thousands of digits."""
    try:
        text = repr(value)
    except ValueError:
        return "a number too long to show"
    return text if len(text) <= 60 else f"{text[:57]}…"
