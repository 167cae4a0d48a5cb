"""Image decoding: upright 8-bit RGB pixels, or a refusal with its reason.

Colours are described and converted in formats/colour.py. Resizing and normalisation for a model belong in encoders/.
Spec: docs/spec/stage2.md#pixels, docs/spec/stage2.md#colour, docs/spec/stage2.md#vae-latents
"""

import io
import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import BinaryIO, NamedTuple

import numpy as np
from PIL import Image, PngImagePlugin

from imagemill.domain.inputs import HDR_TRANSFER, HEIF_EXTRA, SRGB, ColorSetting
from imagemill.errors import Refused
from imagemill.formats.colour import (
    Colour,
    Description,
    as_samples,
    judge,
    read_description,
    to_srgb,
)
from imagemill.formats.heif import heif_is_installed, is_heif
from imagemill.fs.folders import File, SourceFile

# Accepted formats, for any file name. Pillow opens many more, and for some it starts other programs.
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "AVIF")

# Below MIN_SIDE a VAE latent has no cell. MAX_PIXELS bounds the memory that a small file can demand: 512 MiB of RGB, the size
# that Pillow itself treats as an attack, and more than any camera produces.
MIN_SIDE = 8
MAX_PIXELS = 178_956_970

_ORIENTATION_TAG = 0x0112
_TO_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_TURNED = {5, 6, 7, 8}

# Orientations whose stored columns, or rows, begin at the opposite side of the upright picture.
_COLUMNS_REVERSED, _ROWS_REVERSED = {2, 3, 7, 8}, {3, 4, 6, 7}

# Smallest ratio of decoded to wanted size at which pixels are first averaged in blocks. A change of 3 hardly shows.
_REDUCING_GAP = 3.0


class PictureFacts(NamedTuple):
    """Facts of an image file that its header contains.

    Attributes:
        colour: the colours of the picture that is used.
        first_frame: whether the file has more pictures, which are not used.
        format: of the content, as Pillow names it.
    """

    colour: Colour = Colour()
    first_frame: bool = False
    format: str = ""

    @property
    def columns(self) -> tuple[str, str, int]:
        """State, profile and `first_frame`, as the ledger stores them."""
        return self.colour.state, self.colour.profile, int(self.first_frame)


class Decoded(NamedTuple):
    """A decoded image file. `pixels`: uint8, shape (H, W, 3), C order, writable."""

    pixels: np.ndarray
    facts: PictureFacts


def open_rgb(path: File, color: ColorSetting = SRGB) -> np.ndarray:
    """Read a file and decode it as `decode_rgb` does. OSErrors propagate; they are not treated as bad input."""
    return decode_rgb(path.read_bytes(), path.name, color)


def decode_rgb(data: bytes, name: str, color: ColorSetting = SRGB) -> np.ndarray:
    """Return the pixels of `decode`."""
    return decode(data, name, color).pixels


def decode(data: bytes, name: str, color: ColorSetting) -> Decoded:
    """Decode an image file held in memory; of an animation, the first frame; of a HEIF file, the primary image.

    Orientation is applied, colours are converted to sRGB, alpha is composited over white, 16-bit samples are scaled to 8,
    everything else is converted to RGB.

    Args:
        data: the bytes of the file.
        name: the file's name, for messages.
        color: `ignore` leaves the colours as they are stored.

    Raises:
        Refused: `undecodable`, `too_small` or `too_large`; `unsupported_type` if the format needs a library that is not
            installed; with `srgb`, `hdr_transfer`.
    """
    with _opened(data, name, MIN_SIDE) as image:
        description, facts = _facts(image, io.BytesIO(data))
        rgb = _to_rgb(image, _conversion(description, facts, name, color))
        return Decoded(np.array(_upright(rgb, _orientation(image))), facts)


def _conversion(
    description: Description | None, facts: PictureFacts, name: str, color: ColorSetting
) -> Description | None:
    """Return the description to convert a picture's colours from, None to leave them. Raises Refused, `hdr_transfer`."""
    if facts.colour.state == HDR_TRANSFER and color == SRGB:
        raise hdr_refusal(name, facts.colour)
    return description if facts.colour.converts and color == SRGB else None


def _upright(image: Image.Image, orientation: int) -> Image.Image:
    turn = _TO_UPRIGHT.get(orientation)
    return image if turn is None else image.transpose(turn)


Size = tuple[int, int]
PixelBox = tuple[int, int, int, int]


