"""One folder takes another's place in a single step, so that no reader meets a mixture or a gap."""

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
    """Put `new` at `place`; what was there ends under `new`'s name and is removed. Of a link only the link is.

    On Linux the two change names atomically. Elsewhere, and on file systems that cannot, the old one is moved aside first:
    for that moment a reader finds no folder, never a mixed one.
    """
    sync_folder(new)
    if not place.exists():
        os.rename(new, place)
    elif _exchange(new, place):
        remove_folder(new)
    else:
        aside = new.with_name(new.name + "-old")
        os.rename(place, aside)
        os.rename(new, place)
        remove_folder(aside)
    sync_folder(place.parent)


def read_unswapped(folder: Path, read: Callable[[], _T]) -> _T:
    """What `read` says of a folder whose documents it opens one after the other, by name.

    When another folder has taken the place meanwhile, it reads again: else it would tell of a mixture that nobody published.

    Raises:
        ImagemillError: it was replaced again and again.
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
    """Which folder has the place now; None where none has. Held open, it lends its number to no other."""
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
    """A folder with all that is in it; of a link to one the link alone.

    The system takes a while to let go of gigabytes: files go side by side.
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
