"""A fast look at a line of a preset, as this program writes them: typed decoding, then a few comparisons per object.

    DECODERS[space](raw) ──> images, objects, width, height     whatever is unusual does not decode
    QUOTES + QUOTES_OF[space](objects, width, height)           quotes in a line that holds this and nothing else; with
                                                                `metadata` of the record METADATA_QUOTES more

Belongs here: what surely has nothing wrong.
Belongs elsewhere: every verdict (imagemill/preset_records.py).
"""

import re
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, UnsetType

from imagemill.preset_records import TOP, Space
from imagemill.records import Side, is_plain_text

_Text = Annotated[str, msgspec.Meta(min_length=1)]
_Norm = Annotated[int, msgspec.Meta(ge=0, le=TOP)]
_TOKENS = {f"<|coord_{number}|>": number for number in range(TOP + 1)}
# Letters, digits, _ . - in folders that do not begin with a dot: what none of the rules about paths can mean.
PLAIN_PATH = re.compile(r"(?:[\w-][\w.-]*/)*[\w-][\w.-]*", re.ASCII).fullmatch
# The four keys and the path.
QUOTES = 2 * 5
# The key `metadata`, its two keys, and the file name.
METADATA_QUOTES = 2 * 4


class _Image(msgspec.Struct, gc=False, forbid_unknown_fields=True):
    """`metadata` of a record, as adapters write it."""

    image_id: int
    file_name: str


class _Category(msgspec.Struct, gc=False, forbid_unknown_fields=True):
    """`metadata` of an object, as adapters write it."""

    category_id: int


def _decoder(value: Any) -> Any:
    item = msgspec.defstruct(
        "Object",
        [
            ("desc", _Text),
            ("bbox_2d", tuple[value, value, value, value] | UnsetType, UNSET),
            ("poly", list[value] | UnsetType, UNSET),
            ("poly_points", int | UnsetType, UNSET),
            ("metadata", _Category | UnsetType, UNSET),
        ],
        gc=False,
        forbid_unknown_fields=True,
    )
    fields = [
        ("images", tuple[str]),
        ("objects", list[item]),
        ("width", Side),
        ("height", Side),
        ("metadata", _Image | UnsetType, UNSET),
    ]
    line = msgspec.defstruct("Line", fields, gc=False, forbid_unknown_fields=True)
    return msgspec.json.Decoder(line).decode


DECODERS = {"pixel": _decoder(float), "norm": _decoder(_Norm), "coord": _decoder(str)}


# How many quotes the objects of a line take: desc, its text and the geometry's name, six for each, and what else they say. Less
# than 0 where one is not surely right. More quotes in the line are an escape, a key given twice, a box and a polygon in one.
_NONE = -(1 << 60)


def _in_pixels(objects: Sequence[Any], width: int, height: int) -> int:
    quotes = 6 * len(objects)
    for item in objects:
        if item.bbox_2d is UNSET:
            quotes += _in_polygon(item, width, height)
        else:
            x1, y1, x2, y2 = item.bbox_2d
            if not (0 <= x1 < x2 <= width and 0 <= y1 < y2 <= height):
                return _NONE
        if item.metadata is not UNSET:
            quotes += 4
        if item.desc.isspace() or not is_plain_text(item.desc):
            return _NONE
    return quotes


def _in_norm(objects: Sequence[Any], width: int, height: int) -> int:
    quotes = 6 * len(objects)
    for item in objects:
        if item.bbox_2d is UNSET:
            quotes += _in_polygon(item, TOP, TOP)
        else:
            x1, y1, x2, y2 = item.bbox_2d
            if x1 >= x2 or y1 >= y2:
                return _NONE
        if item.metadata is not UNSET:
            quotes += 4
        if item.desc.isspace() or not is_plain_text(item.desc):
            return _NONE
    return quotes


def _in_tokens(objects: Sequence[Any], width: int, height: int) -> int:
    quotes, numbers = 14 * len(objects), _TOKENS
    for item in objects:
        if item.bbox_2d is UNSET:
            quotes += _in_polygon(item, TOP, TOP) + 2 * len(item.poly or ()) - 8
            if not numbers.keys() >= set(item.poly or ()):
                return _NONE
        else:
            x1, y1, x2, y2 = item.bbox_2d
            try:
                if numbers[x1] >= numbers[x2] or numbers[y1] >= numbers[y2]:
                    return _NONE
            except KeyError:
                return _NONE
        if item.metadata is not UNSET:
            quotes += 4
        if item.desc.isspace() or not is_plain_text(item.desc):
            return _NONE
    return quotes


def _in_polygon(item: Any, right: float, bottom: float) -> int:
    """The quotes of an object's count of points; tokens have no edge to be within."""
    poly = item.poly
    if poly is UNSET or len(poly) < 6 or len(poly) % 2:
        return _NONE
    if isinstance(poly[0], float) and (min(poly) < 0 or max(poly[::2]) > right or max(poly[1::2]) > bottom):
        return _NONE
    if item.poly_points is UNSET:
        return 0
    return 2 if item.poly_points == len(poly) // 2 else _NONE


QUOTES_OF: dict[Space, Callable[[Sequence[Any], int, int], int]] = {
    "pixel": _in_pixels,
    "norm": _in_norm,
    "coord": _in_tokens,
}
