"""Image decoding. Expected pixels are stated by hand or by the format's own definition, not taken from Pillow."""

import io
import json
import struct
import warnings
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image, ImageCms, PngImagePlugin

from imagemill.domain.inputs import FORMATS as INPUT_FORMATS
from imagemill.errors import Refused
from imagemill.formats import images as pixels
from imagemill.formats.images import (
    check_decodable,
    decode_reduced,
    decode_rgb,
    decode_stored,
    fitted_size,
    header_size,
    open_rgb,
    pixels_in_memory,
    read_facts,
    stored_header,
)
from tests.helpers.images import ROW_0_COLUMN_0, encoded, exif, png, stored_form, ycck
from tests.helpers.profiles import SRGB

HEIGHT, WIDTH = 12, 20
HEIC = Path(__file__).parents[1] / "data" / "heic"
RED, GREEN, BLUE, WHITE, GREY = (255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 255), (128, 128, 128)


def corners() -> np.ndarray:
    """uint8 (12, 20, 3): red top left, green top right, blue bottom left, white bottom right."""
    image = np.zeros((HEIGHT, WIDTH, 3), np.uint8)
    top, left = slice(None, HEIGHT // 2), slice(None, WIDTH // 2)
    bottom, right = slice(HEIGHT // 2, None), slice(WIDTH // 2, None)
    image[top, left], image[top, right], image[bottom, left], image[bottom, right] = RED, GREEN, BLUE, WHITE
    return image


def plain(colour: tuple[int, int, int]) -> np.ndarray:
    return np.full((HEIGHT, WIDTH, 3), colour, np.uint8)


# ---- orientation


@pytest.mark.parametrize("image_format", ["PNG", "JPEG", "WEBP", "TIFF"])
@pytest.mark.parametrize("orientation", ROW_0_COLUMN_0)
def test_image_comes_out_upright_for_every_exif_orientation(image_format, orientation):
    """Spec: docs/spec/stage2.md#pixels"""
    stored = Image.fromarray(stored_form(corners(), orientation))
    options = {"JPEG": {"quality": 100, "subsampling": 0}, "WEBP": {"lossless": True}}.get(image_format, {})
    rgb = decode_rgb(encoded(stored, image_format, exif=exif(orientation), **options), "photo")
    assert rgb.shape == (HEIGHT, WIDTH, 3)
    tolerance = 3 if image_format == "JPEG" else 0
    assert np.abs(rgb.astype(int) - corners()).max() <= tolerance


@pytest.mark.parametrize("image_format", ["PNG", "JPEG", "WEBP", "TIFF"])
@pytest.mark.parametrize("orientation", ROW_0_COLUMN_0)
def test_header_alone_tells_the_upright_size(tmp_path, image_format, orientation):
    """A forecast needs only this, and half of a PNG or JPEG is enough for it."""
    stored = NOISE.resize((128, 96) if orientation < 5 else (96, 128))
    data = encoded(stored, image_format, exif=exif(orientation))
    (tmp_path / "photo").write_bytes(data[: len(data) // 2] if image_format in {"PNG", "JPEG"} else data)
    assert header_size(tmp_path / "photo") == (96, 128)


def test_header_of_no_image_is_refused_and_a_missing_file_is_not(tmp_path):
    (tmp_path / "photo").write_bytes(b"no image")
    (tmp_path / "flat").write_bytes(encoded(Image.new("RGB", (100, 7))))
    for name, reason in {"photo": "undecodable", "flat": "too_small"}.items():
        with pytest.raises(Refused) as caught:
            header_size(tmp_path / name)
        assert caught.value.reason == reason
    with pytest.raises(FileNotFoundError):
        header_size(tmp_path / "missing")


@pytest.mark.parametrize("orientation", [0, 9, 65535])
def test_orientation_that_exif_does_not_define_leaves_the_image_as_stored(orientation):
    np.testing.assert_array_equal(
        decode_rgb(encoded(Image.fromarray(corners()), exif=exif(orientation)), "photo"), corners()
    )


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "broken", [b"Exif\0\0", b"Exif\0\0MM\0*\xff\xff\xff\xff", b"Exif\0\0II*\0\x08\0\0\0\xff\xff", b"garbage"]
)
def test_broken_exif_does_not_cost_the_image(broken):
    """The pixels are good, and viewers show them."""
    data = encoded(Image.fromarray(corners()), "JPEG", quality=100, subsampling=0, exif=broken)
    assert np.abs(decode_rgb(data, "photo").astype(int) - corners()).max() <= 3


# ---- modes


def test_pixels_are_rgb_bytes_that_a_tensor_may_share():
    """uint8 (H, W, 3), C order, writable: `torch.from_numpy` warns otherwise."""
    rgb = decode_rgb(encoded(Image.fromarray(corners())), "photo")
    assert rgb.dtype == np.uint8
    assert rgb.flags.c_contiguous
    assert rgb.flags.writeable
    np.testing.assert_array_equal(rgb, corners())


def test_grey_becomes_three_equal_channels():
    np.testing.assert_array_equal(decode_rgb(encoded(Image.new("L", (WIDTH, HEIGHT), 128)), "photo"), plain(GREY))


@pytest.mark.parametrize(("bit", "expected"), [(0, (0, 0, 0)), (1, WHITE)])
def test_one_bit_becomes_black_and_white(bit, expected):
    np.testing.assert_array_equal(decode_rgb(encoded(Image.new("1", (WIDTH, HEIGHT), bit)), "photo"), plain(expected))


def test_palette_is_looked_up():
    image = Image.new("P", (WIDTH, HEIGHT), 1)
    image.putpalette([*RED, *GREEN, *BLUE])
    np.testing.assert_array_equal(decode_rgb(encoded(image), "photo"), plain(GREEN))


@pytest.mark.parametrize(("index", "expected"), [(0, WHITE), (1, (127, 255, 127)), (2, BLUE)])
def test_transparent_palette_entry_is_composited_over_white(index, expected):
    """Alpha 0, 128 and 255 over red, green, blue: 255 - alpha of white shines through."""
    image = Image.new("P", (WIDTH, HEIGHT), index)
    image.putpalette([*RED, *GREEN, *BLUE])
    rgb = decode_rgb(encoded(image, transparency=bytes([0, 128, 255])), "photo")
    np.testing.assert_array_equal(rgb, plain(expected))


@pytest.mark.parametrize("alpha", [0, 1, 64, 128, 254, 255])
def test_alpha_is_composited_over_white(alpha):
    """result = colour · alpha + white · (1 - alpha), to the nearest level. Spec: docs/spec/stage2.md#pixels"""
    rgb = decode_rgb(encoded(Image.new("RGBA", (WIDTH, HEIGHT), (200, 100, 0, alpha))), "photo")
    expected = np.rint(np.array([200, 100, 0]) * alpha / 255 + 255 * (1 - alpha / 255))
    assert np.abs(rgb.astype(int) - expected).max() <= 1
    if alpha in {0, 255}:
        np.testing.assert_array_equal(rgb, plain(WHITE if alpha == 0 else (200, 100, 0)))


def test_grey_with_alpha_is_composited_over_white():
    np.testing.assert_array_equal(
        decode_rgb(encoded(Image.new("LA", (WIDTH, HEIGHT), (0, 128))), "photo"), plain((127, 127, 127))
    )


@pytest.mark.parametrize("mode", ["L", "RGB"])
def test_single_transparent_colour_becomes_white(mode):
    """PNG's tRNS chunk for images without a palette."""
    image = Image.fromarray(corners()).convert(mode)
    transparent = image.getpixel((0, 0))
    rgb = decode_rgb(encoded(image, transparency=transparent), "photo")
    np.testing.assert_array_equal(rgb[0, 0], WHITE)
    np.testing.assert_array_equal(rgb[0, -1], np.asarray(image.convert("RGB"))[0, -1])


@pytest.mark.parametrize(
    ("cmyk", "expected"),
    [((0, 0, 0, 0), WHITE), ((0, 0, 0, 255), (0, 0, 0)), ((0, 255, 255, 0), RED), ((255, 255, 0, 0), BLUE)],
)
@pytest.mark.parametrize("image_format", ["TIFF", "JPEG"])
def test_inks_become_light(cmyk, expected, image_format):
    """No ink is white, black ink black, magenta and yellow make red, cyan and magenta blue."""
    rgb = decode_rgb(encoded(Image.new("CMYK", (WIDTH, HEIGHT), cmyk), image_format), "photo")
    assert np.abs(rgb.astype(int) - expected).max() <= (3 if image_format == "JPEG" else 0)


@pytest.mark.parametrize("colour", [RED, GREEN, BLUE, WHITE, (0, 0, 0), (200, 100, 50)])
def test_inverted_ycck_becomes_light(colour):
    """The form that Photoshop writes for print: inverted inks, three of them as luma and chroma.

    Reference: Adobe Technical Note 5116.
    """
    rgb = decode_rgb(ycck(WIDTH, HEIGHT, colour), "photo")
    assert np.abs(rgb.astype(int) - colour).max() <= 4


SIXTEEN_BIT = [(0, 0), (257, 1), (32896, 128), (65278, 254), (65535, 255)]


@pytest.mark.parametrize(("sample", "expected"), SIXTEEN_BIT)
def test_sixteen_bit_grey_is_scaled_not_clipped(sample, expected):
    """v · 257 is the 16-bit form of v. Spec: docs/spec/stage2.md#pixels"""
    data = png(WIDTH, HEIGHT, 16, 0, struct.pack(">H", sample) * WIDTH * HEIGHT)
    np.testing.assert_array_equal(decode_rgb(data, "photo"), plain((expected,) * 3))


@pytest.mark.parametrize(("sample", "expected"), SIXTEEN_BIT)
def test_sixteen_bit_colour_is_scaled_not_clipped(sample, expected):
    data = png(WIDTH, HEIGHT, 16, 2, struct.pack(">HHH", sample, 0, 65535) * WIDTH * HEIGHT)
    np.testing.assert_array_equal(decode_rgb(data, "photo"), plain((expected, 0, 255)))


@pytest.mark.parametrize("colour_type", [0, 2])
def test_sixteen_bit_grey_and_colour_agree_on_every_level(colour_type):
    """Within one level of v / 257 for all 65,536 values, and the same for both."""
    levels = np.arange(65536, dtype=">u2").repeat(3 if colour_type == 2 else 1)
    rgb = decode_rgb(png(256, 256, 16, colour_type, levels.tobytes()), "photo")
    exact = np.arange(65536).reshape(256, 256, 1) / 257
    assert np.abs(rgb - exact).max() <= 1
    np.testing.assert_array_equal(rgb[..., 0].ravel(), np.arange(65536) // 256)


@pytest.mark.parametrize(("alpha", "expected"), [(0, WHITE), (65535, (128, 128, 128))])
def test_sixteen_bit_alpha_is_composited_over_white(alpha, expected):
    data = png(WIDTH, HEIGHT, 16, 4, struct.pack(">HH", 32896, alpha) * WIDTH * HEIGHT)
    np.testing.assert_array_equal(decode_rgb(data, "photo"), plain(expected))


def test_transparent_sixteen_bit_grey_is_matched_at_sixteen_bits():
    """The tRNS sample names one of 65,536 levels; its neighbour, equal in 8 bits, stays."""
    row = struct.pack(">HH", 1000, 1001) * (WIDTH // 2)
    rgb = decode_rgb(png(WIDTH, HEIGHT, 16, 0, row * HEIGHT, (b"tRNS", struct.pack(">H", 1000))), "photo")
    np.testing.assert_array_equal(rgb[0, :2], [WHITE, (3, 3, 3)])


@pytest.mark.parametrize("transparent", [(1000, 2000, 3000), (255, 255, 255), (65535, 0, 40000)])
def test_transparent_sixteen_bit_colour_becomes_white_and_others_do_not(transparent):
    """tRNS names a colour at 16 bits; one whose low bytes alone are the same is another colour."""
    other = tuple(sample >> 8 | (sample & 255) << 8 for sample in transparent)
    other = other if other != transparent else (40_000, 0, 0)
    row = (struct.pack(">HHH", *transparent) + struct.pack(">HHH", *other)) * (WIDTH // 2)
    rgb = decode_rgb(png(WIDTH, HEIGHT, 16, 2, row * HEIGHT, (b"tRNS", struct.pack(">HHH", *transparent))), "photo")
    np.testing.assert_array_equal(rgb[0, :2], [WHITE, [sample >> 8 for sample in other]])


# ---- colour profiles


@pytest.mark.parametrize("image_format", ["PNG", "JPEG", "WEBP", "TIFF"])
@pytest.mark.parametrize(
    "profile", [b"no profile", bytes(200), b"x" * 3_000_000], ids=["text", "zeros", "three megabytes"]
)
def test_colour_profile_changes_no_pixel_and_a_broken_one_costs_no_image(image_format, profile):
    """Stored values are kept, independent of the profile."""
    options = {"JPEG": {"quality": 100, "subsampling": 0}, "WEBP": {"lossless": True}}.get(image_format, {})
    rgb = decode_rgb(encoded(Image.fromarray(corners()), image_format, icc_profile=profile, **options), "photo")
    assert np.abs(rgb.astype(int) - corners()).max() <= (3 if image_format == "JPEG" else 0)


def test_profile_of_another_colour_space_changes_no_pixel():
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("LAB")).tobytes()
    np.testing.assert_array_equal(
        decode_rgb(encoded(Image.fromarray(corners()), icc_profile=profile), "photo"), corners()
    )


@pytest.mark.parametrize("kind", [b"iCCP", b"zTXt", b"iTXt"])
@pytest.mark.parametrize("content", [b"not deflated", zlib.compress(bytes(2 << 20)), zlib.compress(b"x" * 100)[:-4]])
def test_metadata_of_a_png_costs_no_image(kind, content):
    """It may be broken, cut off, or longer than Pillow's limit: editors write megabytes of history there."""
    head = {b"iCCP": b"name\0\0", b"zTXt": b"key\0\0", b"iTXt": b"key\0\1\0\0\0"}[kind]
    data = png(WIDTH, HEIGHT, 8, 2, corners().tobytes(), (kind, head + content))
    np.testing.assert_array_equal(decode_rgb(data, "photo"), corners())


@pytest.mark.parametrize("mode", ["I", "F"])
def test_samples_without_an_agreed_range_are_refused(mode):
    """A 32-bit TIFF does not define which value is white, and a black sample would be worse than none."""
    with pytest.raises(Refused, match="no agreed range") as refusal:
        decode_rgb(encoded(Image.new(mode, (WIDTH, HEIGHT), 1), "TIFF"), "photo")
    assert refusal.value.reason == "undecodable"


@pytest.mark.parametrize("image_format", ["GIF", "WEBP", "PNG", "MPO", "TIFF"])
def test_first_frame_of_several_is_taken(image_format):
    frames = [Image.new("RGB", (WIDTH, HEIGHT), colour) for colour in (RED, BLUE)]
    options = {"GIF": {}, "WEBP": {"lossless": True}, "MPO": {"quality": 100}}.get(image_format, {})
    rgb = decode_rgb(encoded(frames[0], image_format, save_all=True, append_images=frames[1:], **options), "photo")
    assert np.abs(rgb.astype(int) - RED).max() <= 3


# ---- refusals


def refusal_of(data: bytes) -> Refused:
    with pytest.raises(Refused) as caught:
        decode_rgb(data, "photo.jpg")
    refusal = caught.value
    assert refusal.where == "photo.jpg"
    assert refusal.do
    return refusal


NOISE = Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8))


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"not an image at all", id="text"),
        pytest.param(bytes(4096), id="zeros"),
        pytest.param(b"<svg xmlns='http://www.w3.org/2000/svg'/>", id="svg"),
        pytest.param(
            b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 64 64\n", id="eps, which Pillow hands to another program"
        ),
        pytest.param(encoded(NOISE, "JPEG")[:-500], id="truncated jpeg"),
        pytest.param(encoded(NOISE, "PNG")[:-500], id="truncated png"),
        pytest.param(encoded(NOISE, "WEBP", lossless=True)[:-500], id="truncated webp"),
        pytest.param(encoded(NOISE, "JPEG")[:20], id="header only"),
    ],
)
def test_file_that_is_no_whole_image_is_refused_as_undecodable(data):
    """Spec: docs/spec/conventions.md#no-silent-loss"""
    refusal = refusal_of(data)
    assert refusal.reason == "undecodable"
    assert "photo.jpg" in str(refusal)


