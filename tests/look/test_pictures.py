"""Photographs as small JPEGs: upright, in the colours of models, as cropped, without metadata; never the bytes of a file."""

import io
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from imagemill.domain.buckets import assign_bucket
from imagemill.domain.inputs import InputSettings
from imagemill.errors import Refused
from imagemill.formats import images
from imagemill.formats.images import fitted_size, header_size, open_rgb, read_facts
from imagemill.fs.fingerprints import file_signature, fingerprint_file
from imagemill.look import pictures as module
from imagemill.look.cache import PictureCache
from imagemill.look.frames import Frame, frame_of
from imagemill.look.pictures import PictureChanged, Pictures
from imagemill.store.ledger import SourceRow
from tests.helpers.images import ROW_0_COLUMN_0, encoded, exif, stored_form
from tests.helpers.peak import peak_bytes
from tests.helpers.product import PROJECT
from tests.helpers.profiles import P3, SRGB, in_space

HEIC = Path(__file__).parents[1] / "data" / "heic"


def scene(width=300, height=200, seed=0):
    """uint8 (H, W, 3): smooth colours, the same for a seed."""
    small = np.random.default_rng(seed).integers(0, 256, (5, 6, 3), dtype=np.uint8)
    return np.asarray(Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC))


def approve(root, name, data):
    """Write an approved image; return its row as an embedding pass records it."""
    path = root.approved / name
    path.write_bytes(data)
    return source_of(path)


def source_of(path):
    height, width = header_size(path)
    facts = read_facts(path).columns
    return SourceRow(path.stem, path.name, file_signature(path), fingerprint_file(path), height, width, *facts)


def not_read(path):
    """Return the row of a file that was replaced by something that is no image after it was read."""
    return SourceRow(path.stem, path.name, file_signature(path), fingerprint_file(path), 100, 100)


def pictures_of(root, *, cache=None, color="srgb"):
    return Pictures(root, InputSettings(color=color), cache or PictureCache(None))


def opened(jpeg):
    image = Image.open(io.BytesIO(jpeg), formats=["JPEG"])
    image.load()
    return image


def pixels(jpeg):
    return np.asarray(opened(jpeg), float)


# ---- photographs


@pytest.mark.parametrize("orientation", ROW_0_COLUMN_0)
@pytest.mark.parametrize("form", ["JPEG", "PNG", "TIFF"])
def test_photograph_is_upright_and_has_the_wanted_size(data_root, form, orientation):
    stored = Image.fromarray(stored_form(scene(), orientation))
    source = approve(data_root, "photo.jpg", encoded(stored, form, exif=exif(orientation)))

    made = pixels(pictures_of(data_root).photograph(source, 150))

    assert made.shape == (100, 150, 3)
    assert np.abs(made - scene(150, 100)).mean() < 5


@pytest.mark.parametrize("px", [256, 1600])
def test_small_photograph_keeps_its_size(data_root, px):
    source = approve(data_root, "photo.png", encoded(Image.fromarray(scene(120, 90))))
    assert opened(pictures_of(data_root).photograph(source, px)).size == (120, 90)


@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "AVIF"])
def test_every_format_is_shown(data_root, form):
    source = approve(data_root, "photo.jpg", encoded(Image.fromarray(scene()), form))
    made = pixels(pictures_of(data_root).photograph(source, 60))
    assert np.abs(made - scene(60, 40)).mean() < 12


@pytest.mark.parametrize("name", ["srgb", "turned", "p3_nclx", "second_is_primary", "alpha"])
def test_heic_is_shown_as_models_get_it(data_root, name):
    pytest.importorskip("pi_heif")
    source = approve(data_root, "photo.heic", (HEIC / f"{name}.heic").read_bytes())
    expected = open_rgb(data_root.approved / "photo.heic").astype(float)

    made = pixels(pictures_of(data_root).photograph(source, 1600))

    assert made.shape == expected.shape
    assert np.abs(made - expected).mean() < 12


def block_differences(one, other):
    """Return the CIEDE2000 between the means of 8 x 8 pixels of two pictures, uint8 (H, W, 3)."""
    color = pytest.importorskip("skimage.color")

    def means(picture):
        height, width = picture.shape[0] // 8, picture.shape[1] // 8
        blocks = np.asarray(picture)[: height * 8, : width * 8].reshape(height, 8, width, 8, 3).astype(float)
        return color.rgb2lab(blocks.mean((1, 3)) / 255)

    return color.deltaE_ciede2000(means(one), means(other))


