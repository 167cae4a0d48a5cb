"""Image files built from their formats' own definitions, for tests of decoding."""

import struct
import zlib
from io import BytesIO

import numpy as np
from PIL import Image


def encoded(image: Image.Image, image_format: str = "PNG", **options) -> bytes:
    buffer = BytesIO()
    image.save(buffer, image_format, **options)
    return buffer.getvalue()


def png(width: int, height: int, bit_depth: int, colour_type: int, rows: bytes, *extra: tuple[bytes, bytes]) -> bytes:
    """Build a PNG by its specification, chunk by chunk; `rows` hold samples in network order, without filter bytes."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, bit_depth, colour_type, 0, 0, 0)
    length = len(rows) // height
    filtered = b"".join(b"\0" + rows[i : i + length] for i in range(0, len(rows), length or 1))
    middle = b"".join(chunk(kind, data) for kind, data in extra)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + middle
        + chunk(b"IDAT", zlib.compress(filtered))
        + chunk(b"IEND", b"")
    )


def exif(orientation: int) -> bytes:
    tags = Image.Exif()
    tags[0x0112] = orientation
    return tags.tobytes()


# EXIF 2.3, tag 0x0112: the sides of the upright picture at which the stored row 0 and column 0 are.
ROW_0_COLUMN_0 = {
    1: ("top", "left"),
    2: ("top", "right"),
    3: ("bottom", "right"),
    4: ("bottom", "left"),
    5: ("left", "top"),
    6: ("right", "top"),
    7: ("right", "bottom"),
    8: ("left", "bottom"),
}


def stored_form(upright: np.ndarray, orientation: int) -> np.ndarray:
    """Return an upright picture as a camera stores it with an orientation: read rows and columns from the sides EXIF names."""
    row_0, column_0 = ROW_0_COLUMN_0[orientation]
    from_side = {
        "top": lambda i: (i, None),
        "bottom": lambda i: (upright.shape[0] - 1 - i, None),
        "left": lambda i: (None, i),
        "right": lambda i: (None, upright.shape[1] - 1 - i),
    }
    turned = row_0 in {"left", "right"}
    rows, columns = (upright.shape[1], upright.shape[0]) if turned else upright.shape[:2]
    stored = np.empty((rows, columns, 3), np.uint8)
    for r in range(rows):
        for c in range(columns):
            (y1, x1), (y2, x2) = from_side[row_0](r), from_side[column_0](c)
            stored[r, c] = upright[y1 if y1 is not None else y2, x1 if x1 is not None else x2]
    return stored


def ycck(width: int, height: int, colour: tuple[int, int, int]) -> bytes:
    """Return a JPEG of one colour as Photoshop writes it for print: Adobe marker, transform 2, every ink stored inverted.

    The decoder converts luma and chroma to (R, G, B), and uses the complement for the first three stored samples; there is no
    black ink here.
    """
    r, g, b = (255 - value for value in colour)
    luma = 0.299 * r + 0.587 * g + 0.114 * b
    stored = (luma, 128 + (b - luma) * 0.564, 128 + (r - luma) * 0.713, 255)
    # Pillow inverts the inks of a CMYK JPEG as it writes them.
    inks = tuple(255 - min(255, max(0, round(value))) for value in stored)
    data = encoded(Image.new("CMYK", (width, height), inks), "JPEG", quality=100, subsampling=0)
    marker = data.index(b"Adobe")
    assert data[marker + 11] == 0, "stored as plain inks"
    return data[: marker + 11] + b"\2" + data[marker + 12 :]