@pytest.mark.filterwarnings("ignore")
@given(st.binary(max_size=200), st.integers(0, 5), st.data())
@settings(max_examples=100, deadline=None)
def test_damaged_bytes_are_decoded_or_refused_and_nothing_else(garbage, which, data):
    """One bad item never stops the others: for any bytes the caller gets pixels or Refused."""
    whole = encoded(NOISE, ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF"][which])
    at = data.draw(st.integers(0, len(whole)))
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(pixels, "MAX_PIXELS", 10**6)  # a damaged header may claim far more
            rgb = decode_rgb(whole[:at] + garbage + whole[at + len(garbage) :], "photo")
    except Refused as refusal:
        assert refusal.reason in {"undecodable", "too_small", "too_large"}
    else:
        assert rgb.dtype == np.uint8
        assert rgb.shape[2:] == (3,)


@pytest.mark.parametrize(("width", "height"), [(7, 100), (100, 7), (1, 1)])
def test_side_under_eight_pixels_is_refused(width, height):
    """A VAE latent of such an image has no cell. Spec: docs/spec/stage2.md#vae-latents"""
    refusal = refusal_of(encoded(Image.new("RGB", (width, height))))
    assert refusal.reason == "too_small"
    assert f"{width}x{height}" in refusal.what


def test_side_of_eight_pixels_is_enough():
    assert decode_rgb(encoded(Image.new("RGB", (8, 9))), "photo").shape == (9, 8, 3)


@pytest.mark.parametrize(("width", "height"), [(14_000, 13_000), (30_000, 20_000), (2**31 - 1, 2**31 - 1)])
@pytest.mark.parametrize("as_error", [False, True])
def test_decompression_bomb_is_refused_before_it_is_unpacked(width, height, as_error):
    """A small file may demand any amount of memory. Cases: just over our limit, over twice of it, and the maximum of PNG."""
    with warnings.catch_warnings():
        warnings.simplefilter("error" if as_error else "ignore")
        assert refusal_of(png(width, height, 8, 2, rows=b"")).reason == "too_large"


def test_pillow_has_its_own_limits_again_once_no_thread_has_an_image_open():
    """Other code of the process may rely on them. A thread that ends first does not restore them for the others."""
    theirs = Image.MAX_IMAGE_PIXELS, PngImagePlugin.MAX_TEXT_CHUNK
    ours = pixels.MAX_PIXELS, PngImagePlugin.MAX_TEXT_MEMORY
    with pixels._opened(encoded(NOISE), "first"):
        with ThreadPoolExecutor(1) as pool:
            pool.submit(decode_rgb, encoded(NOISE), "second").result()
        assert ours == (Image.MAX_IMAGE_PIXELS, PngImagePlugin.MAX_TEXT_CHUNK)
    assert refusal_of(b"no image").reason == "undecodable"
    assert theirs == (Image.MAX_IMAGE_PIXELS, PngImagePlugin.MAX_TEXT_CHUNK)


def test_image_at_the_limit_is_decoded(monkeypatch):
    """The limit itself is allowed; one row more is not."""
    monkeypatch.setattr(pixels, "MAX_PIXELS", 64 * 64)
    assert decode_rgb(encoded(NOISE), "photo").shape == (64, 64, 3)
    assert refusal_of(encoded(NOISE.resize((64, 65)))).reason == "too_large"


@pytest.mark.parametrize("error", [MemoryError(), OSError("out of memory error when reading image file")])
def test_lack_of_memory_is_no_refusal(monkeypatch, error):
    """Errors of disk and memory are failures, which are retried. Spec: docs/spec/conventions.md#refused-and-failed"""

    def fail(*_args, **_options):
        raise error

    monkeypatch.setattr(Image, "open", fail)
    with pytest.raises(MemoryError):
        decode_rgb(b"any", "photo")


def test_disk_error_is_no_refusal(tmp_path):
    """If the file cannot be read, the OSError propagates, and the next run retries."""
    with pytest.raises(FileNotFoundError):
        open_rgb(tmp_path / "missing.jpg")
    with pytest.raises(IsADirectoryError):
        open_rgb(tmp_path)


def test_file_on_disk_decodes_like_its_bytes(tmp_path):
    path = tmp_path / "photo.png"
    path.write_bytes(encoded(Image.fromarray(corners())))
    np.testing.assert_array_equal(open_rgb(path), corners())


def test_real_photographs_decode_to_their_annotated_size(coco128):
    """128 photographs, some of them grey; the annotations state width and height."""
    sizes = {
        i["file_name"]: (i["height"], i["width"], 3)
        for i in json.loads((coco128 / "instances_train2017.json").read_bytes())["images"]
    }
    photos = sorted((coco128 / "images").rglob("*.jpg"))
    assert len(photos) == 128
    for photo in photos:
        rgb = open_rgb(photo)
        assert rgb.shape == sizes.get(photo.name, rgb.shape), photo.name
        assert rgb.std() > 1, photo.name


# ---- scaled down

# Formats with an orientation that are written without loss, and JPEG, which is reduced while it is decoded.
ORIENTED = {"PNG": {}, "WEBP": {"lossless": True}, "TIFF": {}, "JPEG": {"quality": 95}}


def smooth(width: int, height: int) -> np.ndarray:
    """uint8 (H, W, 3): red grows from left to right, green from top to bottom."""
    y, x = np.mgrid[:height, :width]
    return np.stack([x * 255 // width, y * 255 // height, np.full_like(x, 90)], axis=2).astype(np.uint8)


@st.composite
def sizes_with_boxes(draw, least=8, most=120):
    """A size (width, height), and a box inside it whose sides have at least half of `least`, at most 3 to 1."""
    width, height = draw(st.integers(least, most)), draw(st.integers(least, most))
    sides = [draw(st.integers(least // 2, side)) for side in (width, height)]
    sides = [min(side, 3 * min(sides)) for side in sides]
    left, top = (draw(st.integers(0, whole - side)) for whole, side in zip((width, height), sides, strict=True))
    return (width, height), (left, top, left + sides[0], top + sides[1])


@pytest.mark.parametrize("form", ORIENTED)
@given(sizes_with_boxes(), st.sampled_from(list(ROW_0_COLUMN_0)))
@settings(max_examples=40, deadline=None)
def test_part_at_its_own_size_has_the_pixels_of_the_decoded_image(form, given_size, orientation):
    """For each format and orientation, the box is one of the upright picture."""
    (width, height), (left, top, right, bottom) = given_size
    stored = Image.fromarray(stored_form(smooth(width, height), orientation))
    data = encoded(stored, form, exif=exif(orientation), **ORIENTED[form])
    expected = decode_rgb(data, "photo")

    np.testing.assert_array_equal(np.asarray(decode_reduced(data, "photo", "srgb", max(width, height))), expected)
    made = decode_reduced(data, "photo", "srgb", (right - left, bottom - top), (left, top, right, bottom))
    np.testing.assert_array_equal(np.asarray(made), expected[top:bottom, left:right])


STORED = {2: 0, 3: 3, 4: 1, 5: 5, 6: 2, 7: 6, 8: 4}  # orientation -> Image.Transpose from the upright picture


def edge_in(profile: np.ndarray) -> float:
    """Return the place of the edge in a row of values, as a share of its length: light at the beginning, dark at the end."""
    light, dark = profile[0], profile[-1]
    return float((profile - dark).mean() / (light - dark))


@given(
    sizes_with_boxes(least=100, most=900),
    st.integers(1, 8),
    st.integers(72, 300),
    st.floats(0.3, 0.7),
    st.floats(0.3, 0.7),
)
@example(((2001, 1203), (0, 0, 2001, 1203)), 1, 240, 0.7, 0.7)  # the last eighth of a column and row is partly outside
@settings(max_examples=60, deadline=None)
def test_reduced_jpeg_keeps_every_place_within_a_pixel_of_the_photograph(given_size, orientation, longest, right, down):
    """Edges in the photograph are found in the part at the same place."""
    (width, height), (left, top, box_right, bottom) = given_size
    wide, high = box_right - left, bottom - top
    x, y = round(right * wide), round(down * high)
    # Greys, because the filter would exceed black and white.
    upright = np.full((height, width, 3), 60, np.uint8)
    upright[:, : left + x, 0] = 200
    upright[: top + y, :, 1] = 200
    stored = Image.fromarray(upright)
    stored = stored.transpose(Image.Transpose(STORED[orientation])) if orientation > 1 else stored
    data = encoded(stored, "JPEG", exif=exif(orientation), quality=98, subsampling=0)

    made = np.asarray(decode_reduced(data, "photo", "srgb", longest, (left, top, box_right, bottom)), float)

    assert made.shape[:2] == fitted_size((wide, high), longest)[::-1]
    assert abs(edge_in(made[:, :, 0].mean(0)) * wide - x) <= 1
    assert abs(edge_in(made[:, :, 1].mean(1)) * high - y) <= 1


def test_jpeg_is_reduced_while_it_is_decoded_as_far_as_the_fitted_size_allows(monkeypatch):
    """4000 x 1000 to 256: an eighth is 500 x 125, more than the fitted 256 x 64. A square of 256 would allow a third only."""
    loaded, to_rgb = [], pixels._to_rgb
    monkeypatch.setattr(
        pixels, "_to_rgb", lambda image, conversion: loaded.append(image.size) or to_rgb(image, conversion)
    )

    made = decode_reduced(encoded(Image.new("RGB", (4000, 1000)), "JPEG"), "photo", "srgb", 256)

    assert loaded == [(500, 125)]
    assert made.size == (256, 64)


def test_reduced_picture_has_no_metadata():
    """Pillow copies the comment of a JPEG into the next one."""
    tags = Image.Exif()
    tags.get_ifd(0x8825)[1] = "N"
    data = encoded(NOISE, "JPEG", comment=b"Sydney", exif=tags.tobytes(), dpi=(300, 300), icc_profile=SRGB)
    assert decode_reduced(data, "photo", "srgb", 32).info == {}


@pytest.mark.parametrize("form", ["PNG", "JPEG", "GIF", "BMP", "TIFF", "WEBP", "AVIF"])
def test_every_format_is_scaled_down(form):
    made = np.asarray(decode_reduced(encoded(Image.fromarray(smooth(300, 200)), form), "photo", "srgb", 30), float)
    assert made.shape == (20, 30, 3)
    assert np.abs(made - smooth(30, 20)).mean() < 12


def test_reduced_image_is_refused_for_the_same_reasons():
    for data in (b"", b"<html><img src=a.jpg></html>", encoded(NOISE, "JPEG")[:-500]):
        with pytest.raises(Refused) as caught:
            decode_reduced(data, "photo.jpg", "srgb", 256)
        assert caught.value.reason == "undecodable"


@pytest.mark.parametrize(
    ("form", "options", "expected"),
    [("JPEG", {}, 0), ("JPEG", {"progressive": True}, 64 * 64), ("PNG", {}, 64 * 64), ("WEBP", {}, 64 * 64)],
)
def test_only_a_jpeg_by_rows_is_never_completely_in_memory(form, options, expected):
    assert pixels_in_memory(encoded(NOISE, form, **options), "photo") == expected


@given(st.tuples(st.integers(1, 9000), st.integers(1, 9000)), st.integers(1, 2000))
def test_fitted_size_keeps_proportions_and_enlarges_nothing(size, longest):
    width, height = fitted_size(size, longest)
    assert max(width, height) == min(longest, max(size))
    assert abs(width * size[1] - height * size[0]) <= max(size)


# ---- pixels as they are stored


def _file(width, height, form="JPEG", **options):
    buffer = io.BytesIO()
    Image.effect_noise((width, height), 60).convert("RGB").save(buffer, form, **options)
    return buffer.getvalue()


def _turning(orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif


@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP"])
def test_stored_pixels_are_not_turned(form):
    """Boxes of presets refer to stored pixels. Spec: docs/spec/presets.md#layout"""
    data = _file(30, 20, form, exif=_turning(6))

    header = stored_header(data, "x")

    stored = decode_stored(data, "x")
    assert (stored.mode, stored.size) == ("RGB", (30, 20))
    assert (header.width, header.height, header.format, header.orientation, header.turned) == (30, 20, form, 6, True)
    assert not stored_header(_file(30, 20, form, exif=_turning(3)), "x").turned


def test_one_pixel_is_an_image_where_no_latent_is_made_of_it():
    stored = decode_stored(_file(1, 1), "x")
    assert (stored.mode, stored.size) == ("RGB", (1, 1))


@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP"])
def test_file_that_is_cut_is_found_without_making_its_pixels(form):
    data = _file(200, 160, form)
    check_decodable(data, "x")
    for cut in (0, 1, len(data) // 2, len(data) - 200):
        with pytest.raises(Refused):
            check_decodable(data[:cut], "x")


# ---- names


_CONTENT = {
    "JPEG": {"quality": 100, "subsampling": 0}, "PNG": {}, "WEBP": {"lossless": True}, "GIF": {}, "BMP": {}, "TIFF": {},
    "AVIF": {"quality": 100},
}  # fmt: skip


@pytest.mark.parametrize("name", [f"photo.{extension}" for extension in INPUT_FORMATS])
@pytest.mark.parametrize("form", [*_CONTENT, "HEIF"])
def test_content_decides_how_a_file_is_decoded(tmp_path, form, name):
    """A PNG named `.webp`, a HEIC named `.jpg`, and every other pair."""
    if form == "HEIF":
        pytest.importorskip("pi_heif")
        data, size = (HEIC / "srgb.heic").read_bytes(), (64, 96)
    else:
        data, size = encoded(Image.fromarray(corners()), form, **_CONTENT[form]), (HEIGHT, WIDTH)
    (tmp_path / name).write_bytes(data)

    assert open_rgb(tmp_path / name).shape == (*size, 3)
    assert header_size(tmp_path / name) == size
    assert read_facts(tmp_path / name).format == form


def test_heic_is_refused_with_the_extra_if_its_library_is_missing(monkeypatch):
    monkeypatch.setattr(pixels, "heif_is_installed", lambda: False)
    with pytest.raises(Refused, match="a HEIC picture, whose decoder is not installed") as caught:
        decode_rgb((HEIC / "srgb.heic").read_bytes(), "photo.jpg")
    assert caught.value.reason == "unsupported_type"
    assert "imagemill[heic]" in (caught.value.do or "")
