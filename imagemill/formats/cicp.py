"""Coding-independent code points: the colour description of AVIF, HEIF (`nclx`) and PNG (`cICP`) without an ICC profile.

    code_points(file) ──primaries, transfer──> icc_profile(points) ──> an ICC profile for formats/colour.py

Reference: ITU-T H.273 (07/2024), tables 2 and 3; ISO/IEC 14496-12, 12.1.5 (`colr`); ISO/IEC 23008-12 (`pitm`, `ipma`); PNG,
third edition, 11.3.2.6 (`cICP`); ICC.1:2022, sections 7 to 10.
Spec: docs/spec/stage2.md#colour
"""

import struct
from collections.abc import Iterator
from typing import BinaryIO, Final, NamedTuple

import numpy as np

_PNG: Final = b"\x89PNG\r\n\x1a\n"

# Most bytes of a `meta` box that are read; that of a photograph has some kilobytes, with an ICC profile up to some megabytes.
_MOST_META = 16 * 1024 * 1024

_D65, _C, _DCI, _E = (0.3127, 0.3290), (0.310, 0.316), (0.314, 0.351), (1 / 3, 1 / 3)

# H.273, table 2: name, then x and y of red, green, blue and white. 2 means unspecified, which counts as BT.709.
_PRIMARIES: Final = {
    1: ("sRGB", (0.640, 0.330), (0.300, 0.600), (0.150, 0.060), _D65),
    2: ("sRGB", (0.640, 0.330), (0.300, 0.600), (0.150, 0.060), _D65),
    4: ("BT.470 M", (0.67, 0.33), (0.21, 0.71), (0.14, 0.08), _C),
    5: ("BT.470 B/G", (0.64, 0.33), (0.29, 0.60), (0.15, 0.06), _D65),
    6: ("BT.601", (0.630, 0.340), (0.310, 0.595), (0.155, 0.070), _D65),
    7: ("SMPTE 240M", (0.630, 0.340), (0.310, 0.595), (0.155, 0.070), _D65),
    8: ("film", (0.681, 0.319), (0.243, 0.692), (0.145, 0.049), _C),
    9: ("BT.2020", (0.708, 0.292), (0.170, 0.797), (0.131, 0.046), _D65),
    10: ("CIE XYZ", (1.0, 0.0), (0.0, 1.0), (0.0, 0.0), _E),
    11: ("DCI-P3", (0.680, 0.320), (0.265, 0.690), (0.150, 0.060), _DCI),
    12: ("Display P3", (0.680, 0.320), (0.265, 0.690), (0.150, 0.060), _D65),
    22: ("EBU 3213", (0.630, 0.340), (0.295, 0.605), (0.155, 0.077), _D65),
}

# The sRGB curve as an ICC parametric curve of type 3, and powers as type 0.
_SRGB_CURVE: Final = (3, (2.4, 1 / 1.055, 0.055 / 1.055, 1 / 12.92, 0.04045))
_CURVES: Final = {
    **dict.fromkeys((1, 2, 6, 13, 14, 15), ("", _SRGB_CURVE)),
    4: (", gamma 2.2", (0, (2.2,))),
    5: (", gamma 2.8", (0, (2.8,))),
    8: (", linear", (0, (1.0,))),
}
_HDR: Final = {16: "PQ", 18: "HLG"}

_D50: Final = np.array([0.9642, 1.0, 0.8249])
_BRADFORD: Final = np.array([[0.8951, 0.2664, -0.1614], [-0.7502, 1.7135, 0.0367], [0.0389, -0.0685, 1.0296]])


class CodePoints(NamedTuple):
    """A description by code points. `box`: `nclx` or `cICP`; `valid`: False if the form of the box is not supported."""

    primaries: int
    transfer: int
    box: str
    valid: bool = True

    @property
    def is_hdr(self) -> bool:
        """Whether the transfer function is PQ or HLG, which no sRGB picture can represent."""
        return self.transfer in _HDR

    @property
    def is_known(self) -> bool:
        """Whether `icc_profile` can describe the colours."""
        return self.valid and self.primaries in _PRIMARIES and self.transfer in _CURVES

    @property
    def name(self) -> str:
        """Name for people, such as `Display P3 (nclx)`."""
        primaries = _PRIMARIES[self.primaries][0] if self.primaries in _PRIMARIES else f"primaries {self.primaries}"
        if self.is_hdr:
            curve = f", {_HDR[self.transfer]}"
        else:
            curve = _CURVES[self.transfer][0] if self.transfer in _CURVES else f", transfer {self.transfer}"
        return f"{primaries}{curve} ({self.box})"

    @property
    def key(self) -> str:
        """Text that identifies the description."""
        return f"cicp:{self.primaries},{self.transfer}"


def png_code_points(file: BinaryIO) -> CodePoints | None:
    """Return the `cICP` of a PNG, None if it has none before its pixels. The file is read from its beginning."""
    file.seek(0)
    if file.read(8) != _PNG:
        return None
    while len(head := file.read(8)) == 8:
        length, kind = struct.unpack(">I4s", head)
        if kind in (b"IDAT", b"IEND") or length > 0x7FFFFFFF:
            return None
        if kind == b"cICP":
            values = file.read(length) if length == 4 else b""
            if len(values) != 4:
                return CodePoints(0, 0, "cICP", valid=False)
            # The matrix must be 0 (RGB), and narrow-range samples are not those that a decoder returns.
            return CodePoints(values[0], values[1], "cICP", valid=values[2] == 0 and values[3] == 1)
        file.seek(length + 4, 1)
    return None


