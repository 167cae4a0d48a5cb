"""Image resizing. Spec: docs/spec/presets.md#geometry"""

import io

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
    return np.array(Image.open(io.BytesIO(picture(width, height, form="PNG"))))


def rescaled(data, size=(64, 32), library="torch"):
    return Image.open(io.BytesIO(resized(data, stored_header(data, "x"), "x", size, library)))


@pytest.mark.parametrize(("source", "target"), SIZES)
def test_torch_is_within_a_level_or_two_of_pillow(source, target):
    pixels = rgb(*source)

    one, other = (resizer(library)(pixels, target).astype(int) for library in ("torch", "pillow"))

    assert one.shape == other.shape == (target[1], target[0], 3)
    assert np.abs(one - other).max() <= 2


def test_torch_and_pillow_agree_on_noise_at_the_edges_of_the_range():
    """Overshoot is clamped, not wrapped."""
    pixels = np.random.default_rng(0).choice(np.array([0, 255], np.uint8), (90, 120, 3))
    one, other = (resizer(library)(pixels, (64, 64)).astype(int) for library in ("torch", "pillow"))
    assert np.abs(one - other).max() <= 2


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
    def old_torch(pixels, size):
        raise NotImplementedError("Input Error: got lanczos")

    monkeypatch.setitem(resize._LIBRARIES, "torch", old_torch)

    with pytest.raises(ImagemillError, match="torch cannot resize") as error:
        check_library("torch")
    assert "choose library pillow" in str(error.value)
    check_library("pillow")
