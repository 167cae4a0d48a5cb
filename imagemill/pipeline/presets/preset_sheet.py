"""A sheet that shows people their boxes: images of a preset with objects drawn, raw on the left, as trained on at the right.

    coco/rescale_32_768/contact_sheet.png

Belongs here: which images, and drawing objects on them.
Belongs elsewhere: sheets as bytes (contact_sheet.py), rules about geometry (preset_records.py).

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
# Colours that are told apart on any picture; equal names have equal ones.
_COLOURS = [
    (230, 25, 75), (60, 180, 75), (255, 200, 0), (0, 130, 200), (245, 130, 48), (145, 30, 180), (0, 190, 190),
    (240, 50, 230), (130, 200, 30), (220, 120, 160), (0, 128, 128), (170, 110, 40),
]  # fmt: skip

Record = Mapping[str, Any]


def write_preset_sheet(dataset: Dataset, preset: PresetDir, split: str = "train", *, count: int = IMAGES) -> Path:
    """Draw the sheet of a published split beside its records; an equal one stays as it is."""
    path = preset.path / SHEET
    write_if_changed(path, as_png(draw_preset_sheet(dataset, preset, split, count=count)))
    return path


def sheet_page(path: Path) -> str:
    """Markdown with a picture of a written sheet."""
    with Image.open(path, formats=["PNG"]) as sheet:
        return as_page("raw on the left, the preset on the right", sheet.convert("RGB"), "boxes")


def draw_preset_sheet(dataset: Dataset, preset: PresetDir, split: str = "train", *, count: int = IMAGES) -> Image.Image:
    """`count` records, evenly spread over the split: a row each, before and after. RGB."""
    after = _spread_records(preset.jsonl(split), count)
    before = _originals(dataset.raw_jsonl(split), after)
    rows = [
        [(_title(record), draw_record(folder, record)) for folder, record in ((dataset.raw, raw), (preset.path, made))]
        for raw, made in zip(before, after, strict=True)
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
    """A record's image with its objects and their names, its longer side `side` pixels.

    Grey if the image cannot be opened or there is no record.
    """
    if record is None:
        return Image.new("RGB", (side, side // 2), _GREY)
    try:
        path = folder / record["images"][0]
        picture = Image.fromarray(decode_stored(path.read_bytes(), path.name))
    except (Refused, OSError):
        picture = Image.new("RGB", (record["width"], record["height"]), _GREY)
    picture = ImageOps.contain(picture, (side, side))
    # By the record's own size: where it is not the file's, that shows.
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
    wanted = {n * total // count + 1 for n in range(min(count, total))} if total > count else set(range(1, total + 1))
    return list(_valid(raw for number, raw in read_raw(path) if number in wanted))


def _originals(path: Path, made: Sequence[Record]) -> list[Record | None]:
    """The raw record of each: of the same image, with as many objects."""
    wanted = {_key(record) for record in made}
    found: dict[Any, Record] = {}
    # A look at the bytes passes over most lines unread.
    names = [str(record["images"][0]).rpartition("/")[2].encode() for record in made]
    for record in _valid(raw for _, raw in read_raw(path) if any(name in raw for name in names)):
        if _key(record) in wanted:
            found.setdefault(_key(record), record)
    return [found.get(_key(record)) for record in made]


def _key(record: Record) -> tuple[str, int]:
    return record["images"][0], len(record["objects"])


def _valid(lines: Iterator[bytes]) -> Iterator[Record]:
    for raw in lines:
        record = parse_object(raw)
        if record is not None and not violations(record, "pixel"):
            yield record
