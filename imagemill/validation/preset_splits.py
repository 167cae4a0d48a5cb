"""Comparison of the files of one split: pixel, norm and coord records must have the same images in the same order.

Single files are checked in presets.py.
"""

from collections.abc import Iterator, Mapping
from itertools import zip_longest
from pathlib import Path
from typing import Any

import msgspec

from imagemill.formats.manifest import nested_value, sha256_file
from imagemill.store.public_data import SPACES, SPLITS, PresetDir, is_foreign
from imagemill.text.strict_json import NOT_JSON
from imagemill.validation.catalogue import finding
from imagemill.validation.findings import Finding


class _Object(msgspec.Struct, gc=False):
    """The part of an object that is compared."""

    desc: str


class _Record(msgspec.Struct, gc=False):
    """The fields that the three records of one image share."""

    images: list[str]
    width: int
    height: int
    objects: list[_Object]


_decode = msgspec.json.Decoder(_Record).decode


def splits_agree(folder: Path, manifest: Mapping[str, Any], base: Path | None) -> Iterator[Finding]:
    """Yield a finding for each norm or coord file that does not match its split's pixel records.

    Args:
        folder: the preset.
        manifest: of the preset, in any form.
        base: the folder of the preset that this one is derived from.
    """
    preset = PresetDir(folder)
    for split in SPLITS:
        paths = (preset.records(split, space) for space in SPACES if space != "pixel")
        converted = [path for path in paths if path.is_file()]
        if not converted:
            continue
        if not preset.jsonl(split).is_file():
            yield from (
                finding("split_without_pixels", f"{path.name} without it", file=path.name) for path in converted
            )
            continue
        for path in converted:
            yield from _agreement(preset.jsonl(split), path, any_order=is_foreign(manifest))
        yield from _sources(preset, split, manifest, base)


def _agreement(pixels: Path, converted: Path, *, any_order: bool) -> Iterator[Finding]:
    lines = others = differing = first = 0
    message = ""
    try:
        with open(pixels, "rb") as one, open(converted, "rb") as other:
            for number, (pixel, coord) in enumerate(zip_longest(one, other), start=1):
                lines += pixel is not None
                others += coord is not None
                if pixel is None or coord is None or not (problem := _difference(pixel, coord, any_order=any_order)):
                    continue
                differing += 1
                if not first:
                    first, message = number, problem
    except OSError as error:
        yield finding("read_error", str(error), file=converted.name)
        return
    if lines != others:
        yield finding("split_lines", f"{others} lines, {pixels.name} has {lines}", file=converted.name)
    if differing:
        more = f", and {differing - 1} more lines" if differing > 1 else ""
        yield finding("split_order", message + more, file=converted.name, line=first)


def _difference(pixel: bytes, coord: bytes, *, any_order: bool) -> str | None:
    """Return the difference between two records. A line that cannot be decoded has its own findings and no difference.

    Args:
        pixel: line of the pixel records.
        coord: line of the norm or coord records.
        any_order: accept the same objects in another order, because the original system sorts only norm and coord
            records.
    """
    try:
        ours, theirs = _decode(pixel), _decode(coord)
    except NOT_JSON:
        return None
    if ours.images != theirs.images:
        return f"{_name(theirs)!r}, the pixel records have {_name(ours)!r} here"
    if (ours.width, ours.height) != (theirs.width, theirs.height):
        return f"{theirs.width}x{theirs.height}, the pixel record has {ours.width}x{ours.height}"
    names, others = ([item.desc for item in record.objects] for record in (ours, theirs))
    if names == others:
        return None
    if sorted(names) != sorted(others):
        return f"{len(others)} objects, the pixel record has {len(names)}, or others"
    return None if any_order else "the objects have another order than those of the pixel record"


def _name(record: _Record) -> str:
    return record.images[0] if record.images else ""


def _sources(preset: PresetDir, split: str, manifest: Mapping[str, Any], base: Path | None) -> Iterator[Finding]:
    """Compare the pixel records with the digest that coord recorded; presets of other programs have no digest."""
    recorded = nested_value(manifest, "stage_stats", "coord", "splits", split, "source")
    source = (PresetDir(base) if base else preset).jsonl(split)
    if not isinstance(recorded, str) or not source.is_file() or recorded == f"sha256:{sha256_file(source)}":
        return
    message = f"norm and coord were made from records other than {source.parent.name}/{source.name} has now"
    yield finding("base_changed" if base else "stale_split", message, file=preset.jsonl(split).name)