def decode_reduced(
    data: bytes, name: str, color: ColorSetting, size: int | Size, box: PixelBox | None = None
) -> Image.Image:
    """Decode an image file as `decode` does, scaled down; a JPEG is reduced while it is decoded.

    Memory is that of the decoded picture; of a JPEG, of one that is at most twice as wide and high as wanted, or an eighth of the
    file's size.

    Args:
        data: the bytes of the file.
        name: the file's name, for messages.
        color: see `decode`.
        size: longest side of the result, which is not enlarged; or its width and height.
        box: (left, top, right, bottom), the part of the upright picture, in its pixels.

    Returns:
        An RGB image without metadata.

    Raises:
        Refused: as `decode`.
    """
    with _opened(data, name, MIN_SIDE) as image:
        conversion = _conversion(*_facts(image, io.BytesIO(data)), name, color)
        whole = image.size
        scale = _draft(image, size, box)
        rgb = _to_rgb(image, conversion)
        orientation = _orientation(image)
        left, top, right, bottom = _stored_box(box, whole, orientation) if box else (0, 0, *whole)
        if isinstance(size, int):
            wanted = fitted_size((right - left, bottom - top), size)
        else:
            wanted = (size[1], size[0]) if orientation in _TURNED else size
        made = _resized(rgb, wanted, (left / scale, top / scale, right / scale, bottom / scale))
        made = _upright(made, orientation)
        made.info = {}
        return made


def _resized(image: Image.Image, size: Size, part: tuple[float, ...]) -> Image.Image:
    """Return a part of an image at a size. Pixels outside it have no influence, so far as the part ends between pixels."""
    left, top, right, bottom = math.floor(part[0]), math.floor(part[1]), math.ceil(part[2]), math.ceil(part[3])
    if (left, top, right, bottom) != (0, 0, *image.size):
        image = image.crop((left, top, right, bottom))
    box = (part[0] - left, part[1] - top, part[2] - left, part[3] - top)
    return image.resize(size, Image.Resampling.BICUBIC, box, _REDUCING_GAP)


def pixels_in_memory(data: bytes, name: str) -> int:
    """Return the number of pixels that `decode_reduced` keeps in memory: all, or none of a JPEG that is decoded row by row.

    Raises the errors of `decode_stored`.
    """
    with _opened(data, name) as image:
        # Of a progressive JPEG, the decoder keeps every coefficient.
        by_row = image.format in {"JPEG", "MPO"} and not image.info.get("progressive")
        return 0 if by_row else image.width * image.height


def fitted_size(size: Size, longest: int) -> Size:
    """Return the size with these proportions whose longer side has at most `longest` pixels; never a larger one."""
    scale = min(1.0, longest / max(size))
    return max(1, round(size[0] * scale)), max(1, round(size[1] * scale))


def _draft(image: Image.Image, size: int | Size, box: PixelBox | None) -> int:
    """Have a JPEG reduced while it is decoded, as far as the wanted size allows; return how many times."""
    part = (box[2] - box[0], box[3] - box[1]) if box else image.size
    longest = size if isinstance(size, int) else max(size)
    scale = max(1.0, max(part) / longest)
    before = image.width
    drafted = image.draft(None, (math.ceil(image.width / scale), math.ceil(image.height / scale)))
    return round(before / drafted[1][2]) if drafted else 1


def _stored_box(box: PixelBox, stored: Size, orientation: int) -> PixelBox:
    """Return a box of the upright picture as a box of the stored one, whose size is given."""
    columns, rows = (box[0], box[2]), (box[1], box[3])
    if orientation in _TURNED:
        columns, rows = rows, columns
    if orientation in _COLUMNS_REVERSED:
        columns = stored[0] - columns[1], stored[0] - columns[0]
    if orientation in _ROWS_REVERSED:
        rows = stored[1] - rows[1], stored[1] - rows[0]
    return columns[0], rows[0], columns[1], rows[1]


def read_facts(path: File) -> PictureFacts:
    """Return the facts of an image file from its header, without decoding pixels.

    Raises:
        Refused: as `decode`, but not `hdr_transfer`, whose state the facts contain.
        OSError: if the file cannot be read.
    """
    with path.open("rb") as file, _refusals(path.name), _opened_file(file, path.name) as image:
        _refuse_size(image.size, path.name, MIN_SIDE)
        return _facts(image, file)[1]


def _facts(image: Image.Image, file: BinaryIO) -> tuple[Description | None, PictureFacts]:
    """Return the colour description of an opened image, and its facts. Pixels are not decoded."""
    position = file.tell()
    description = read_description(image, file)
    colour = judge(description, image.mode)
    first_frame = _has_more_frames(image, file)
    file.seek(position)
    form = image.format or ""
    return description, PictureFacts(colour, first_frame, "JPEG" if form == "MPO" else form)


