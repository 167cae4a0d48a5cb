"""The archives that folders of `approved/` were unpacked from, so that two archives of one name are not mixed.

    .imagemill/imports/<16 hex digits of the folder's name>.json      {"folder": "00000", "archive": "/a/00000.tar", …}

Spec: docs/spec/stage2.md#archives
"""

import hashlib
import os
from contextlib import suppress
from pathlib import Path

import msgspec

from imagemill.domain.layout import DataRoot
from imagemill.errors import ImagemillError
from imagemill.fs.atomic import sweep_temporaries, write_if_changed
from imagemill.fs.fingerprints import fingerprint

_ENDS = 1 << 20


class ImportedArchive(msgspec.Struct, frozen=True):
    """An archive, recognised by its path or by its content.

    Attributes:
        folder: name of the folder in `approved/`.
        archive: absolute path.
        size: in bytes.
        ends: fingerprint of its first and last MiB.
    """

    folder: str
    archive: str
    size: int
    ends: str


class OtherArchive(ImagemillError):
    """The folder of an archive was unpacked from another archive of the same name."""


def record_import(root: DataRoot, archive: Path, folder: str) -> None:
    """Record that this archive is unpacked into this folder of `approved/`.

    Raises:
        OtherArchive: if the folder exists and was unpacked from another archive. Nothing is recorded then.
        OSError: if the archive cannot be read.
    """
    place = root.state / "imports" / f"{hashlib.sha256(os.fsencode(folder)).hexdigest()[:16]}.json"
    now, before = _identified(archive, folder), _read(place)
    same = before is None or before.archive == now.archive or (before.size, before.ends) == (now.size, now.ends)
    if before and not same and os.path.lexists(root.approved / folder):
        raise OtherArchive(
            f"approved/{folder} was unpacked from another archive",
            where=archive,
            why=f"{before.archive} has the same name, and keys may repeat between archives",
            do=f"rename this archive; or, to replace the images, remove approved/{folder} first",
        )
    sweep_temporaries(place.parent)
    write_if_changed(place, msgspec.json.encode(now) + b"\n")


def _identified(archive: Path, folder: str) -> ImportedArchive:
    with open(archive, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        first = file.read(_ENDS)
        file.seek(max(size - _ENDS, 0))
        return ImportedArchive(folder, str(archive), size, fingerprint(first + file.read(_ENDS)))


def _read(place: Path) -> ImportedArchive | None:
    with suppress(OSError, msgspec.DecodeError):
        return msgspec.json.decode(place.read_bytes(), type=ImportedArchive)
    return None
