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
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image

from imagemill.errors import ImagemillError, Refused, WrongUsage
from imagemill.formats.images import StoredHeader, decode_stored

if TYPE_CHECKING:
    import torch

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
    picture = resizer(library)(decode_stored(data, name), size)
    buffer, options = io.BytesIO(), {"quality": QUALITY}
    if form == "PNG":  # it has no quality, and Pillow does not write it from RGBX
        picture, options = picture.convert("RGB"), {}
    picture.save(buffer, form, icc_profile=header.profile, **options)
    return buffer.getvalue()


def resizer(library: str) -> Callable[[Image.Image, tuple[int, int]], Image.Image]:
    """Return the function of a library that scales an RGB picture to a size (width, height).

    It uses the library's Lanczos filter with antialiasing. The result has mode RGB, or RGBX, whose fourth channel has no
    meaning. Raises WrongUsage for an unknown library.
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
        resizer(library)(Image.new("RGB", (2, 2)), (3, 3))
    except (ImportError, NotImplementedError, RuntimeError) as error:
        raise ImagemillError(
            f"{library} cannot resize with the {FILTER} filter here",
            why=str(error).partition("\n")[0],
            do="install a newer version of it, or choose library pillow for a new preset",
        ) from error


def _with_torch(picture: Image.Image, size: tuple[int, int]) -> Image.Image:
    import torch

    width, height = size
    planes = _as_tensor(picture)[None].permute(0, 3, 1, 2)  # channels last, which takes half the time
    scaled = torch.nn.functional.interpolate(planes, (height, width), mode=FILTER, antialias=True)
    pixels = scaled[0].permute(1, 2, 0).contiguous().numpy()
    mode = "RGBX" if pixels.shape[2] == 4 else "RGB"
    return Image.frombuffer(mode, size, pixels, "raw", mode, 0, 1)


def _as_tensor(picture: Image.Image) -> "torch.Tensor":
    """Return the pixels of an RGB picture as uint8 (H, W, C) with C = 4, the memory of Pillow itself, or a copy with C = 3.

    Pillow gives its memory if it is in one piece, which that of a picture of more than 4 megapixels is not.
    """
    import nanoarrow
    import torch

    try:
        channels = nanoarrow.c_array(picture).child(0)
    except ValueError:
        return torch.from_numpy(np.array(picture))
    return torch.from_dlpack(channels.view().buffer(1)).view(picture.height, picture.width, 4)


def _with_pillow(picture: Image.Image, size: tuple[int, int]) -> Image.Image:
    return picture.resize(size, Image.Resampling.LANCZOS)


_LIBRARIES = {"torch": _with_torch, "pillow": _with_pillow}