def heif_code_points(file: BinaryIO) -> CodePoints | None:
    """Return the `nclx` of the primary image of an AVIF or HEIF file, None if it has none. It is read from its beginning."""
    meta = _read_meta(file)
    if meta is None:
        return None
    try:
        return _primary_nclx(meta)
    except (struct.error, IndexError):
        return None


def _read_meta(file: BinaryIO) -> memoryview | None:
    """Return the content of the file's first `meta` box, without version and flags."""
    file.seek(0)
    while len(head := file.read(8)) == 8:
        size, kind = struct.unpack(">I4s", head)
        used = 8
        if size == 1:
            large = file.read(8)
            if len(large) < 8:
                return None
            size, used = int.from_bytes(large, "big"), 16
        if kind == b"meta":
            content = file.read(_MOST_META if size == 0 else min(max(0, size - used), _MOST_META))
            return memoryview(content)[4:]
        if size < used or size > 1 << 62:  # 0: up to the end of the file
            return None
        file.seek(size - used, 1)
    return None


def _boxes(data: memoryview) -> Iterator[tuple[bytes, memoryview]]:
    """Yield type and content of each box; stop at one that does not fit."""
    at = 0
    while at + 8 <= len(data):
        size, kind = struct.unpack_from(">I4s", data, at)
        used = 8
        if size == 1 and at + 16 <= len(data):
            size, used = int.from_bytes(data[at + 8 : at + 16], "big"), 16
        elif size == 0:
            size = len(data) - at
        if size < used or at + size > len(data):
            return
        yield kind, data[at + used : at + size]
        at += size


def _primary_nclx(meta: memoryview) -> CodePoints | None:
    primary: int | None = None
    properties: list[tuple[bytes, memoryview]] = []
    associations: list[memoryview] = []
    for kind, content in _boxes(meta):
        if kind == b"pitm":
            (primary,) = struct.unpack_from(">I" if content[0] else ">H", content, 4)
        elif kind == b"iprp":
            for inner_kind, inner in _boxes(content):
                if inner_kind == b"ipco" and not properties:
                    properties = list(_boxes(inner))
                elif inner_kind == b"ipma":
                    associations.append(inner)
    for association in associations:
        for index in _associated(association, primary):
            kind, content = properties[index - 1] if 0 < index <= len(properties) else (b"", memoryview(b""))
            if kind == b"colr" and bytes(content[:4]) == b"nclx":
                primaries, transfer = struct.unpack_from(">HH", content, 4)
                return CodePoints(primaries, transfer, "nclx")
    return None


def _associated(ipma: memoryview, item: int | None) -> Iterator[int]:
    """Yield the numbers, from 1, of the properties of an item."""
    version, wide = ipma[0], ipma[3] & 1
    (count,) = struct.unpack_from(">I", ipma, 4)
    at = 8
    for _ in range(count):
        (found,) = struct.unpack_from(">I" if version else ">H", ipma, at)
        at += 4 if version else 2
        number = ipma[at]
        at += 1
        if found == item:
            form = ">H" if wide else ">B"
            for n in range(number):
                (value,) = struct.unpack_from(form, ipma, at + n * (2 if wide else 1))
                yield value & (0x7FFF if wide else 0x7F)
        at += number * (2 if wide else 1)


# ---- an ICC profile


def icc_profile(points: CodePoints) -> bytes:
    """Return an ICC profile, version 4.3, with the primaries and the curve of known code points."""
    _, red, green, blue, white = _PRIMARIES[points.primaries]
    kind, parameters = _CURVES[points.transfer][1]
    curve = b"para" + bytes(4) + struct.pack(">HH", kind, 0) + b"".join(map(_fixed, parameters))
    columns = _colorants(red, green, blue, white).T
    text = points.name.encode("utf-16-be")
    tags = {
        b"desc": b"mluc" + bytes(4) + struct.pack(">II2s2sII", 1, 12, b"en", b"US", len(text), 28) + text,
        b"wtpt": _xyz(_D50),
        **{name: _xyz(column) for name, column in zip((b"rXYZ", b"gXYZ", b"bXYZ"), columns, strict=True)},
        **dict.fromkeys((b"rTRC", b"gTRC", b"bTRC"), curve),
    }
    offset = 128 + 4 + 12 * len(tags)
    table, body = struct.pack(">I", len(tags)), b""
    for name, value in tags.items():
        table += struct.pack(">4sII", name, offset + len(body), len(value))
        body += value + bytes(-len(value) % 4)
    header = struct.pack(">I4sI4s4s4s", offset + len(body), bytes(4), 0x04300000, b"mntr", b"RGB ", b"XYZ ")
    header += bytes(12) + b"acsp" + bytes(28) + b"".join(map(_fixed, _D50)) + bytes(48)
    return header + table + body


def _fixed(value: float) -> bytes:
    return struct.pack(">i", round(value * 65536))


def _xyz(value: np.ndarray) -> bytes:
    return b"XYZ " + bytes(4) + b"".join(map(_fixed, value))


def _colorants(*chromaticities: tuple[float, float]) -> np.ndarray:
    """Return the XYZ of red, green and blue as columns, float64 (3, 3), adapted from the white point to D50 (Bradford)."""
    *primaries, white = (np.array([x, y, 1 - x - y]) for x, y in chromaticities)
    matrix, white = np.stack(primaries, axis=1), white / white[1]
    matrix = matrix * np.linalg.solve(matrix, white)
    cone = np.diag((_BRADFORD @ _D50) / (_BRADFORD @ white))
    return np.linalg.inv(_BRADFORD) @ cone @ _BRADFORD @ matrix