def _has_more_frames(image: Image.Image, file: BinaryIO) -> bool:
    with suppress(Exception):  # of a damaged file; decoding the first frame decides
        if image.format == "GIF":
            # Pillow reads ahead to answer, which would change the state of `image`.
            file.seek(0)
            with Image.open(io.BytesIO(file.read()), formats=["GIF"]) as other:
                return bool(getattr(other, "is_animated", False))
        return bool(getattr(image, "is_animated", False))
    return False


def decode_stored(data: bytes, name: str) -> Image.Image:
    """Decode an image file as `decode_rgb` does, without applying the orientation and without a minimum size: an RGB picture.

    Raises:
        Refused: `undecodable` or `too_large`.
    """
    with _opened(data, name) as image:
        picture = _to_rgb(image, None)
        picture.info = {}  # such as a comment, which Pillow would write into a file of these pixels
        return picture


class StoredHeader(NamedTuple):
    """Header of an image file.

    Attributes:
        width: width in pixels as stored.
        height: height in pixels as stored.
        format: Pillow's name of the format.
        orientation: the EXIF tag, 1 if it is missing.
        profile: the colour profile of the pixels that `decode_stored` returns.
    """

    width: int
    height: int
    format: str
    orientation: int
    profile: bytes | None

    @property
    def turned(self) -> bool:
        """Whether applying the orientation swaps width and height."""
        return self.orientation in _TURNED


def stored_header(data: bytes, name: str) -> StoredHeader:
    """Return the header of an image file held in memory, without decoding pixels. Raises the errors of `decode_stored`."""
    with _opened(data, name) as image:
        # Other modes are converted to RGB, to which their profile does not apply.
        profile = image.info.get("icc_profile") if image.mode in {"RGB", "RGBA", "P"} else None
        return StoredHeader(*image.size, image.format or "", _orientation(image, header_only=True), profile)


