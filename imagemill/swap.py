"""One folder takes another's place in a single step, so that no reader meets a mixture or a gap."""

import ctypes
import os
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from imagemill.atomic import sync_folder

_RENAME_EXCHANGE = 2
_AT_FDCWD = -100
_THREADS = 4


def replace_folder(new: Path, place: Path) -> None:
    """Put `new` at `place`; what was there ends under `new`'s name and is removed.

    On Linux the two change names atomically. Elsewhere, and on file systems that cannot, the old one is moved aside first:
    for that moment a reader finds no folder, never a mixed one.
    """
    sync_folder(new)
    if not place.exists():
        os.rename(new, place)
    elif _exchange(new, place):
        _remove(new)
    else:
        aside = new.with_name(new.name + "-old")
        os.rename(place, aside)
        os.rename(new, place)
        _remove(aside)
    sync_folder(place.parent)


def _remove(folder: Path) -> None:
    """The system takes a while to let go of gigabytes: files go side by side."""
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
