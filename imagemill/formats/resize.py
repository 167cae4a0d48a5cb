"""Image resizing: the bytes of one image file in, the same picture at another size out.

    library    filter                         CPU of a plain Pillow loop
    torch      lanczos (from 2.12 on)         about 1/2
    pillow     lanczos                        1

Their results are within a few levels of each other. A preset records its library and keeps it (pipeline/presets/rescale_plan.py).
Only full-size decodes are scaled: a JPEG decoder's own reduced sizes lose quality.

Images are opened in images.py; sizes are computed in domain/geometry.py.
Spec: docs/spec/presets.md#geometry
"""

import io
from collections.abc import Callable

import numpy as np
from PIL import Image

from imagemill.errors import ImagemillError, Refused, WrongUsage
from imagemill.formats.images import StoredHeader, decode_stored

QUALITY = 95
FILTER = "lanczos"
DEFAULT_LIBRARY = "torch"

# Formats of the images of presets. An MPO is a JPEG with more pictures behind the first.
FORMATS = {"JPEG": "JPEG", "MPO": "JPEG", "PNG": "PNG", "WEBP": "WEBP"}


def written_format(header: StoredHeader, name: str) -> str:
    """Return the format of a preset's file: that of the raw file's content, not of its name. Raises Refused for other formats."""
    if header.format not in FORMATS:
        raise Refused(
            "unsupported_type",
            f"a {header.format} file: presets hold JPEG, PNG and WebP",
            where=name,
            do="convert the raw image, and keep its name or correct the record",
        )
    return FORMATS[header.format]


def resized(data: bytes, header: StoredHeader, name: str, size: tuple[int, int], library: str) -> bytes:
    """Return a file with the first picture of `data` at `size` (width, height): RGB, in the same format, colour profile kept.

    Raises:
        Refused: `undecodable`, `too_large`, `unsupported_type`.
    """
    form = written_format(header, name)
    pixels = resizer(library)(decode_stored(data, name), size)
    buffer = io.BytesIO()
    options = {} if form == "PNG" else {"quality": QUALITY}
    Image.fromarray(pixels).save(buffer, form, icc_profile=header.profile, **options)
    return buffer.getvalue()


def resizer(library: str) -> Callable[[np.ndarray, tuple[int, int]], np.ndarray]:
    """Return the function of a library that scales uint8 (H, W, 3) to a size (width, height).

    It uses the library's Lanczos filter with antialiasing. Raises WrongUsage for an unknown library.
    """
    if library not in _LIBRARIES:
        raise WrongUsage(f"no library {library!r} for resizing", do=f"choose from {', '.join(_LIBRARIES)}")
    return _LIBRARIES[library]


def check_library(library: str) -> None:
    """Check that a library can resize on this machine, before anything is written.

    Raises:
        WrongUsage: for an unknown name.
        ImagemillError: if the library lacks the filter. It is never replaced by another one.
    """
    try:
        resizer(library)(np.zeros((2, 2, 3), np.uint8), (3, 3))
    except (ImportError, NotImplementedError, RuntimeError) as error:
        raise ImagemillError(
            f"{library} cannot resize with the {FILTER} filter here",
            why=str(error).partition("\n")[0],
            do="install a newer version of it, or choose library pillow for a new preset",
        ) from error


def _with_torch(pixels: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    import torch

    planes = torch.from_numpy(pixels)[None].permute(0, 3, 1, 2)  # channels last, which takes half the time
    scaled = torch.nn.functional.interpolate(planes, (size[1], size[0]), mode=FILTER, antialias=True)
    return scaled[0].permute(1, 2, 0).contiguous().numpy()


def _with_pillow(pixels: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    return np.asarray(Image.fromarray(pixels).resize(size, Image.Resampling.LANCZOS))


_LIBRARIES = {"torch": _with_torch, "pillow": _with_pillow}