@pytest.fixture(scope="module")
def astronaut():
    skimage = pytest.importorskip("skimage")
    return Image.open(Path(skimage.__file__).parent / "data" / "astronaut.png").convert("RGB")


@pytest.mark.parametrize("form", ["JPEG", "PNG"])
@pytest.mark.parametrize("px", [256, 150])
def test_photograph_in_display_p3_has_the_colours_of_its_original(data_root, astronaut, form, px):
    """A JPEG is reduced before its colours are converted. Unconverted, the difference is several times as large."""
    options = {"JPEG": {"quality": 95, "subsampling": 0}, "PNG": {}}[form]
    wide = approve(data_root, "p3.jpg", encoded(in_space(astronaut, P3), form, icc_profile=P3, **options))
    plain = approve(data_root, "plain.jpg", encoded(astronaut, form, **options))
    converted, stored = (
        pixels(pictures_of(data_root, color=color).photograph(wide, px)) for color in ("srgb", "ignore")
    )
    expected = pixels(pictures_of(data_root).photograph(plain, px))

    assert block_differences(converted, expected).mean() < 0.5
    assert block_differences(stored, expected).mean() > 1.5


@pytest.mark.parametrize(("form", "px"), [("PNG", 256), ("JPEG", 256), ("JPEG", 60)])
def test_every_part_of_a_converted_picture_has_the_colours_of_its_original(astronaut, form, px):
    """Before the picture is encoded, which alone changes single dark blocks by up to 3."""
    options = {"JPEG": {"quality": 95, "subsampling": 0}, "PNG": {}}[form]
    wide = encoded(in_space(astronaut, P3), form, icc_profile=P3, **options)
    plain = encoded(astronaut, form, **options)

    made, expected = (np.asarray(images.decode_reduced(data, "photo", "srgb", px)) for data in (wide, plain))

    assert block_differences(made, expected).max() < 1


# ---- as cropped


@pytest.mark.parametrize("size", ["bucket", "original"])
@pytest.mark.parametrize("px", [256, 1600])
def test_cropped_photograph_is_the_crop_of_pillow(coco128, data_root, size, px):
    """`image.crop(box).resize(size, LANCZOS, reducing_gap=3.0)`; a shift by one pixel is further away in each direction.

    Spec: docs/spec/stage2.md#bucket-size
    """
    pictures = pictures_of(data_root)
    for photo in sorted((coco128 / "images").rglob("*.jpg"))[:24]:
        source = approve(data_root, photo.name, photo.read_bytes())
        frame = frame_of(source.width, source.height, assign_bucket(source.width, source.height), size)
        left, top, right, bottom = frame.box
        wanted = fitted_size((right - left, bottom - top), px)
        whole = Image.fromarray(open_rgb(photo))

        made = pixels(pictures.cropped(source, frame, px))

        def reference(across, down, whole=whole, frame=frame, wanted=wanted):
            step = (frame.box[2] - frame.box[0]) / wanted[0]
            moved = [edge + step * (across, down)[n % 2] for n, edge in enumerate(frame.box)]
            box = tuple(map(round, moved))
            return np.asarray(whole.crop(box).resize(wanted, Image.Resampling.LANCZOS, reducing_gap=3.0), float)

        def distance(across, down, made=made, reference=reference):
            return np.abs(made - reference(across, down))[2:-2, 2:-2].mean()

        assert made.shape == (wanted[1], wanted[0], 3)
        moves = [(x, y) for x in (-1, 0, 1) for y in (-1, 0, 1)]
        assert min(moves, key=lambda move: distance(*move)) == (0, 0), photo.name


@pytest.mark.parametrize("orientation", ROW_0_COLUMN_0)
@pytest.mark.parametrize("form", ["JPEG", "PNG"])
def test_frame_is_one_of_the_upright_photograph(data_root, form, orientation):
    """Reduced by 4 and turned, it is the same part."""
    upright = scene(800, 600)
    stored = Image.fromarray(upright)
    turn = {2: 0, 3: 3, 4: 1, 5: 5, 6: 2, 7: 6, 8: 4}.get(orientation)
    stored = stored if turn is None else stored.transpose(Image.Transpose(turn))
    source = approve(data_root, "photo.jpg", encoded(stored, form, exif=exif(orientation), quality=95))
    frame = Frame((101, 52, 705, 503), 0.5, 1.0)

    made = pixels(pictures_of(data_root).cropped(source, frame, 151))

    expected = Image.fromarray(upright).crop(frame.box).resize((151, 113), Image.Resampling.LANCZOS)
    assert np.abs(made - np.asarray(expected, float)).mean() < 3


