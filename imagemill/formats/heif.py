"""HEIC pictures: recognising their files, and whether they can be decoded. They are opened in images.py.

Spec: docs/spec/stage2.md#pixels
"""

from functools import cache
from importlib.util import find_spec
from typing import BinaryIO

# Brands of a HEIF file's first box; an AVIF file may have the general ones, too.
_HEIF_BRANDS = {b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"hevm", b"hevs", b"mif1", b"msf1"}
_AVIF_BRANDS = {b"avif", b"avis"}
_BRANDS_WITHIN = 256


def is_heif(file: BinaryIO) -> bool:
    """Return whether a file that is read from its beginning has the content of a HEIC picture."""
    head = file.read(_BRANDS_WITHIN)
    file.seek(0)
    if head[4:8] != b"ftyp":
        return False
    end = min(int.from_bytes(head[:4], "big"), len(head))
    brands = {head[8:12], *(head[at : at + 4] for at in range(16, end, 4))}
    return bool(brands & _HEIF_BRANDS) and not brands & _AVIF_BRANDS


@cache
def heif_is_installed() -> bool:
    """Return whether HEIC files can be decoded. The library is not imported."""
    return find_spec("pi_heif") is not None
