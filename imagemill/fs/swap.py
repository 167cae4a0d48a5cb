"""Atomic replacement of a folder, and reads that never see a mixture of two versions."""

import ctypes
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from imagemill.errors import ImagemillError
from imagemill.fs.atomic import sync_folder

_T = TypeVar("_T")

_RENAME_EXCHANGE = 2
_AT_FDCWD = -100
_THREADS = 4
_READS = 10


def replace_folder(new: Path, place: Path) -> None:
    """Move the folder `new` to `place`, and remove the previous folder. A symlink at `place` is removed; its target is not.

    On Linux the two names are exchanged atomically. Elsewhere, and on file systems without exchange, the old folder is renamed
    first: for that moment a reader finds no folder, but never a mixture.
    """
    sync_folder(new)
    if not place.exists():
        os.rename(new, place)
    elif _exchange(new, place):
        remove_folder(new)
    else:
        old = new.with_name(new.name + "-old")
        os.rename(place, old)
        os.rename(new, place)
        remove_folder(old)
    sync_folder(place.parent)


def read_unswapped(folder: Path, read: Callable[[], _T]) -> _T:
    """Return the result of `read`, which opens several documents of a folder one after the other, by name.

    If the folder was replaced during the read, read again. Otherwise the result could mix two versions.

    Raises:
        ImagemillError: if the folder was replaced during each of ten reads.
    """
    for _ in range(_READS):
        with _held(folder) as before:
            try:
                found = read()
            except (ImagemillError, OSError):
                if _place(folder) == before:
                    raise
            else:
                if _place(folder) == before:
                    return found
    raise ImagemillError(
        f"{folder.name} was replaced {_READS} times while it was read",
        where=folder,
        do="wait until the run that writes it has ended, then run the same command again",
    )


@contextmanager
def _held(folder: Path) -> Iterator[tuple[int, int] | None]:
    """Yield the identity of the folder, or None if it does not exist.

    Keeping the directory open prevents its inode from being reused.
    """
    try:
        number = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except (FileNotFoundError, NotADirectoryError):
        yield None
        return
    try:
        yield _identity(os.fstat(number))
    finally:
        os.close(number)


def _place(folder: Path) -> tuple[int, int] | None:
    try:
        return _identity(os.stat(folder))
    except (FileNotFoundError, NotADirectoryError):
        return None


def _identity(stat: os.stat_result) -> tuple[int, int]:
    return stat.st_dev, stat.st_ino


def remove_folder(folder: Path) -> None:
    """Remove a folder with its content; of a symlink only the link.

    Files are removed on several threads, because the system needs some time to free gigabytes.
    """
    if folder.is_symlink():
        folder.unlink()
        return
    with os.scandir(folder) as entries:
        files = [entry.path for entry in entries if entry.is_file(follow_symlinks=False)]
    with ThreadPoolExecutor(_THREADS, "remove") as pool:
        list(pool.map(os.unlink, files))
    shutil.rmtree(folder)


def _exchange(one: Path, other: Path) -> bool:
    if not sys.platform.startswith("linux"):
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "renameat2"):
        return False
    names = os.fsencode(one), os.fsencode(other)
    return libc.renameat2(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE) == 0
