"""The approved images that scan.py finds in a listing: one, or all in little memory."""

import sys
from collections.abc import Iterable
from typing import Final

import msgspec

from imagemill.domain.ids import path_of_id
from imagemill.domain.inputs import ColorSetting
from imagemill.fs.fingerprints import FileSignature
from imagemill.packed import PackedMapping
from imagemill.store.ledger import SourceRow


class SourceFile(msgspec.Struct, frozen=True, gc=False):
    """One approved image as listed.

    Attributes:
        image_id: its id.
        file_name: its path below the folder, as on disk.
        stat: its signature.
        caption: the signatures of its caption files, joined by a space; None without one.
        changed_ns: the latest of the modification and change times of the image and its captions, in nanoseconds.
        captions: the paths of its caption files, the preferred one first.
    """

    image_id: str
    file_name: str
    stat: FileSignature
    caption: FileSignature | None
    changed_ns: int
    captions: tuple[str, ...] = ()

    def is_known(self, row: SourceRow | None, color: ColorSetting) -> bool:
        """Return whether the ledger's row has this file's state, and everything that planning needs."""
        return row is not None and row.stat == self.stat and row.is_read(color)


class SourceTable(PackedMapping[bytes, SourceFile]):
    """Approved images by id, in the order given. Each takes about 250 bytes instead of 570; its value is made at each access.

    Args:
        sources: the images, with different ids.
    """

    def __init__(self, sources: Iterable[SourceFile] = ()) -> None:
        self._packed = {sys.intern(source.image_id): _pack(source) for source in sources}

    def _unpacked(self, key: str, packed: bytes) -> SourceFile:
        image, stat, caption, changed_ns, captions = _decode(packed)
        base = _base(key)
        # The inverse of `_shortened`. A comprehension for the one caption of most images would take as long as the rest.
        image = base + image if image[0] == "." else image[1:]
        if len(captions) == 1 and captions[0][0] == ".":
            captions = (base + captions[0],)
        else:
            captions = tuple([base + each if each[0] == "." else each[1:] for each in captions])
        return SourceFile(key, image, stat, caption, changed_ns, captions)


_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(tuple[str, FileSignature, FileSignature | None, int, tuple[str, ...]]).decode


def _pack(source: SourceFile) -> bytes:
    base = _base(source.image_id)
    captions = tuple([_shortened(path, base) for path in source.captions])
    return _encode((_shortened(source.file_name, base), source.stat, source.caption, source.changed_ns, captions))


def _base(image_id: str) -> str:
    """Return what the paths of nearly every image and its captions begin with."""
    return image_id if "%" not in image_id else path_of_id(image_id) or image_id


def _shortened(path: str, base: str) -> str:
    """Return a path as its extension if it is the base with an extension, and otherwise with a slash before it."""
    return path[len(base) :] if path.startswith(base) and path[len(base) :].startswith(".") else f"/{path}"
