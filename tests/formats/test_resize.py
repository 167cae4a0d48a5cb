"""Image resizing. Spec: docs/spec/presets.md#geometry"""

import io

import nanoarrow
import numpy as np
import pytest
from PIL import Image, ImageCms

from imagemill.errors import ImagemillError, Refused, WrongUsage
from imagemill.formats import resize
from imagemill.formats.images import stored_header
from imagemill.formats.resize import check_library, resized, resizer
from tests.helpers.public import picture

SIZES = [((101, 67), (64, 32)), ((40, 30), (64, 64)), ((300, 10), (320, 32))]


def rgb(width, height):
    return Image.open(io.BytesIO(picture(width, height, form="PNG")))


def scaled(library, image, size):
    return np.array(resizer(library)(image, size).convert("RGB")).astype(int)


def rescaled(data, size=(64, 32), library="torch"):
    return Image.open(io.BytesIO(resized(data, stored_header(data, "x"), "x", size, library)))


@pytest.mark.parametrize(("source", "target"), SIZES)
def test_torch_is_within_a_level_or_two_of_pillow(source, target):
    image = rgb(*source)

    one, other = (scaled(library, image, target) for library in ("torch", "pillow"))

    assert one.shape == other.shape == (target[1], target[0], 3)
    assert np.abs(one - other).max() <= 2


def test_torch_and_pillow_agree_on_noise_at_the_edges_of_the_range():
    """Overshoot is clamped, not wrapped."""
    image = Image.fromarray(np.random.default_rng(0).choice(np.array([0, 255], np.uint8), (90, 120, 3)))
    one, other = (scaled(library, image, (64, 64)) for library in ("torch", "pillow"))
    assert np.abs(one - other).max() <= 2


@pytest.mark.parametrize("size", [(1, 1), (37, 11), (300, 200)])
def test_pixels_are_the_same_from_the_memory_of_pillow_and_from_a_copy(monkeypatch, size):
    image = rgb(*size)
    shared = resizer("torch")(image, (64, 32))

    monkeypatch.setattr(nanoarrow, "c_array", refuse)
    copied = resizer("torch")(image, (64, 32))

    assert (shared.mode, copied.mode) == ("RGBX", "RGB")
    assert shared.convert("RGB").tobytes() == copied.tobytes()


def refuse(picture):
    raise ValueError("Image rows are not contiguous in memory.")


def test_picture_whose_memory_is_not_in_one_piece():
    image = Image.new("RGB", (2400, 2000), (10, 200, 30))
    assert scaled("torch", image, (64, 64)).reshape(-1, 3).tolist() == [[10, 200, 30]] * 64**2


@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize("library", ["torch", "pillow"])
def test_files_are_those_of_their_pixels_and_keep_no_metadata(form, library):
    """A comment of the raw file is not kept, and the bytes do not depend on how the pixels are held."""
    data, expected = picture(100, 50, form=form, comment=b"raw"), io.BytesIO()
    pixels = resizer(library)(Image.open(io.BytesIO(data)), (64, 32)).convert("RGB")

    Image.fromarray(np.array(pixels)).save(expected, form, **({} if form == "PNG" else {"quality": 95}))

    assert resized(data, stored_header(data, "x"), "x", (64, 32), library) == expected.getvalue()


@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP"])
def test_format_stays(form):
    made = rescaled(picture(100, 50, form=form))
    assert (made.format, made.size) == (form, (64, 32))


def test_jpeg_has_quality_95():
    expected = io.BytesIO()
    Image.new("RGB", (8, 8)).save(expected, "JPEG", quality=95)
    assert rescaled(picture(100, 50)).quantization == Image.open(expected).quantization


def test_no_orientation_tag_and_no_other_exif_remain():
    made = rescaled(picture(100, 50, orientation=6))
    assert (made.size, dict(made.getexif())) == ((64, 32), {})


def test_colour_profile_stays_with_its_colours():
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    assert rescaled(picture(100, 50, icc_profile=profile)).info["icc_profile"] == profile


def test_profile_of_other_colours_is_not_kept():
    buffer = io.BytesIO()
    Image.new("CMYK", (100, 50)).save(buffer, "JPEG", icc_profile=b"of CMYK")
    made = rescaled(buffer.getvalue())
    assert (made.mode, made.info.get("icc_profile")) == ("RGB", None)


@pytest.mark.parametrize("mode", ["L", "P", "1", "LA", "RGBA", "I;16"])
def test_every_mode_becomes_rgb(mode):
    buffer = io.BytesIO()
    Image.new(mode, (100, 50)).save(buffer, "PNG")
    assert rescaled(buffer.getvalue()).mode == "RGB"


def test_other_formats_are_refused_with_their_name():
    with pytest.raises(Refused, match="GIF") as refused:
        rescaled(picture(100, 50, form="GIF"))
    assert refused.value.reason == "unsupported_type"


def test_unknown_library_is_reported_with_the_known_ones():
    with pytest.raises(WrongUsage, match=r"(?s)'opencv'.*torch, pillow"):
        resizer("opencv")


def test_library_without_the_filter_is_never_replaced_by_another(monkeypatch):
    def old_torch(picture, size):
        raise NotImplementedError("Input Error: got lanczos")

    monkeypatch.setitem(resize._LIBRARIES, "torch", old_torch)

    with pytest.raises(ImagemillError, match="torch cannot resize") as error:
        check_library("torch")
    assert "choose library pillow" in str(error.value)
    check_library("pillow")
