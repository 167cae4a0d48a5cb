"""Order of the objects in a preset's records: recorded, requested, or detected in files of another program.

    annotation      as annotated (default)
    top_left        by (min y, min x) of the values in 0…999; ties keep the order of the annotations

A preset made by another program has no `format` in its manifest. CoordExp writes norm and coord records in `top_left`
order beside pixel records in the order of the annotations. If its lines equal ours up to the order of objects, they are
not rewritten.

Single records are sorted in coords.py and rescale.py. Other parameters of a preset are compared in rescale_plan.py.

Spec: docs/spec/presets.md#object-order
"""

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any, Literal, NamedTuple

from imagemill.domain.geometry import in_top_left_order
from imagemill.domain.preset_records import DEFAULT_ORDER, ORDERS, ObjectOrder
from imagemill.errors import ImagemillError, WrongUsage
from imagemill.formats.jsonl import encode_sorted, parse_object, read_raw
from imagemill.pipeline.presets.coords import TOKENS, is_plainly_valid, to_norm
from imagemill.store.public_data import PresetDir, is_foreign

Manifest = dict[str, Any]
Record = dict[str, Any]


class ChosenOrder(NamedTuple):
    """The order of a preset's records; `kept`: splits whose norm and coord files are left unchanged."""

    order: ObjectOrder
    kept: frozenset[str] = frozenset()


class OrderConflict(ImagemillError, ValueError):
    """A preset's records have another order than the requested one."""


def recorded_order(preset: PresetDir, manifest: Mapping[str, Any]) -> ObjectOrder | None:
    """Return the order that a manifest records; None if another program made the preset and recorded none.

    Raises:
        ImagemillError: if the recorded value is not an order.
    """
    order = (manifest.get("stage_stats", {}).get("rescale") or {}).get("object_order")
    if order is None:  # releases before this setting kept the order of the annotations
        return None if is_foreign(manifest) else DEFAULT_ORDER
    if order not in ORDERS:
        raise ImagemillError(
            f"object_order is {order!r}: not one of {', '.join(ORDERS)}",
            where=f"{preset.manifest}, stage_stats.rescale",
            do="restore the manifest, or delete the preset directory and rescale again",
        )
    return order


def check_order(preset: PresetDir, manifest: Mapping[str, Any], requested: ObjectOrder | None) -> None:
    """Raise OrderConflict if a preset records another order than the requested one."""
    _agreed(preset, recorded_order(preset, manifest), requested)


def choose_order(
    base: PresetDir, manifest: Mapping[str, Any], splits: Sequence[str], requested: ObjectOrder | None
) -> ChosenOrder:
    """Return the order for the records of a base preset and of presets derived from it.

    Raises:
        OrderConflict: if the requested order differs from the recorded one, or from that of files that are kept.
        WrongUsage: if the requested order is unknown.
    """
    if requested not in (None, *ORDERS):
        raise WrongUsage(f"unknown object_order {requested!r}", do=f"choose from {', '.join(ORDERS)}")
    recorded = recorded_order(base, manifest)
    if not is_foreign(manifest) or recorded == "annotation":
        return ChosenOrder(_agreed(base, recorded, requested) or DEFAULT_ORDER)
    found = {split: _compare(base, split) for split in splits}
    kept = frozenset(split for split, files in found.items() if files == "equal")
    order = _agreed(base, recorded or ("top_left" if kept else None), requested)
    if order is None:
        order = "top_left" if "ordered" in found.values() or kept else DEFAULT_ORDER
    return ChosenOrder(order, kept if order == "top_left" else frozenset())


def with_order(rescale: Mapping[str, Any], manifest: Mapping[str, Any], order: ObjectOrder) -> dict[str, Any]:
    """Return `stage_stats.rescale` with the order added for a preset of another program; in ours, rescale records it."""
    return {**rescale, "object_order": order} if is_foreign(manifest) else dict(rescale)


def _agreed(preset: PresetDir, recorded: ObjectOrder | None, requested: ObjectOrder | None) -> ObjectOrder | None:
    if recorded and requested and recorded != requested:
        raise OrderConflict(
            f"parameters of {preset.name} differ: object_order is {recorded}, requested {requested}",
            where=preset.path,
            why="a preset keeps the order of its objects",
            do="leave object_order out, or rescale into a new preset name with it",
        )
    return recorded or requested


# ---- files of another program


def _compare(base: PresetDir, split: str) -> Literal["equal", "ordered", "other"]:
    """Compare norm and coord files with those that coord would write.

    Returns:
        `other` if a file is missing or not in `top_left` order throughout; `equal` if, besides, only the order of objects
        differs from ours; else `ordered`.
    """
    if not (base.records(split, "norm").is_file() and base.records(split, "coord").is_file()):
        return "other"
    equal = True
    lines = (read_raw(path) for path in (base.jsonl(split), base.records(split, "norm"), base.records(split, "coord")))
    for (_, pixel), (_, norm), (_, coord) in zip_longest(*lines, fillvalue=(0, b"")):
        found = parse_object(norm)
        if found is None or not _is_ordered(found):
            return "other"
        equal = equal and _is_equal(pixel, found, coord)
    return "equal" if equal else "ordered"


def _is_ordered(norm: Record) -> bool:
    """Return True if objects are ordered by (min y, min x), or by their first point, which is how CoordExp sorts polygons."""
    shapes = _shapes(norm)
    if shapes is None:
        return False
    firsts = [(shape[1], shape[0]) for shape in shapes]
    return in_top_left_order(shapes, shapes) == shapes or firsts == sorted(firsts)


def _shapes(norm: Record) -> list[list[int]] | None:
    """Return the geometry of a norm record's objects; None if one has none."""
    objects = norm.get("objects")
    if not isinstance(objects, list) or not all(isinstance(item, dict) for item in objects):
        return None
    shapes = [item.get("bbox_2d") or item.get("poly") for item in objects]
    usable = all(isinstance(shape, list) and len(shape) >= 4 and all(type(v) is int for v in shape) for shape in shapes)
    return shapes if usable else None


def _is_equal(pixel: bytes, norm: Record, coord: bytes) -> bool:
    ours, tokens = parse_object(pixel), parse_object(coord)
    if ours is None or tokens is None or not is_plainly_valid(ours):
        return False
    to_norm(ours)
    return _sorted_objects(ours) == _sorted_objects(norm) and _with_tokens(norm) == tokens


def _sorted_objects(record: Record) -> Record:
    return {**record, "objects": sorted(map(encode_sorted, record["objects"]))}


def _with_tokens(norm: Record) -> Record:
    """Return the coord record of a norm record."""
    objects = []
    for item in norm["objects"]:
        key = "bbox_2d" if item.get("bbox_2d") else "poly"
        objects.append({**item, key: [TOKENS[bin_] if 0 <= bin_ < len(TOKENS) else bin_ for bin_ in item[key]]})
    return {**norm, "objects": objects}
