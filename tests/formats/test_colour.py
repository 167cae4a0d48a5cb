"""Colours of pictures. The reference for pixels decodes with Pillow or pi-heif and converts with ImageCms.

Spec: docs/spec/stage2.md#colour
"""

import faulthandler
import io
import resource
import struct
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from imagemill.domain.inputs import BAD_PROFILE, HDR_TRANSFER, IGNORE, IS_SRGB, NO_DESCRIPTION, SRGB
from imagemill.errors import Refused
from imagemill.formats import colour as colours
from imagemill.formats.cicp import CodePoints, heif_code_points, icc_profile, png_code_points
from imagemill.formats.images import decode, decode_rgb, read_facts
from tests.helpers import profiles
from tests.helpers.images import encoded, png
from tests.helpers.profiles import ADOBE, P3, WIDE, avif_with_nclx, cmyk_profile, converted, grey_profile, over_white

HEIC = Path(__file__).parents[1] / "data" / "heic"
LOSSLESS = {"PNG": {}, "TIFF": {}, "WEBP": {"lossless": True}}
FORMATS = {**LOSSLESS, "JPEG": {"quality": 95}, "AVIF": {"quality": 90}}
SIZE = (40, 24)


def picture(mode="RGB"):
    """A picture with many colours, dark, light and saturated."""
    height, width = SIZE[1], SIZE[0]
    y, x = np.mgrid[0:height, 0:width]
    rgb = np.stack([x * 255 // (width - 1), y * 255 // (height - 1), (x * 7 + y * 11) % 256], axis=2).astype(np.uint8)
    image = Image.fromarray(rgb)
    if mode in {"RGBA", "LA"}:
        image.putalpha(Image.fromarray(((x * 5 + y * 3) % 256).astype(np.uint8)))
    return image.convert(mode)


def opened(data):
    image = Image.open(io.BytesIO(data))
    image.load()
    return image


def same(found, expected):
    np.testing.assert_array_equal(found, np.asarray(expected))


def cicp(*values):
    return b"cICP", bytes(values)


def rgb_png(*chunks):
    rows = np.asarray(picture()).tobytes()
    return png(*SIZE, 8, 2, rows, *chunks)


# ---- rule 3: pixels as a colour-managed viewer shows them


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("name", WIDE)
def test_picture_in_a_wide_space_is_converted(name, form):
    profile = WIDE[name]
    data = encoded(picture(), form, icc_profile=profile, **FORMATS[form])

    found = decode(data, "photo", SRGB)

    same(found.pixels, converted(opened(data), profile))
    assert found.facts.colour.converts
    assert not np.array_equal(found.pixels, decode_rgb(data, "photo", IGNORE)), "otherwise this test proves nothing"


@pytest.mark.parametrize("form", FORMATS)
def test_ignore_leaves_the_stored_values(form):
    data = encoded(picture(), form, icc_profile=P3, **FORMATS[form])

    found = decode(data, "photo", IGNORE)

    same(found.pixels, opened(data).convert("RGB"))
    assert found.facts == decode(data, "photo", SRGB).facts


def test_p3_of_avif_comes_from_nclx():
    data = avif_with_nclx(picture(), 12, 13, quality=90)
    found = decode(data, "photo", SRGB)
    same(found.pixels, converted(opened(data), P3))
    assert found.facts.colour.profile == "Display P3 (nclx)"


def test_p3_of_heic_comes_from_nclx():
    pi_heif = pytest.importorskip("pi_heif")
    data = (HEIC / "p3_nclx.heic").read_bytes()
    same(decode_rgb(data, "photo"), converted(pi_heif.open_heif(io.BytesIO(data)).to_pillow(), P3))


def test_profile_of_heic_is_used():
    pi_heif = pytest.importorskip("pi_heif")
    data = (HEIC / "p3_icc.heic").read_bytes()
    image = pi_heif.open_heif(io.BytesIO(data)).to_pillow()
    found = decode(data, "photo", SRGB)
    same(found.pixels, converted(image, image.info["icc_profile"]))
    assert found.facts.colour.converts


def test_p3_of_png_comes_from_cicp():
    found = decode(rgb_png(cicp(12, 13, 0, 1)), "photo", SRGB)
    same(found.pixels, converted(picture(), P3))
    assert found.facts.colour.profile == "Display P3 (cICP)"


def test_cicp_comes_before_the_profile_of_a_png():
    data = encoded(picture(), icc_profile=ADOBE)
    end = data.index(b"iCCP") - 4
    (chunk,) = rgb_png(cicp(12, 13, 0, 1)).split(b"IHDR")[1:]
    at = chunk.index(b"cICP") - 4
    data = data[:end] + chunk[at : at + 16] + data[end:]
    same(decode_rgb(data, "photo"), converted(picture(), P3))


def test_profile_comes_before_nclx():
    data = avif_with_nclx(picture(), 9, 13, quality=90, icc_profile=P3) if _has_both() else None
    if data is None:
        pytest.skip("this Pillow writes either a profile or nclx")
    same(decode_rgb(data, "photo"), converted(opened(data), P3))


def _has_both():
    data = encoded(picture(), "AVIF", icc_profile=P3)
    return b"nclx" in data and b"prof" in data


def test_grey_with_gamma_is_converted_to_equal_channels():
    profile = grey_profile(1.8)
    data = encoded(picture("L"), icc_profile=profile)
    found = decode_rgb(data, "photo")
    same(found, converted(picture("L"), profile))
    assert (found.max(axis=2) == found.min(axis=2)).all()


def test_grey_of_16_bit_with_a_profile():
    samples = np.linspace(0, 65535, SIZE[0] * SIZE[1]).astype(np.uint16).reshape(SIZE[1], SIZE[0])
    image, profile = Image.fromarray(samples), grey_profile(1.8)
    for form in ("PNG", "TIFF"):
        same(decode_rgb(encoded(image, form, icc_profile=profile), "photo"), converted(image, profile))


def test_big_endian_16_bit_tiff_with_a_profile():
    samples = np.linspace(0, 65535, SIZE[0] * SIZE[1]).astype(np.uint16).reshape(SIZE[1], SIZE[0])
    image, profile = Image.frombytes("I;16B", SIZE, samples.astype(">u2").tobytes()), grey_profile(1.8)
    data = encoded(image, "TIFF", icc_profile=profile)
    assert opened(data).mode == "I;16B"
    same(decode_rgb(data, "photo"), converted(Image.fromarray(samples), profile))


@pytest.mark.parametrize("form", ["JPEG", "TIFF"])
def test_inks_with_a_profile(form):
    profile = cmyk_profile()
    data = encoded(picture().convert("CMYK"), form, icc_profile=profile)
    same(decode_rgb(data, "photo"), converted(opened(data), profile))


def test_palette_is_looked_up_before_it_is_converted():
    image = picture().quantize(16)
    data = encoded(image, icc_profile=P3)
    same(decode_rgb(data, "photo"), converted(image.convert("RGB"), P3))


@pytest.mark.parametrize("mode", ["1", "L"])
def test_grey_with_an_rgb_profile_counts_as_equal_channels(mode):
    data = encoded(picture(mode), "PNG", icc_profile=P3)
    same(decode_rgb(data, "photo"), converted(picture(mode).convert("RGB"), P3))


def test_one_bit_with_a_grey_profile():
    profile = grey_profile(1.8)
    same(decode_rgb(encoded(picture("1"), icc_profile=profile), "photo"), converted(picture("1").convert("L"), profile))


@pytest.mark.parametrize("form", ["PNG", "TIFF", "WEBP"])
def test_alpha_is_copied_and_composited_after_conversion(form):
    image = picture("RGBA")
    data = encoded(image, form, icc_profile=P3, **({"lossless": True, "exact": True} if form == "WEBP" else {}))
    rgb = converted(image.convert("RGB"), P3)
    rgb.putalpha(image.getchannel("A"))
    same(decode_rgb(data, "photo"), over_white(rgb))


@pytest.mark.parametrize(("profile", "through"), [(grey_profile(1.8), "L"), (P3, "RGB")])
def test_grey_with_alpha(profile, through):
    image = picture("LA")
    rgb = converted(image.getchannel("L").convert(through), profile)
    rgb.putalpha(image.getchannel("A"))
    same(decode_rgb(encoded(image, icc_profile=profile), "photo"), over_white(rgb))


def test_palette_with_alpha():
    image = picture("RGBA").quantize(16)
    data = encoded(image, icc_profile=P3)
    plain = opened(data).convert("RGBA")
    rgb = converted(plain.convert("RGB"), P3)
    rgb.putalpha(plain.getchannel("A"))
    same(decode_rgb(data, "photo"), over_white(rgb))


def test_pa_of_tiff_is_converted_as_rgba():
    image = picture("RGBA").convert("PA")
    same(
        np.asarray(colours.to_srgb(colours.as_samples(image), colours.Description(P3)).getchannel("A")),
        image.convert("RGBA").getchannel("A"),
    )


@pytest.mark.parametrize("mode", ["L", "RGB"])
def test_transparent_colour_is_found_before_conversion(mode):
    image = picture(mode)
    key = image.getpixel((5, 5))
    profile = P3 if mode == "RGB" else grey_profile(1.8)
    data = encoded(image, icc_profile=profile, transparency=key)
    rgb = converted(image, profile)
    array = np.asarray(image).reshape(SIZE[1], SIZE[0], -1)
    rgb.putalpha(Image.fromarray(np.where((array == key).all(axis=2), 0, 255).astype(np.uint8)))
    same(decode_rgb(data, "photo"), over_white(rgb))


def test_transparent_level_of_16_bit_grey():
    samples = np.linspace(0, 65535, SIZE[0] * SIZE[1]).astype(np.uint16).reshape(SIZE[1], SIZE[0])
    profile, key = grey_profile(1.8), int(samples[3, 3])
    data = encoded(Image.fromarray(samples), icc_profile=profile, transparency=key)
    found = decode_rgb(data, "photo")
    assert found[3, 3].tolist() == [255, 255, 255]
    expected = np.array(converted(Image.fromarray(samples), profile))
    expected[samples == key] = 255
    same(found, expected)


def test_orientation_is_applied_once_to_converted_pixels():
    exif = Image.Exif()
    exif[0x0112] = 6
    for form in ("PNG", "TIFF", "JPEG", "WEBP", "AVIF"):
        data = encoded(picture(), form, icc_profile=P3, exif=exif.tobytes(), **FORMATS[form])
        assert decode_rgb(data, "photo").shape == (SIZE[0], SIZE[1], 3), form
        expected = converted(opened(data), P3)
        same(decode_rgb(data, "photo"), expected if form == "TIFF" else expected.transpose(Image.Transpose.ROTATE_270))


# ---- rule 4: what counts as sRGB


@pytest.mark.parametrize(
    ("profile", "mode"),
    [(profiles.SRGB, "RGB"), (profiles.SRGB, "RGBA"), (profiles.SRGB, "L"), (None, "RGB"), (None, "CMYK")],
)
def test_picture_in_srgb_keeps_every_byte(profile, mode):
    form = "TIFF" if mode == "CMYK" else "PNG"
    data = encoded(picture(mode), form, **({"icc_profile": profile} if profile else {}))

    found = decode(data, "photo", SRGB)

    same(found.pixels, decode_rgb(data, "photo", IGNORE))
    assert found.facts.colour.state == (IS_SRGB if profile else NO_DESCRIPTION)


@pytest.mark.parametrize("transfer", [1, 2, 6, 13, 14, 15])
@pytest.mark.parametrize("primaries", [1, 2])
def test_code_points_of_srgb_change_nothing(primaries, transfer):
    found = decode(rgb_png(cicp(primaries, transfer, 0, 1)), "photo", SRGB)
    assert found.facts.colour.state == IS_SRGB
    same(found.pixels, picture())


def test_profile_within_one_level_of_srgb_counts_as_srgb():
    srgb = ((0.43604, 0.22248, 0.01392), (0.38512, 0.71690, 0.09706), (0.14305, 0.06061, 0.71391))
    near = profiles.rgb_profile("nearly sRGB", srgb, profiles.SRGB_CURVE)
    far = profiles.rgb_profile("gamma 2.2", srgb, profiles.gamma(2.2))
    assert decode(encoded(picture(), icc_profile=near), "photo", SRGB).facts.colour == (IS_SRGB, "nearly sRGB")
    assert decode(encoded(picture(), icc_profile=far), "photo", SRGB).facts.colour.converts


def test_inks_never_count_as_srgb():
    assert decode(encoded(picture("CMYK"), "TIFF", icc_profile=cmyk_profile()), "photo", SRGB).facts.colour.converts


# ---- descriptions that cannot be used


NAMED = profiles.assembled(b"RGB ", {b"desc": profiles.description("x")}, device=b"nmcl")
LINK = profiles.assembled(b"RGB ", {b"desc": profiles.description("x")}, device=b"link", pcs=b"RGB ")
ABSTRACT = profiles.assembled(b"RGB ", {b"desc": profiles.description("x")}, device=b"abst")
BAD = {
    "empty": (b"\0", "RGB"), "named colours": (NAMED, "RGB"), "device link": (LINK, "RGB"), "abstract": (ABSTRACT, "RGB"),
    "too large": (P3 + bytes(4 * 1024 * 1024), "RGB"), "of inks": (cmyk_profile(), "RGB"), "of grey": (grey_profile(1.8), "RGB"),
    "no inks": (P3, "CMYK"), "cut off": (P3[:200], "RGB"), "without curves": (P3.replace(b"rTRC", b"xTRC"), "RGB"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_description_that_cannot_be_used_leaves_the_pixels(case):
    profile, mode = BAD[case]
    data = encoded(picture(mode), "TIFF", icc_profile=profile)

    found = decode(data, "photo", SRGB)

    assert found.facts.colour.state == BAD_PROFILE
    same(found.pixels, decode_rgb(data, "photo", IGNORE))


@pytest.mark.parametrize("points", [(3, 13, 0, 1), (255, 13, 0, 1), (12, 7, 0, 1), (12, 13, 1, 1), (12, 13, 0, 0)])
def test_unknown_code_points_leave_the_pixels(points):
    found = decode(rgb_png(cicp(*points)), "photo", SRGB)
    assert found.facts.colour.state == BAD_PROFILE
    same(found.pixels, picture())


@pytest.mark.parametrize(("transfer", "name"), [(16, "PQ"), (18, "HLG")])
def test_high_dynamic_range_is_refused_under_srgb_only(tmp_path, transfer, name):
    data = rgb_png(cicp(9, transfer, 0, 1))
    (tmp_path / "photo.png").write_bytes(data)

    with pytest.raises(Refused, match=name) as caught:
        decode(data, "photo", SRGB)

    assert caught.value.reason == "hdr_transfer"
    same(decode_rgb(data, "photo", IGNORE), picture())
    assert read_facts(tmp_path / "photo.png").colour.state == HDR_TRANSFER


@pytest.mark.parametrize(("transfer", "power"), [(4, 2.2), (5, 2.8), (8, 1.0)])
def test_curves_of_code_points(transfer, power):
    tags = struct.pack(">HH", 0, 0) + profiles.fixed(power)
    reference = profiles.rgb_profile("P3", profiles.DISPLAY_P3, b"para" + bytes(4) + tags)
    same(decode_rgb(rgb_png(cicp(12, transfer, 0, 1)), "photo"), converted(picture(), reference))


@pytest.mark.parametrize("primaries", [1, 4, 5, 6, 7, 8, 9, 10, 11, 12, 22])
def test_white_of_every_set_of_primaries_is_white(primaries):
    """The colorants add up to D50, so the white of the file is the white of the screen."""
    white = png(8, 8, 8, 2, b"\xff" * 8 * 8 * 3, cicp(primaries, 13, 0, 1))
    assert decode_rgb(white, "photo").min() == 255


# ---- other facts


def test_header_gives_the_same_facts(tmp_path):
    for n, (form, options) in enumerate(FORMATS.items()):
        path = tmp_path / f"{n}"
        path.write_bytes(encoded(picture(), form, icc_profile=ADOBE, **options))
        assert read_facts(path) == decode(path.read_bytes(), "photo", SRGB).facts
        assert read_facts(path).colour.profile == "Adobe RGB (1998)"


@pytest.mark.parametrize("form", ["GIF", "PNG", "WEBP", "TIFF", "AVIF"])
def test_first_frame_of_several_is_used_and_counted(tmp_path, form):
    other = Image.new("RGB", SIZE, (1, 2, 3))
    options = {"WEBP": {"lossless": True}}.get(form, {})
    several = encoded(picture(), form, save_all=True, append_images=[other], **options)
    alone = encoded(picture(), form, **options)
    (tmp_path / "photo").write_bytes(several)

    found = decode(several, "photo", SRGB)

    assert found.facts.first_frame
    assert read_facts(tmp_path / "photo").first_frame
    assert not decode(alone, "photo", SRGB).facts.first_frame
    assert np.abs(found.pixels.astype(int) - decode_rgb(alone, "photo")).mean() < 3


def test_primary_image_of_heic_is_used():
    pytest.importorskip("pi_heif")
    data = (HEIC / "second_is_primary.heic").read_bytes()
    plain = decode_rgb((HEIC / "srgb.heic").read_bytes(), "photo")
    found = decode(data, "photo", SRGB)
    assert found.facts.first_frame
    assert np.abs(found.pixels.astype(int) - plain).mean() < 3


def test_orientation_of_heic_is_applied_once():
    pytest.importorskip("pi_heif")
    turned = decode_rgb((HEIC / "turned.heic").read_bytes(), "photo")
    plain = decode_rgb((HEIC / "srgb.heic").read_bytes(), "photo")
    assert turned.shape == (96, 64, 3)
    assert np.abs(turned.astype(int) - np.rot90(plain, -1)).mean() < 3


def test_name_of_a_profile_is_one_printable_line():
    odd = profiles.rgb_profile("a\tb\x1b[31m\n" + "c" * 200, profiles.DISPLAY_P3, profiles.SRGB_CURVE)
    name = decode(encoded(picture(), icc_profile=odd), "photo", SRGB).facts.colour.profile
    assert name.startswith("a b [31m ccc")
    assert len(name) == 80


def test_transforms_are_kept_up_to_their_limit(monkeypatch):
    monkeypatch.setattr(colours, "_transforms", colours._Cache(2))
    for power in (1.1, 1.2, 1.3):
        profile = grey_profile(power)
        decode_rgb(encoded(picture("L"), icc_profile=profile), "photo")
    assert len(colours._transforms._values) == 2


def test_threads_with_many_profiles_decode_what_one_thread_does():
    """More profiles than the cache holds, each with its own pixels."""
    files = [
        encoded(picture(), icc_profile=profiles.rgb_profile(f"{n}", profiles.DISPLAY_P3, profiles.gamma(1 + n / 128)))
        for n in range(200)
    ]
    alone = [decode_rgb(data, "photo") for data in files]
    with ThreadPoolExecutor(16) as pool:
        together = list(pool.map(lambda data: decode_rgb(data, "photo"), files))
    for one, other in zip(alone, together, strict=True):
        np.testing.assert_array_equal(one, other)
    assert len({array.tobytes() for array in alone}) > 150


# ---- photographs


@pytest.mark.parametrize(("name", "limit"), [("P3", 0.3), ("Adobe RGB", 0.3), ("ProPhoto", 0.7)])
def test_photograph_in_a_wide_space_has_the_colours_of_its_original(name, limit):
    """Mean CIEDE2000; `python -m benchmarks.colour` measures five photographs and all codecs."""
    color = pytest.importorskip("skimage.color")
    skimage = pytest.importorskip("skimage")
    original = Image.open(Path(skimage.__file__).parent / "data" / "chelsea.png").convert("RGB")
    data = encoded(profiles.in_space(original, WIDE[name]), icc_profile=WIDE[name])

    def difference(pixels):
        return color.deltaE_ciede2000(color.rgb2lab(np.asarray(original)), color.rgb2lab(pixels)).mean()

    assert difference(decode_rgb(data, "photo", SRGB)) < limit
    assert difference(decode_rgb(data, "photo", IGNORE)) > 1


# ---- damaged descriptions


AVIF = avif_with_nclx(picture(), 12, 13, quality=90)
SEEDS = {
    "icc": P3,
    "cmyk": cmyk_profile(),
    "grey": grey_profile(1.8),
    "points": icc_profile(CodePoints(12, 13, "nclx")),
}


@st.composite
def damaged(draw, data):
    """Bytes with some of them replaced, removed or repeated."""
    found = bytearray(data)
    for _ in range(draw(st.integers(1, 8))):
        at = draw(st.integers(0, max(0, len(found) - 1)))
        what = draw(st.sampled_from(["byte", "word", "cut", "repeat"]))
        if what == "byte":
            found[at : at + 1] = draw(st.binary(min_size=1, max_size=1))
        elif what == "word":
            found[at : at + 4] = draw(
                st.sampled_from([b"\0\0\0\0", b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff", b"\0\0\0\x01"])
            )
        elif what == "cut":
            del found[at : at + draw(st.integers(1, 64))]
        else:
            found[at:at] = found[at : at + draw(st.integers(1, 64))]
    return bytes(found)


def decoded_or_refused(data, expected_shape=None):
    try:
        found = decode(data, "photo", SRGB)
    except Refused:
        return
    if expected_shape:
        assert found.pixels.shape == expected_shape


def check_profile(name, profile):
    mode = {"cmyk": "CMYK", "grey": "L"}.get(name, "RGB")
    decoded_or_refused(encoded(picture(mode), "TIFF", icc_profile=profile), (SIZE[1], SIZE[0], 3))


@pytest.mark.parametrize("name", SEEDS)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_damaged_profile_never_costs_the_picture(name, data):
    check_profile(name, data.draw(damaged(SEEDS[name])))


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_damaged_boxes_are_read_or_passed_over(data):
    meta = AVIF.index(b"mdat")
    broken = data.draw(damaged(AVIF[:meta])) + AVIF[meta:]
    points = heif_code_points(io.BytesIO(broken))
    assert points is None or 0 <= points.primaries <= 65535
    decoded_or_refused(broken)


@settings(max_examples=200, deadline=None)
@given(data=st.binary(max_size=300), seed=st.sampled_from([b"", b"\x89PNG\r\n\x1a\n", b"\0\0\0\x18ftypavif"]))
def test_any_bytes_have_code_points_or_none(data, seed):
    for read in (png_code_points, heif_code_points):
        assert read(io.BytesIO(seed + data)) is None or isinstance(read(io.BytesIO(seed + data)), CodePoints)


@given(primaries=st.integers(0, 65535), transfer=st.integers(0, 65535))
def test_code_points_of_an_avif_are_those_of_its_box(primaries, transfer):
    at = AVIF.index(b"nclx") + 4
    data = AVIF[:at] + struct.pack(">HH", primaries, transfer) + AVIF[at + 4 :]
    assert heif_code_points(io.BytesIO(data)) == CodePoints(primaries, transfer, "nclx")


@pytest.mark.soak
@pytest.mark.parametrize("name", [*SEEDS, "boxes"])
@settings(max_examples=2500, deadline=None)
@given(data=st.data())
def test_ten_thousand_damaged_descriptions(name, data):
    """No crash; an example that takes 30 seconds ends the process; none needs memory beyond that of the others."""
    boxes = data.draw(damaged(AVIF[: AVIF.index(b"mdat")])) if name == "boxes" else data.draw(damaged(SEEDS[name]))
    faulthandler.dump_traceback_later(30, exit=True)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        if name == "boxes":
            decoded_or_refused(boxes + AVIF[AVIF.index(b"mdat") :])
        else:
            check_profile(name, boxes)
    finally:
        faulthandler.cancel_dump_traceback_later()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 * 1024, "KiB, for a picture of a few pixels"


PEAK = """
import resource, sys
from pathlib import Path
from imagemill.formats.images import decode
data = Path(sys.argv[1]).read_bytes()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
decode(data, "photo", sys.argv[2])
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.soak
def test_conversion_needs_at_most_half_a_picture_of_memory(tmp_path):
    """The peak of decoding a photograph of 12 megapixels, with and without conversion, each in a process of its own."""
    noise = np.random.default_rng(1).integers(0, 256, (300, 400, 3), dtype=np.uint8)
    photo = Image.fromarray(noise).resize((4000, 3000))
    photo.save(tmp_path / "p3.jpg", icc_profile=P3)

    def peak(color):
        command = [sys.executable, "-c", PEAK, tmp_path / "p3.jpg", color]
        return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout) * 1024

    assert peak("srgb") - peak("ignore") <= 4000 * 3000 * 3 // 2
