"""Photographs of a data root as small JPEGs: whole or as cropped, with the pixels that models get.

    file ──decode_reduced──> upright, sRGB, scaled down ──> JPEG without metadata ──> cache

The bytes of a file are never returned. Frames are computed in frames.py, files are decoded in formats/images.py.

Spec: docs/spec/stage2.md#pixels, docs/spec/stage2.md#colour
"""

import io
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import numpy as np
from PIL import Image

from imagemill.domain.inputs import ColorSetting, InputSettings
from imagemill.domain.latent_boxes import Box
from imagemill.domain.layout import DataRoot
from imagemill.errors import ImagemillError, Refused
from imagemill.formats.images import Size, decode_reduced, fitted_size, pixels_in_memory
from imagemill.fs.fingerprints import fingerprint
from imagemill.fs.folders import File, signed_bytes, state_of_file
from imagemill.look.cache import PictureCache
from imagemill.look.frames import Frame
from imagemill.pipeline.contact_sheet import draw_grid, grey_picture
from imagemill.store.ledger import SourceRow

QUALITY = 85

# Pictures that decoding keeps completely in memory and that have more pixels are decoded one at a time: 100 megapixels with alpha
# take 1.3 GB.
LARGE_PIXELS = 16_000_000

# Part of the names in the cache: another value makes every picture again.
_VERSION = 1


class PictureChanged(ImagemillError):
    """An image file is not the one that was read, so its recorded frame does not apply."""


class Pictures:
    """Pictures of approved images. Safe on several threads.

    Args:
        root: the data root.
        inputs: its settings, of which `color` decides how pixels are read.
        cache: where pictures are kept.
    """

    def __init__(self, root: DataRoot, inputs: InputSettings, cache: PictureCache) -> None:
        self._approved = root.approved
        self._color: ColorSetting = inputs.color
        self._cache = cache
        self._large = threading.Lock()

    def kept(self, source: SourceRow, px: int, frame: Frame | None = None) -> bytes | None:
        """Return `photograph`, or `cropped` with a frame, from the cache; None if it is not there or the file has changed.

        Raises:
            OSError: if the file cannot be looked up.
        """
        if state_of_file(self._path(source))[0] != source.stat:
            return None
        return self._cache.get(self._name(source.fingerprint, px, frame.box if frame else None))

    def photograph(self, source: SourceRow, px: int) -> bytes:
        """Return the whole photograph as JPEG bytes: upright, the longer side at most `px` pixels, never enlarged.

        Raises:
            Refused: if the file is no image that models could get.
            OSError: if the file cannot be read.
        """
        return self._kept_or_made(source, px, None)

    def cropped(self, source: SourceRow, frame: Frame, px: int) -> bytes:
        """Return the part of a photograph in a frame as JPEG bytes, as `photograph`.

        Raises:
            PictureChanged: if the file has changed since it was read.
            Refused: as `photograph`.
            OSError: as `photograph`.
        """
        return self._kept_or_made(source, px, frame)

    def montage(self, sources: Sequence[SourceRow], frames: Sequence[Frame], columns: int, px: int) -> bytes:
        """Return pictures as cropped, side by side in rows, as JPEG bytes; grey where one cannot be shown.

        Args:
            sources: of the pictures, at least one.
            frames: of the pictures, in the same order.
            columns: pictures in a row.
            px: most pixels of a picture's longer side.
        """
        pictures = [self._shown(source, frame, px) for source, frame in zip(sources, frames, strict=True)]
        return as_jpeg(draw_grid(pictures, columns))

    def cells(self, source: SourceRow, box: Box, size: Size) -> np.ndarray:
        """Return the part of a photograph in a box, scaled to a size (width, height): uint8 (height, width, 3).

        Raises:
            PictureChanged: as `cropped`.
            Refused: as `photograph`.
            OSError: as `photograph`.
        """
        data, content = self._read(source)
        _refuse_changed(source, content)
        return np.asarray(self._decode(data, source.file_name, size, box))

    def _shown(self, source: SourceRow, frame: Frame, px: int) -> Image.Image:
        try:
            return Image.open(io.BytesIO(self.cropped(source, frame, px)), formats=["JPEG"])
        except (PictureChanged, Refused, OSError):
            left, top, right, bottom = frame.box
            return grey_picture(fitted_size((right - left, bottom - top), px))

    def _kept_or_made(self, source: SourceRow, px: int, frame: Frame | None) -> bytes:
        if kept := self.kept(source, px, frame):
            return kept
        box = frame.box if frame else None
        data, content = self._read(source)
        if box:
            _refuse_changed(source, content)
        name = self._name(content, px, box)
        if kept := self._cache.get(name):
            return kept
        made = as_jpeg(self._decode(data, source.file_name, px, box))
        self._cache.put(name, made)
        return made

    def _path(self, source: SourceRow) -> File:
        return self._approved / source.file_name

    def _read(self, source: SourceRow) -> tuple[bytes, str]:
        """Return the bytes of a file and their fingerprint."""
        data, signature = signed_bytes(self._path(source))
        return data, source.fingerprint if signature == source.stat else fingerprint(data)

    def _name(self, content: str, px: int, box: Box | None) -> str:
        frame = "".join(f"-{edge}" for edge in box or ())
        return f"{content.partition(':')[2]}-{px}{frame}-{self._color}-{_VERSION}.jpg"

    def _decode(self, data: bytes, name: str, size: int | Size, box: Box | None) -> Image.Image:
        with self._turn(data, name):
            return decode_reduced(data, name, self._color, size, box)

    def _turn(self, data: bytes, name: str) -> AbstractContextManager[object]:
        """Return a lock for a picture that takes much memory, so that only one of them is decoded at a time."""
        return self._large if pixels_in_memory(data, name) > LARGE_PIXELS else nullcontext()


def _refuse_changed(source: SourceRow, content: str) -> None:
    """Raise PictureChanged if these are not the recorded contents of an image."""
    if content != source.fingerprint:
        raise PictureChanged(
            f"{source.file_name} has changed since it was read",
            where=source.file_name,
            why=f"its crop is known for the earlier picture of {source.width}x{source.height} pixels only",
            do="run `imagemill run`, which reads it again",
        )


def as_jpeg(image: Image.Image) -> bytes:
    """Return an RGB image as JPEG bytes, without metadata."""
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=QUALITY)
    return buffer.getvalue()
