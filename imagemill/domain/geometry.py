"""Arithmetic of sizes, boxes and polygons of presets, on plain numbers.

    target_size     1920 x 1080  →  1152 x 640
    scale_*         pixels of the raw image  →  whole pixels of the preset's image
    quantise_*      pixels  →  0…999
    in_top_left_order   order of objects by (min y, min x)

Integer input is computed in integers, so that results do not depend on a float's last bit.

Rules for valid records are in preset_records.py, resizing of pixels in formats/resize.py.

Spec: docs/spec/presets.md#target-size, docs/spec/presets.md#geometry, docs/spec/presets.md#quantisation,
docs/spec/presets.md#object-order
"""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import isqrt
from typing import Any, NamedTuple, TypeVar

from imagemill.errors import Refused, WrongUsage

Number = int | float
T = TypeVar("T")

IMAGE_FACTOR, MAX_PIXELS, MIN_PIXELS = 32, 786_432, 4_096
MAX_ASPECT = 200
# No image format has longer sides: PNG stores them in 31 bits.
MAX_SIDE = 2**31 - 1
LAST_BIN = 999


def check_limits(image_factor: int, max_pixels: int, min_pixels: int) -> None:
    """Raise WrongUsage for limits that no image can satisfy."""
    if image_factor < 1 or min_pixels < 1:
        raise WrongUsage(
            f"image_factor {image_factor}, min_pixels {min_pixels}: both must be at least 1", do="give 1 or more"
        )
    if max_pixels < max(min_pixels, image_factor**2):
        raise WrongUsage(
            f"max_pixels {max_pixels} allows no image",
            why=f"min_pixels is {min_pixels} and the smallest image {image_factor}x{image_factor}",
            do="raise max_pixels",
        )


def target_size(
    width: int,
    height: int,
    *,
    image_factor: int = IMAGE_FACTOR,
    max_pixels: int = MAX_PIXELS,
    min_pixels: int = MIN_PIXELS,
) -> tuple[int, int]:
    """Return the size of an image in a preset, (width, height), each a multiple of `image_factor`.

    Raises:
        Refused: `aspect` if one side is more than 200 times the other; `too_large` if no size satisfies both limits.
    """
    if max(width, height) > MAX_ASPECT * min(width, height):
        raise Refused(
            "aspect",
            f"{width}x{height}: one side is more than {MAX_ASPECT} times the other",
            do="cut the image, or leave the record out",
        )
    size = _nearest(width, image_factor), _nearest(height, image_factor)
    if size[0] * size[1] > max_pixels:
        size = _sides(width, height, max_pixels, image_factor, _floor)
    elif size[0] * size[1] < min_pixels:
        size = _sides(width, height, min_pixels, image_factor, _ceil)
    if size[0] * size[1] > max_pixels:
        raise Refused(
            "too_large",
            f"{width}x{height} becomes {size[0]}x{size[1]}, more than max_pixels {max_pixels}",
            why=f"no side is under image_factor {image_factor}, nor the image under min_pixels {min_pixels}",
            do="raise max_pixels, or leave the record out",
        )
    return size


