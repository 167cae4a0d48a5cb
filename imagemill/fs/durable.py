"""Batched flushing of written files to disk.

    write, begin_writing_back  ...  write, begin_writing_back  ->  flush_files(all of them)  ->  rename them

One `syncfs` for a hundred files costs a third less CPU time than `fdatasync` of each. However, it also writes the data that
other programs have in memory for that disk, and it does not reach servers. In those cases, and for a few files, each file is
flushed separately.

The gain of syncfs is measured in benchmarks/system_calls.py.
Reference: syncfs(2), which reports what could not be written since Linux 5.8; fdatasync(2); posix_fadvise(2).
"""

import ctypes
import functools
import os
import platform
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from imagemill.fs.mounts import file_system_type

# With fewer files, flushing each costs less than checking whether all may be flushed together.
TOGETHER_FROM = 16

# Up to this many unwritten bytes of other programs, on all disks, may be flushed along with ours.
OTHERS_BYTES = 256 * 1024 * 1024

_THREADS = 32

# Does not flush metadata that a reader does not need (such as times), if the system makes the distinction.
flush = getattr(os, "fdatasync", os.fsync)


def begin_writing_back(handle: int, start: int = 0, size: int = 0) -> None:
    """Start writing an open file's bytes to disk from `start` on, all of them if `size` is 0. Does not wait.

    This is only a hint: errors are reported by `flush_files` and `flush`.
    """
    if hasattr(os, "posix_fadvise"):
        with suppress(OSError):
            os.posix_fadvise(handle, start, size, os.POSIX_FADV_DONTNEED)


def flush_files(paths: Sequence[Path]) -> dict[Path, OSError]:
    """Make files of one folder durable; return those that could not be flushed, with the disk's error.

    A file that is missing may go unnoticed; it cannot get its final name.
    """
    if len(paths) >= TOGETHER_FROM and _may_flush_together(paths) and _sync_file_system(paths[0].parent):
        return {}
    with ThreadPoolExecutor(_THREADS, "flush") as pool:
        # One task per thread: to hand over a file costs more than to flush it where nothing has to be written.
        parts = pool.map(_flush_each, (paths[number::_THREADS] for number in range(min(_THREADS, len(paths)))))
        return {path: error for part in parts for path, error in part}


def _flush_each(paths: Sequence[Path]) -> list[tuple[Path, OSError]]:
    return [(path, error) for path in paths if (error := _flush_one(path))]


def _flush_one(path: Path) -> OSError | None:
    try:
        handle = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            flush(handle)
        finally:
            os.close(handle)
    except OSError as error:
        return error
    return None


def _may_flush_together(paths: Sequence[Path]) -> bool:
    """Return whether these files are in memory, or on a local disk where little other data waits to be written."""
    try:
        device = os.stat(paths[0]).st_dev
        in_memory = _is_in_memory(device, paths[0].parent)
        # Other file systems without a device have the number 0 as well.
        if not (in_memory or os.major(device)) or not _reports_errors():
            return False
        beyond = 0 if in_memory else _waiting_bytes() - OTHERS_BYTES
        # Looking up the size of each file takes a tenth of the time of publishing it.
        return beyond <= 0 or beyond <= sum(os.stat(path).st_size for path in paths)
    except OSError:  # a file is missing: flushing each one reports which
        return False


@functools.lru_cache(maxsize=64)
def _is_in_memory(_device: int, folder: Path) -> bool:
    """Return whether a folder is on a file system that has no disk: flushing it costs nothing."""
    return file_system_type(folder) in {"tmpfs", "ramfs"}


def _waiting_bytes() -> int:
    """Return the bytes of unwritten data in memory, for all disks of the machine."""
    kilobytes = re.findall(r"^(?:Dirty|Writeback): +(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
    return 1024 * sum(map(int, kilobytes))


@functools.cache
def _reports_errors() -> bool:
    version = re.match(r"(\d+)\.(\d+)", platform.release())
    if platform.system() != "Linux" or version is None:
        return False
    return (int(version[1]), int(version[2])) >= (5, 8) and hasattr(ctypes.CDLL(None), "syncfs")


def _sync_file_system(folder: Path) -> bool:
    """Write all unwritten data of this folder's file system; return False if some could not be written."""
    handle = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return ctypes.CDLL(None).syncfs(handle) == 0
    finally:
        os.close(handle)
