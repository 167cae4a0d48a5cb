"""Sheets of thumbnails: one row per group, a line of text above it, a name under each picture; or a grid of pictures alone.

Their content is decided in pipeline/curation/near_duplicates.py and look/pictures.py; images are opened in formats/images.py.
"""

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass

from PIL import Image, ImageDraw, ImageFont
from PIL.PngImagePlugin import PngInfo

from imagemill.domain.inputs import SRGB, ColorSetting
from imagemill.errors import Refused
from imagemill.formats.images import decode_reduced
from imagemill.fs.folders import File

TILE = 160
PER_ROW = 8

# Most characters of a page that embeds a smaller picture of a sheet; each run adds it to Dagster's history.
PAGE_CHARACTERS = 100_000

_GAP, _LINE = 10, 20
_WHITE, _GREY, _BLACK, _FRAME = (255, 255, 255), (190, 190, 190), (20, 20, 20), (30, 110, 200)


@dataclass(frozen=True, slots=True)
class Tile:
    """One image file and its name; a grey square is drawn if it cannot be opened."""

    path: File
    name: str


@dataclass(frozen=True, slots=True)
class Row:
    """One row of images. The first one is framed; the last place gives the number of images that do not fit."""

    title: str
    tiles: Sequence[Tile]


def draw_sheet(rows: Sequence[Row], *, empty: str, color: ColorSetting = SRGB) -> Image.Image:
    """Return the sheet, RGB, as wide as its longest row, with the pixels that models get.

    Args:
        rows: of the sheet.
        empty: text of a sheet without rows.
        color: how pixels are read.
    """
    height, columns = _LINE + TILE + _LINE + _GAP, min(PER_ROW, max([2, *(len(row.tiles) for row in rows)]))
    sheet = Image.new("RGB", (_GAP + columns * (TILE + _GAP), _GAP + max(len(rows) * height, _LINE + _GAP)), _WHITE)
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(12)
    if not rows:
        draw.text((_GAP, _GAP), empty, _BLACK, font)
    for n, row in enumerate(rows):
        top = _GAP + n * height
        draw.text((_GAP, top), row.title, _BLACK, font)
        for place, tile in enumerate(row.tiles[:PER_ROW]):
            corner = (_GAP + place * (TILE + _GAP), top + _LINE)
            hidden = len(row.tiles) - PER_ROW + 1
            if hidden > 1 and place == PER_ROW - 1:
                _more(draw, font, corner, hidden)
            else:
                _tile(sheet, draw, font, corner, tile, color, framed=place == 0)
    return sheet


def draw_grid(pictures: Sequence[Image.Image], columns: int) -> Image.Image:
    """Return pictures in rows of so many columns, RGB, without text. There is at least one picture."""
    width, height = (max(picture.size[axis] for picture in pictures) for axis in (0, 1))
    across, down = min(columns, len(pictures)), -(-len(pictures) // columns)
    grid = Image.new("RGB", (_GAP + across * (width + _GAP), _GAP + down * (height + _GAP)), _WHITE)
    for n, picture in enumerate(pictures):
        row, column = divmod(n, columns)
        _paste(grid, picture, (_GAP + column * (width + _GAP), _GAP + row * (height + _GAP)), (width, height))
    return grid


def grey_picture(size: tuple[int, int]) -> Image.Image:
    """Return what is drawn for an image that cannot be opened."""
    return Image.new("RGB", size, _GREY)


def _paste(sheet: Image.Image, picture: Image.Image, corner: tuple[int, int], room: tuple[int, int]) -> None:
    """Draw a picture in the middle of its room."""
    sheet.paste(picture, (corner[0] + (room[0] - picture.width) // 2, corner[1] + (room[1] - picture.height) // 2))


def _tile(
    sheet: Image.Image,
    draw: ImageDraw.ImageDraw,
    font,
    corner: tuple[int, int],
    tile: Tile,
    color: ColorSetting,
    *,
    framed: bool,
) -> None:
    left, top = corner
    _paste(sheet, _thumbnail(tile.path, color), corner, (TILE, TILE))
    if framed:
        draw.rectangle((left - 2, top - 2, left + TILE + 1, top + TILE + 1), outline=_FRAME, width=2)
    draw.text((left, top + TILE + 2), _fitting(tile.name, font), _BLACK, font)


def _more(draw: ImageDraw.ImageDraw, font, corner: tuple[int, int], hidden: int) -> None:
    left, top = corner
    draw.rectangle((left, top, left + TILE - 1, top + TILE - 1), outline=_GREY)
    draw.text((left + TILE // 2, top + TILE // 2), f"and {hidden} more", _BLACK, font, anchor="mm")


def _thumbnail(path: File, color: ColorSetting) -> Image.Image:
    """Return the image upright, at most TILE pixels a side; a grey square if it cannot be opened."""
    try:
        return decode_reduced(path.read_bytes(), path.name, color, TILE)
    except (Refused, OSError):
        return grey_picture((TILE, TILE))


def _fitting(name: str, font) -> str:
    """Return a name shortened to the width of a tile: beginning and end, which distinguish similar names."""
    name = name.encode("utf-8", "replace").decode()
    if font.getlength(name) <= TILE:
        return name
    kept = len(name)
    while kept > 2 and font.getlength(f"{name[: kept // 2]}…{name[-(kept // 2) :]}") > TILE:
        kept -= 2
    return f"{name[: kept // 2]}…{name[-(kept // 2) :]}"


# ---- encoding


def as_png(sheet: Image.Image, *, tagged: bool = False) -> bytes:
    """Return the sheet as PNG bytes. `tagged`: state that its colours are sRGB."""
    buffer, chunks = io.BytesIO(), PngInfo()
    if tagged:
        chunks.add(b"sRGB", b"\1")  # relative colorimetric
    sheet.save(buffer, "PNG", pnginfo=chunks)
    return buffer.getvalue()


def as_page(head: str, sheet: Image.Image | None, name: str) -> str:
    """Return markdown with a picture of the sheet below `head`, small enough for an event of Dagster's history."""
    picture = as_data_uri(sheet, PAGE_CHARACTERS - len(head) - 50) if sheet else None
    return f"{head}\n\n![{name}]({picture})" if picture else head


def as_data_uri(sheet: Image.Image, limit: int) -> str | None:
    """Return a JPEG data URI for markdown, as large as fits into `limit` characters; None if no size fits."""
    for scale in (1.0, 0.75, 0.5, 0.35, 0.25):
        smaller = sheet.resize((max(1, int(sheet.width * scale)), max(1, int(sheet.height * scale))))
        for quality in (80, 60, 40):
            buffer = io.BytesIO()
            smaller.save(buffer, "JPEG", quality=quality)
            uri = "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode()
            if len(uri) <= limit:
                return uri
    return None