# ---- what is never in a picture


def test_picture_has_no_metadata_of_its_photograph(data_root):
    """Position, comment, EXIF, XMP and profile of the photograph are not in the picture."""
    tags = Image.Exif()
    tags[0x010F] = "MakerName"
    tags.get_ifd(0x8825)[1] = "N"
    tags.get_ifd(0x8825)[2] = (47.0, 22.0, 33.0)
    image = Image.fromarray(scene())
    data = {
        "photo.jpg": encoded(
            image, "JPEG", exif=tags, comment=b"at home", xmp=b"<x:xmpmeta/>", icc_profile=SRGB, dpi=(72, 72)
        ),
        "photo.webp": encoded(image, "WEBP", exif=tags.tobytes(), xmp=b"<x:xmpmeta/>", icc_profile=SRGB),
        "photo.tif": encoded(image, "TIFF", exif=tags, icc_profile=SRGB),
    }
    pictures = pictures_of(data_root)
    for name, content in data.items():
        source = approve(data_root, name, content)
        frame = Frame((10, 10, 200, 150), 0.5, 1.0)
        made = [pictures.photograph(source, 1600), pictures.cropped(source, frame, 100)]
        made.append(pictures.montage([source], [frame], 1, 100))
        for jpeg in made:
            assert set(opened(jpeg).info) == {"jfif", "jfif_version", "jfif_unit", "jfif_density"}
            assert not any(word in jpeg for word in (b"Exif", b"at home", b"MakerName", b"xmpmeta", b"ICC_PROFILE"))
            assert jpeg != content


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"<!DOCTYPE html><html><script>alert(1)</script></html>", "undecodable"),
        (b"<svg xmlns='http://www.w3.org/2000/svg' onload='alert(1)'/>", "undecodable"),
        (b"", "undecodable"),
        (encoded(Image.fromarray(scene()), "JPEG")[:-900], "undecodable"),
        (encoded(Image.new("RGB", (7, 100))), "too_small"),
    ],
)
def test_file_that_is_no_image_is_refused(data_root, content, reason):
    path = data_root.approved / "page.jpg"
    path.write_bytes(content)
    source, pictures = not_read(path), pictures_of(data_root)
    for show in (
        lambda: pictures.photograph(source, 256),
        lambda: pictures.cropped(source, Frame((0, 0, 9, 9), 1, 1), 256),
    ):
        with pytest.raises(Refused) as caught:
            show()
        assert caught.value.reason == reason


# ---- the cache


def test_picture_is_made_once_and_then_comes_from_the_cache(data_root, monkeypatch):
    data_root.state.mkdir()
    source = approve(data_root, "photo.jpg", encoded(Image.fromarray(scene()), "JPEG"))
    frame = frame_of(300, 200, "1216x832", "original")
    first = pictures_of(data_root, cache=PictureCache(data_root.look))
    assert first.kept(source, 100) is None
    made = [first.photograph(source, 100), first.photograph(source, 50), first.cropped(source, frame, 100)]
    assert len(set(made)) == 3
    assert [first.kept(source, 100), first.kept(source, 50), first.kept(source, 100, frame)] == made

    def fail(*_):
        raise AssertionError("decoded again")

    monkeypatch.setattr(module, "decode_reduced", fail)
    again = pictures_of(data_root, cache=PictureCache(data_root.look))
    os.utime(data_root.approved / "photo.jpg")  # the same bytes with another signature
    assert again.kept(source, 100) is None
    assert [again.photograph(source, 100), again.photograph(source, 50), again.cropped(source, frame, 100)] == made
    with pytest.raises(AssertionError):
        pictures_of(data_root, cache=PictureCache(data_root.look), color="ignore").photograph(source, 100)