def _sides(width: int, height: int, pixels: int, factor: int, rounded: Callable[[int, int], int]) -> tuple[int, int]:
    """Return the sides of an image of `pixels` area with this ratio, each rounded to a multiple of the factor."""
    # A side times sqrt(limit / area) equals sqrt(side * limit / other side); isqrt of the quotient is its integer part.
    return rounded(isqrt(width * pixels // height), factor), rounded(isqrt(height * pixels // width), factor)


def _nearest(side: int, factor: int) -> int:
    return max(1, round(side / factor)) * factor


def _floor(side: int, factor: int) -> int:
    return max(1, side // factor) * factor


def _ceil(side: int, factor: int) -> int:
    return max(1, -(-side // factor)) * factor


def overlaps(values: Sequence[Number], width: int, height: int) -> bool:
    """Return True if the bounding box of x, y, x, y, … intersects the rectangle [0, width] x [0, height], beyond its edge."""
    xs, ys = values[0::2], values[1::2]
    return min(xs) < width and max(xs) > 0 and min(ys) < height and max(ys) > 0


# ---- pixels to pixels


def scale_objects(
    objects: Sequence[Mapping[str, Any]], source: tuple[int, int], target: tuple[int, int]
) -> list[dict[str, Any]]:
    """Return objects with geometry scaled from one image size (width, height) to another; other keys and the order stay.

    For equal sizes, geometry is returned as it is. Raises Refused as `scale_box`.
    """
    if source == target:
        return [dict(obj) for obj in objects]
    return [
        {**obj, "bbox_2d": scale_box(obj["bbox_2d"], source, target)}
        if "bbox_2d" in obj
        else {**obj, "poly": scale_polygon(obj["poly"], source, target)}
        for obj in objects
    ]


def scale_polygon(points: Sequence[Number], source: tuple[int, int], target: tuple[int, int]) -> list[int]:
    """Scale x, y, x, y, …, round half to even, and clamp into the image."""
    (old_width, old_height), (width, height) = source, target
    scaled: list[Any] = list(points)
    scaled[0::2] = [_scaled(x, old_width, width) for x in points[0::2]]
    scaled[1::2] = [_scaled(y, old_height, height) for y in points[1::2]]
    return scaled


def _scaled(value: Number, old: int, new: int) -> int:
    # Clamp first: the product with a huge number may exceed the range of float.
    return 0 if value <= 0 else new - 1 if value >= old else min(round(value * new / old), new - 1)


def scale_box(box: Sequence[Number], source: tuple[int, int], target: tuple[int, int]) -> list[int]:
    """Scale x1, y1, x2, y2 as `scale_polygon`; a collapsed side is widened by one pixel inside the image.

    Raises:
        Refused: `too_small` if the target is one pixel wide or high, so that no box has an extent in it.
    """
    x1, y1, x2, y2 = scale_polygon(box, source, target)
    if min(target) < 2:
        raise Refused("too_small", f"no box fits into {target[0]}x{target[1]}", do="choose an image_factor above 1")
    x1, x2 = _widened(x1, x2, target[0] - 1)
    y1, y2 = _widened(y1, y2, target[1] - 1)
    return [x1, y1, x2, y2]


def _widened(low: int, high: int, last: int) -> tuple[int, int]:
    if high > low:
        return low, high
    return (low, low + 1) if low < last else (last - 1, last)


# ---- pixels to 0…999


def quantise_box(box: Sequence[Number], width: int, height: int) -> list[int]:
    """Round x1, y1 down and x2, y2 up over (width - 1), (height - 1); the box is covered, by at least two bins per axis."""
    x1, y1, x2, y2 = box
    across, down = width - 1, height - 1
    left, right = _widened(_floor_bin(x1, across), _ceil_bin(x2, across), LAST_BIN)
    top, bottom = _widened(_floor_bin(y1, down), _ceil_bin(y2, down), LAST_BIN)
    return [left, top, right, bottom]


def quantise_polygon(points: Sequence[Number], width: int, height: int) -> list[int]:
    """Round x, y, x, y, … half to even over (width - 1), (height - 1), in the given order."""
    bins: list[Any] = list(points)
    for first, last in enumerate((width - 1, height - 1)):
        bins[first::2] = [
            0 if value <= 0 else LAST_BIN if value >= last else round(value * LAST_BIN / last)
            for value in points[first::2]
        ]
    return bins


def in_top_left_order(items: Sequence[T], shapes: Sequence[Sequence[int]]) -> list[T]:
    """Return items ordered by (min y, min x) of their shapes; ties keep their order.

    Args:
        items: the items.
        shapes: boxes and polygons in 0…999, one per item, each x, y, x, y, ….
    """
    keys = [(min(shape[1::2]), min(shape[0::2])) for shape in shapes]
    return [items[n] for n in sorted(range(len(keys)), key=keys.__getitem__)]


def _floor_bin(value: Number, last: int) -> int:
    return 0 if value <= 0 else LAST_BIN if value >= last else int(value * LAST_BIN // last)


def _ceil_bin(value: Number, last: int) -> int:
    return 0 if value <= 0 else LAST_BIN if value >= last else int(-(-value * LAST_BIN // last))


# ---- geometry by tables

# Longer sides are computed without a table.
_LARGEST_AXIS = 1 << 14


class _Axis(NamedTuple):
    """The bins of whole pixels along a side, from 0 to its length: rounded down, up, and to the nearest."""

    low: list[int]
    high: list[int]
    nearest: list[int]


@functools.lru_cache(maxsize=256)
def _axis(side: int) -> _Axis:
    last, pixels = side - 1 or 1, range(side + 1 if side <= _LARGEST_AXIS else 0)
    return _Axis(
        [min(at * LAST_BIN // last, LAST_BIN) for at in pixels],
        [min(-(-at * LAST_BIN // last), LAST_BIN) for at in pixels],
        [min(round(at * LAST_BIN / last), LAST_BIN) for at in pixels],
    )


def quantise_objects(objects: Iterable[Mapping[str, Any]], width: int, height: int) -> list[list[int]]:
    """Return the geometry of valid pixel objects in 0…999.

    Whole pixels inside the image are looked up in tables, which takes half the time.
    """
    across, down = _axis(width), _axis(height)
    return [
        (_box_bins(item["bbox_2d"], across, down) or quantise_box(item["bbox_2d"], width, height))
        if "bbox_2d" in item
        else (
            _polygon_bins(item["poly"], across.nearest, down.nearest) or quantise_polygon(item["poly"], width, height)
        )
        for item in objects
    ]


def _box_bins(box: Sequence[Number], across: _Axis, down: _Axis) -> list[int] | None:
    """Return `quantise_box` of whole pixels inside the image, None for other boxes."""
    x1, y1, x2, y2 = box
    try:
        bins = [across.low[x1], down.low[y1], across.high[x2], down.high[y2]]  # type: ignore[index]
    except (TypeError, IndexError):  # not integers, or outside
        return None
    return None if x1 < 0 or y1 < 0 or bins[0] >= bins[2] or bins[1] >= bins[3] else bins


def _polygon_bins(points: Sequence[Number], across: list[int], down: list[int]) -> list[int] | None:
    """Return `quantise_polygon` of whole pixels inside the image, None for other polygons."""
    bins: list[Any] = list(points)
    try:
        bins[0::2] = map(across.__getitem__, points[0::2])  # type: ignore[arg-type]
        bins[1::2] = map(down.__getitem__, points[1::2])  # type: ignore[arg-type]
    except (TypeError, IndexError):
        return None
    return bins if min(points) >= 0 else None
