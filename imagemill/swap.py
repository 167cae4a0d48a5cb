"""One folder takes another's place in a single step, so that no reader meets a mixture or a gap."""

import ctypes
import os
import shutil
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from imagemill.atomic import sync_folder
from imagemill.errors import ImagemillError
from imagemill.files import StatTriple, stat_triple

_T = TypeVar("_T")

_RENAME_EXCHANGE = 2
_AT_FDCWD = -100
_THREADS = 4


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
    """
    while True:
        before = _publication(folder)
        try:
            found = read()
        except (ImagemillError, OSError):
            if _publication(folder) == before:
                raise
        else:
            if _publication(folder) == before:
                return found


def _publication(folder: Path) -> StatTriple | None:
    """Another one for each: a set comes in a folder of its own. None where there is none."""
    try:
        return stat_triple(folder)
    except FileNotFoundError:
        return None


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