def test_replaced_file_is_shown_as_it_is_now_and_its_old_frame_is_not_applied(data_root):
    source = approve(data_root, "photo.png", encoded(Image.fromarray(scene())))
    pictures = pictures_of(data_root)
    old = pictures.photograph(source, 100)
    (data_root.approved / "photo.png").write_bytes(encoded(Image.fromarray(scene(100, 300, seed=1))))

    assert opened(pictures.photograph(source, 100)).size == (33, 100)
    with pytest.raises(PictureChanged, match=r"(?s)photo.png has changed.*300x200.*reads it again"):
        pictures.cropped(source, frame_of(300, 200, "1216x832", "bucket"), 100)

    (data_root.approved / "photo.png").write_bytes(encoded(Image.fromarray(scene())))
    assert pictures.photograph(source, 100) == old


def test_missing_file_is_an_error_of_the_disk_even_if_its_picture_is_kept(data_root):
    source = approve(data_root, "photo.png", encoded(Image.fromarray(scene())))
    pictures = pictures_of(data_root)
    pictures.photograph(source, 100)
    (data_root.approved / "photo.png").unlink()
    with pytest.raises(FileNotFoundError):
        pictures.photograph(source, 100)


# ---- several


def test_montage_shows_pictures_in_rows_and_grey_for_what_cannot_be_shown(data_root):
    colours = [(200, 0, 0), (0, 160, 0), (0, 0, 200)]
    sources = [
        approve(data_root, f"{n}.png", encoded(Image.new("RGB", (1216, 832), colour)))
        for n, colour in enumerate(colours)
    ]
    (data_root.approved / "2.png").write_bytes(b"<html>")
    frames = [frame_of(1216, 832, "1216x832", "bucket")] * 3

    made = opened(pictures_of(data_root).montage(sources, frames, 2, 128))

    assert made.size == (10 + 2 * 138, 10 + 2 * 98)  # 128 x 88 each
    found = [made.getpixel((10 + 64 + 138 * (n % 2), 10 + 44 + 98 * (n // 2))) for n in range(4)]
    for colour, expected in zip(found, [*colours[:2], (190, 190, 190), (255, 255, 255)], strict=True):
        assert max(abs(a - b) for a, b in zip(colour, expected, strict=True)) < 8


def test_large_pictures_that_are_decoded_completely_take_turns(data_root, monkeypatch):
    """Two PNGs of many pixels at a time would take twice the memory. JPEGs do not wait."""
    monkeypatch.setattr(module, "LARGE_PIXELS", 1000)
    inside, most, lock, decode = [], [], threading.Lock(), images.decode_reduced

    def watched(*given):
        with lock:
            inside.append(given)
            most.append(len(inside))
        made = decode(*given)
        threading.Event().wait(0.05)
        with lock:
            inside.pop()
        return made

    monkeypatch.setattr(module, "decode_reduced", watched)
    for form, expected in (("PNG", 1), ("JPEG", 4)):
        sources = [approve(data_root, f"{n}.png", encoded(Image.fromarray(scene(seed=n)), form)) for n in range(4)]
        pictures, together = pictures_of(data_root), threading.Barrier(4)
        most.clear()
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda s, p=pictures, t=together: (t.wait(), p.photograph(s, 64)), sources))
        assert max(most) <= expected
        assert (max(most) > 1) == (expected > 1)


PEAK = """
import sys
from pathlib import Path
from imagemill.formats.images import decode_reduced
from tests.helpers.peak import peak_bytes
data = Path(sys.argv[1]).read_bytes()
decode_reduced(data, "photo", "srgb", 64)
before = peak_bytes()
decode_reduced(Path(sys.argv[2]).read_bytes(), "photo", "srgb", 256)
print(peak_bytes() - before)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("form", "side", "most"), [("JPEG", 8000, 16), ("PNG", 10_000, 420)])
def test_memory_is_that_of_the_decoded_picture(tmp_path, form, side, most):
    """Megabytes: of a JPEG, an eighth of its width and height; of a PNG of 100 megapixels, four bytes per pixel once."""
    assert peak_bytes() > 0
    for name, size in (("small", 64), ("large", side)):
        Image.new("RGB", (size, size), (10, 200, 30)).save(tmp_path / name, form)
    command = [sys.executable, "-c", PEAK, str(tmp_path / "small"), str(tmp_path / "large")]
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, check=True)
    assert int(done.stdout) < most * 1e6
