"""Contact sheet of a preset with objects drawn: raw images on the left, the preset's images on the right.

    coco/rescale_32_768/contact_sheet.png

Encoding of sheets is in contact_sheet.py, rules about geometry in preset_records.py.
"""

import itertools
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw, ImageFont, ImageOps

from imagemill.domain.preset_records import violations
from imagemill.errors import Refused
from imagemill.formats.images import decode_stored
from imagemill.formats.jsonl import parse_object, read_raw
from imagemill.fs.atomic import write_if_changed
from imagemill.pipeline.contact_sheet import as_page, as_png
from imagemill.store.public_data import Dataset, PresetDir

SHEET = "contact_sheet.png"
IMAGES = 8

CELL = 420
_GAP, _LINE = 10, 18
_WHITE, _GREY, _BLACK = (255, 255, 255), (190, 190, 190), (20, 20, 20)
# Distinguishable colours; equal names have equal colours.
_COLOURS = [
    (230, 25, 75), (60, 180, 75), (255, 200, 0), (0, 130, 200), (245, 130, 48), (145, 30, 180), (0, 190, 190),
    (240, 50, 230), (130, 200, 30), (220, 120, 160), (0, 128, 128), (170, 110, 40),
]  # fmt: skip

Record = Mapping[str, Any]


def write_preset_sheet(dataset: Dataset, preset: PresetDir, split: str = "train", *, count: int = IMAGES) -> Path:
    """Draw the sheet of a published split and write it into the preset's folder; an equal file is left as it is."""
    path = preset.path / SHEET
    write_if_changed(path, as_png(draw_preset_sheet(dataset, preset, split, count=count)))
    return path


def sheet_page(path: Path) -> str:
    """Return Markdown with a picture of a written sheet."""
    with Image.open(path, formats=["PNG"]) as sheet:
        return as_page("raw on the left, the preset on the right", sheet.convert("RGB"), "boxes")


def draw_preset_sheet(dataset: Dataset, preset: PresetDir, split: str = "train", *, count: int = IMAGES) -> Image.Image:
    """Draw `count` records, evenly spread over the split, one row each: raw and preset image. RGB."""
    after = _spread_records(preset.jsonl(split), count)
    before = _originals(dataset.raw_jsonl(split), after)
    rows = [
        [
            (_title(record), draw_record(folder, record))
            for folder, record in ((dataset.raw, raw), (preset.path, after_record))
        ]
        for raw, after_record in zip(before, after, strict=True)
    ]
    heights = [_LINE + max(picture.height for _, picture in row) + _GAP for row in rows]
    sheet = Image.new("RGB", (3 * _GAP + 2 * CELL, _GAP + max(sum(heights), _LINE)), _WHITE)
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(12)
    if not rows:
        draw.text((_GAP, _GAP), f"{preset.name}: no records in {split}", _BLACK, font)
    for row, top in zip(rows, itertools.accumulate(heights, initial=_GAP), strict=False):
        for column, (title, picture) in enumerate(row):
            left = _GAP + column * (CELL + _GAP)
            draw.text((left, top), title, _BLACK, font)
            sheet.paste(picture, (left, top + _LINE))
    return sheet


def draw_record(folder: Path, record: Record | None, side: int = CELL) -> Image.Image:
    """Draw a record's image with its objects and their names; the longer side has `side` pixels.

    The image is grey if it cannot be opened or there is no record.
    """
    if record is None:
        return Image.new("RGB", (side, side // 2), _GREY)
    try:
        path = folder / record["images"][0]
        picture = decode_stored(path.read_bytes(), path.name)
    except (Refused, OSError):
        picture = Image.new("RGB", (record["width"], record["height"]), _GREY)
    picture = ImageOps.contain(picture, (side, side))
    # Scaled by the record's own size, so that a size that differs from the file's is visible.
    scale = picture.width / record["width"], picture.height / record["height"]
    draw, font = ImageDraw.Draw(picture), ImageFont.load_default(11)
    for item in record["objects"]:
        _draw_object(draw, font, item, scale)
    return picture


def _draw_object(draw: ImageDraw.ImageDraw, font: Any, item: Record, scale: tuple[float, float]) -> None:
    values = item.get("bbox_2d") or item["poly"]
    points = [(x * scale[0], y * scale[1]) for x, y in zip(values[0::2], values[1::2], strict=True)]
    colour = _COLOURS[zlib.crc32(item["desc"].encode("utf-8", "replace")) % len(_COLOURS)]
    if "bbox_2d" in item:
        draw.rectangle(points, outline=colour, width=2)
    else:
        draw.polygon(points, outline=colour, width=2)
    corner = max(min(x for x, _ in points), 0), max(min(y for _, y in points), 0)
    name = item["desc"].encode("utf-8", "replace").decode()[:40]
    draw.rectangle(draw.textbbox(corner, name, font), fill=colour)
    draw.text(corner, name, _WHITE, font)


def _title(record: Record | None) -> str:
    if record is None:
        return "no raw record"
    name = str(record["images"][0]).encode("utf-8", "replace").decode()
    name = name if len(name) <= 40 else f"…{name[-39:]}"
    return f"{name}  {record['width']}x{record['height']}  {len(record['objects'])} objects"


def _spread_records(path: Path, count: int) -> list[Record]:
    total = sum(1 for _ in read_raw(path))
    line_numbers = (
        {n * total // count + 1 for n in range(min(count, total))} if total > count else set(range(1, total + 1))
    )
    return list(_valid(raw for number, raw in read_raw(path) if number in line_numbers))


def _originals(path: Path, preset_records: Sequence[Record]) -> list[Record | None]:
    """Return the raw record of each preset record: of the same image, with as many objects."""
    keys = {_key(record) for record in preset_records}
    found: dict[Any, Record] = {}
    # Lines that contain no image name are skipped without decoding, which skips most of them.
    names = [str(record["images"][0]).rpartition("/")[2].encode() for record in preset_records]
    for record in _valid(raw for _, raw in read_raw(path) if any(name in raw for name in names)):
        if _key(record) in keys:
            found.setdefault(_key(record), record)
    return [found.get(_key(record)) for record in preset_records]


def _key(record: Record) -> tuple[str, int]:
    return record["images"][0], len(record["objects"])


def _valid(lines: Iterator[bytes]) -> Iterator[Record]:
    for raw in lines:
        record = parse_object(raw)
        if record is not None and not violations(record, "pixel"):
            yield record