def check_decodable(data: bytes, name: str) -> None:
    """Read every compressed byte of an image file without producing all its pixels. Raises the errors of `decode_stored`."""
    with _opened(data, name) as image:
        # At an eighth of its size a JPEG is still entropy-decoded completely, in a third of the time.
        image.draft(None, (max(1, image.width // 8), max(1, image.height // 8)))
        image.load()


@contextmanager
def _opened(data: bytes, name: str, smallest: int = 1) -> Iterator[Image.Image]:
    with _refusals(name):
        if not data:
            raise _undecodable(name, "the file is empty")
        with _opened_file(io.BytesIO(data), name) as image:
            _refuse_size(image.size, name, smallest)
            yield image


def _opened_file(file: BinaryIO, name: str) -> Image.Image:
    """Open an image file whose content decides on its format. Call it within `_refusals`."""
    if not is_heif(file):
        return Image.open(file, formats=FORMATS)
    if not heif_is_installed():
        raise Refused(
            "unsupported_type",
            "a HEIC picture, whose decoder is not installed",
            where=name,
            do=f"install imagemill[{HEIF_EXTRA}], then run imagemill again",
        )
    from pi_heif import HeifImageFile

    # Read first: it closes a file that it was given open.
    return HeifImageFile(io.BytesIO(file.read()))


def header_size(path: SourceFile) -> tuple[int, int]:
    """Return (height, width) in pixels after EXIF orientation, read from the file's header without decoding pixels.

    The orientation of a PNG that stores it behind its pixels is ignored. Raises the errors of `decode_rgb`, also if the header
    cannot be read, and an OSError if the file cannot be opened.
    """
    with path.open("rb") as file, _refusals(path.name), _opened_file(file, path.name) as image:
        _refuse_size(image.size, path.name, MIN_SIDE)
        width, height = image.size
        # For a TIFF, Pillow returns the upright size itself.
        turned = image.format != "TIFF" and _orientation(image, header_only=True) in _TURNED
        return (width, height) if turned else (height, width)


class _PillowLimits:
    """Context manager, reentrant, that replaces Pillow's limits with ours while at least one thread has an image open."""

    def __init__(self) -> None:
        self._lock, self._users, self._before = threading.Lock(), 0, (Image.MAX_IMAGE_PIXELS, 0)

    def __enter__(self) -> None:
        with self._lock:
            self._users += 1
            if self._users == 1:
                self._before = Image.MAX_IMAGE_PIXELS, PngImagePlugin.MAX_TEXT_CHUNK
                # Pillow refuses a PNG if a text or the colour profile unpacks to more than 1 MiB; some editors write more.
                Image.MAX_IMAGE_PIXELS, PngImagePlugin.MAX_TEXT_CHUNK = MAX_PIXELS, PngImagePlugin.MAX_TEXT_MEMORY

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._users -= 1
            if not self._users:
                Image.MAX_IMAGE_PIXELS, PngImagePlugin.MAX_TEXT_CHUNK = self._before


_pillow_limits = _PillowLimits()


@contextmanager
def _refusals(name: str) -> Iterator[None]:
    """Apply our limits, and refuse a file if Pillow raises in this block."""
    try:
        with _pillow_limits:
            yield
    except (Refused, MemoryError):
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise _too_large(name, str(error)) from error
    except Image.UnidentifiedImageError as error:
        raise _undecodable(name, "not an image in a supported format") from error
    except Exception as error:
        if "out of memory" in str(error):  # a codec's own MemoryError
            raise MemoryError(str(error)) from error
        raise _undecodable(name, str(error) or type(error).__name__) from error


def _refuse_size(size: tuple[int, int], name: str, smallest: int) -> None:
    width, height = size
    if min(size) < smallest:
        raise Refused(
            "too_small",
            f"{width}x{height}: a side is under {smallest} pixels",
            where=name,
            do="replace it by a larger image",
        )
    if width * height > MAX_PIXELS:
        raise _too_large(name, f"{width}x{height} is more than {MAX_PIXELS} pixels")


def _to_rgb(image: Image.Image, description: Description | None) -> Image.Image:
    """Return an opened image as RGB, converted to sRGB if a description is given."""
    _transparent_at_eight_bits(image)
    image.load()
    if description is not None:
        image = _converted(image, description)
    if image.mode.startswith("I;16"):
        image = _to_8_bit(image)
    if image.mode in {"I", "F"}:
        raise ValueError(f"samples of mode {image.mode} have no agreed range")
    if image.has_transparency_data:
        return _over_white(image)
    # Converting RGB to RGB copies it: 2 of 13 ms for a megapixel photo.
    return image if image.mode == "RGB" else image.convert("RGB")


def _converted(image: Image.Image, description: Description) -> Image.Image:
    if image.mode.startswith("I;16") and "transparency" in image.info:
        alpha = _to_8_bit(image).getchannel("A")
        rgb = to_srgb(as_samples(image), description)
        rgb.putalpha(alpha)
        return rgb
    return to_srgb(as_samples(image), description)


def _to_8_bit(image: Image.Image) -> Image.Image:
    # The high byte, which Pillow itself uses for 16-bit colour, so that grey and colour files agree.
    samples = np.asarray(image)
    grey = Image.fromarray((samples >> 8).astype(np.uint8))
    if "transparency" in image.info:
        grey.putalpha(Image.fromarray((samples != image.info["transparency"]).astype(np.uint8) * 255))
    return grey


def _transparent_at_eight_bits(image: Image.Image) -> None:
    """Convert the tRNS colour of 16-bit colour to 8 bits before loading, because Pillow loads only the high bytes of the pixels.

    Otherwise Pillow would compare them with the colour's low bytes. All colours that are equal in 8 bits become transparent,
    because the original colour cannot be recovered.
    """
    if any(tile.args == "RGB;16B" for tile in getattr(image, "tile", ())) and "transparency" in image.info:
        image.info["transparency"] = tuple(sample >> 8 for sample in image.info["transparency"])


def _over_white(image: Image.Image) -> Image.Image:
    rgba = image.convert("RGBA")
    canvas = Image.new("RGB", rgba.size, "white")
    canvas.paste(rgba, mask=rgba.getchannel("A"))
    return canvas


def _orientation(image: Image.Image, *, header_only: bool = False) -> int:
    try:
        # The getexif of a PNG decodes the pixels if the header has no EXIF, to search behind them.
        exif = Image.Image.getexif(image) if header_only else image.getexif()
        return exif.get(_ORIENTATION_TAG, 1)
    except Exception:
        # Broken EXIF with good pixels: the image is used as stored, which is how viewers show it.
        return 1


def _undecodable(name: str, why: str) -> Refused:
    return Refused("undecodable", f"cannot be decoded: {why}", where=name, do="replace the file by a complete image")


def hdr_refusal(name: str, colour: Colour) -> Refused:
    """Return the refusal of a picture of high dynamic range, which has no equivalent in sRGB."""
    return Refused(
        "hdr_transfer",
        f"colours of high dynamic range: {colour.profile}",
        where=name,
        do="export it as an sRGB or Display P3 picture, or set pixels.color: ignore",
    )


def _too_large(name: str, why: str) -> Refused:
    return Refused("too_large", f"too many pixels: {why}", where=name, do="scale it down")
