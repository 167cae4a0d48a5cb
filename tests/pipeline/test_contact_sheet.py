"""The sheet of thumbnails: a row per group, images upright, a grey square for a missing one."""

import base64
import io

import numpy as np
import pytest
from PIL import Image

from imagemill.pipeline.contact_sheet import PER_ROW, TILE, Row, Tile, as_data_uri, as_png, draw_sheet
from tests.helpers.profiles import P3, in_space

RED, GREEN, GREY = (220, 0, 0), (0, 160, 0), (190, 190, 190)


def picture(path, colour=RED, size=(320, 320), **options):
    Image.new("RGB", size, colour).save(path, **options)
    return path


def sheet_of(*rows):
    return draw_sheet([Row("title", tiles) for tiles in rows], empty="nothing")


def colour_at(sheet, row, place):
    """The middle of a tile."""
    height = (sheet.height - 10) // max(1, round((sheet.height - 10) / (TILE + 50)))
    return sheet.getpixel((10 + place * (TILE + 10) + TILE // 2, 10 + row * height + 20 + TILE // 2))


def near(one, other):
    return max(abs(a - b) for a, b in zip(one, other, strict=True)) < 12


def test_every_row_shows_its_pictures_in_order(tmp_path):
    red, green = picture(tmp_path / "red.png"), picture(tmp_path / "green.png", GREEN)

    sheet = sheet_of([Tile(red, "a"), Tile(green, "b")], [Tile(green, "c")])

    assert near(colour_at(sheet, 0, 0), RED)
    assert near(colour_at(sheet, 0, 1), GREEN)
    assert near(colour_at(sheet, 1, 0), GREEN)


@pytest.mark.parametrize("content", [None, b"no picture"], ids=["missing", "broken"])
def test_picture_that_cannot_be_opened_is_a_grey_field(tmp_path, content):
    path = tmp_path / "gone.png"
    if content:
        path.write_bytes(content)

    assert colour_at(sheet_of([Tile(path, "gone")]), 0, 0) == GREY


def test_picture_is_shown_upright(tmp_path):
    """EXIF orientation 6: stored lying on its left side."""
    pixels = np.zeros((100, 300, 3), np.uint8)
    pixels[:, :150] = RED
    pixels[:, 150:] = GREEN
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(pixels).save(tmp_path / "turned.png", exif=exif)

    sheet = sheet_of([Tile(tmp_path / "turned.png", "turned")])

    left = 10 + TILE // 2
    assert near(sheet.getpixel((left, 30 + 30)), RED), "the left half is at the top"
    assert near(sheet.getpixel((left, 30 + TILE - 30)), GREEN)


def test_row_that_is_too_long_ends_in_a_count(tmp_path):
    red = picture(tmp_path / "red.png")

    full = sheet_of([Tile(red, str(n)) for n in range(PER_ROW)])
    more = sheet_of([Tile(red, str(n)) for n in range(PER_ROW + 1)])

    assert full.size == more.size
    assert near(full.getpixel((full.width - 20, 60)), RED)
    assert near(more.getpixel((more.width - 20, 60)), (255, 255, 255))


def test_names_of_any_length_and_script_stay_within_their_tile(tmp_path):
    red = picture(tmp_path / "red.png")

    sheet = sheet_of([Tile(red, "x" * 300), Tile(red, "\udcff日本語"), Tile(red, "")])

    caption = np.asarray(sheet.convert("L"))[30 + TILE + 3 :, 10 + TILE : 10 + TILE + 9]
    assert caption.min() == 255, "the gap behind a long name is blank"


def test_sheet_without_groups_is_reported():
    sheet = sheet_of()

    assert np.asarray(sheet).min() < 100, "something is written"
    assert Image.open(io.BytesIO(as_png(sheet))).size == sheet.size


def test_same_sheet_gives_the_same_bytes(tmp_path):
    tiles = [Tile(picture(tmp_path / "red.png"), "a")]

    assert as_png(sheet_of(tiles)) == as_png(sheet_of(tiles))


def test_link_holds_a_picture_within_its_limit():
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (1600, 1600, 3), dtype=np.uint8))

    uri = as_data_uri(noise, 200_000)

    assert uri.startswith("data:image/jpeg;base64,")
    assert len(uri) <= 200_000
    assert Image.open(io.BytesIO(base64.b64decode(uri.partition(",")[2]))).format == "JPEG"
    assert as_data_uri(noise, 100) is None


def test_sheet_shows_the_pixels_of_the_models_and_is_tagged_as_srgb(tmp_path):
    stored = in_space(Image.new("RGB", (64, 64), (200, 40, 60)), P3)
    stored.save(tmp_path / "p3.png", icc_profile=P3)
    rows = [Row("title", [Tile(tmp_path / "p3.png", "p3")])]

    converted, as_stored = (draw_sheet(rows, empty="", color=color) for color in ("srgb", "ignore"))

    assert near(converted.getpixel((80, 110)), (200, 40, 60))
    assert as_stored.getpixel((80, 110)) == stored.getpixel((0, 0)) != converted.getpixel((80, 110))
    assert b"sRGB\1" in as_png(converted, tagged=True)
    assert b"sRGB" not in as_png(converted)
