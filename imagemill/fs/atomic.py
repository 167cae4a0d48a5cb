"""Atomic file writes: a temporary name in the same folder, flushed, then renamed. A final name is always a whole file.

    derived/dinov3/.tmp-<owner>-<pid>x000001     being written by a living process
    derived/dinov3/abc123xyz.npy                 whole

The temporary name contains the name of the writing process's lock file (fs/owners.py), so that only temporary files of dead
processes are removed.
"""

import errno
import itertools
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import psutil

from imagemill.fs.owners import is_dead_owner, owner_name

_PREFIX = ".tmp-"
_serial = itertools.count(1)


def process_birth(pid: int) -> int | None:
    """Return the start time of a process in clock ticks (Linux: since boot), or None if it does not run.

    The system reuses pids; a pid together with its start time identifies one process.
    """
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return None if state in "ZX" else int(fields[18])
    except (FileNotFoundError, ProcessLookupError):
        return None if Path("/proc/self/stat").exists() else _birth_elsewhere(pid)


def _birth_elsewhere(pid: int) -> int | None:
    # Not used on Linux, because psutil's wall-clock start time changes when the clock is set.
    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else round(process.create_time() * 100)
    except psutil.NoSuchProcess:
        return None


def temporary_path(folder: Path) -> Path:
    """Return an unused name beside the final one. It does not contain the final name, which may use all 255 bytes."""
    return folder / f"{_PREFIX}{owner_name()}-{os.getpid()}x{next(_serial):06d}"


def temporaries(folder: Path) -> list[Path]:
    """Return the temporary names in this folder, of all owners."""
    return [folder / name for name in os.listdir(folder) if name.startswith(_PREFIX)] if folder.is_dir() else []


def is_orphan(path: Path) -> bool:
    """Return whether a temporary name belongs to a dead process."""
    return is_dead_owner(_owner_of(path))


def _owner_of(path: Path) -> str:
    return path.name.removeprefix(_PREFIX).rpartition("-")[0]


def sweep_temporaries(folder: Path, *, folders: bool = False) -> int:
    """Remove the temporary files and links of dead processes in a folder; return their number.

    Args:
        folder: folder to sweep, without its subfolders.
        folders: also remove temporary folders.
    """
    dead = [path for path in temporaries(folder) if is_orphan(path)]
    dead = [path for path in dead if folders or path.is_symlink() or not path.is_dir()]
    for path in dead:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)  # another process may be removing it too
        else:
            path.unlink(missing_ok=True)
    return len(dead)


def sweep_own_temporaries(folder: Path) -> int:
    """Remove the temporary files in a folder that belong to this process, those of its workers included; return their number.

    Call it when this process and its workers write nothing there.
    """
    name = owner_name()
    own = [path for path in temporaries(folder) if _owner_of(path) == name]
    for path in own:
        path.unlink(missing_ok=True)
    return len(own)


def sync_folder(folder: Path) -> None:
    """Make renames in this folder durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def atomic_write(path: Path) -> Iterator[BinaryIO]:
    """Open a binary file that gets its final name, durably, when the block ends; an exception keeps the old file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_path(path.parent)
    try:
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def link_or_copy(source: Path, target: Path) -> None:
    """Make `target` a hard link to a file, or a copy of it on a file system without hard links; durably, replacing `target`."""
    temporary = temporary_path(target.parent)
    try:
        os.link(source, temporary)
        os.replace(temporary, target)
        sync_folder(target.parent)
    except OSError:
        with atomic_write(target) as copy, open(source, "rb") as file:
            shutil.copyfileobj(file, copy, 1 << 20)
    finally:
        # Renaming one hard link onto another of the same file does nothing and leaves both names.
        temporary.unlink(missing_ok=True)


def write_bytes_atomic(path: Path, data: bytes) -> None:
    """Replace a file with these bytes, atomically and durably."""
    with atomic_write(path) as file:
        file.write(data)


def write_new(path: Path, data: bytes, mode: int = 0o666) -> None:
    """Write a file that appears whole and durably, and replaces nothing.

    Args:
        path: the file.
        data: its content.
        mode: its permissions, before the umask.

    Raises:
        FileExistsError: if there is a file or a link of this name.
    """
    temporary = temporary_path(path.parent)
    try:
        with open(temporary, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(temporary, path)
        except FileExistsError:
            raise
        except OSError:  # a file system without hard links
            if os.path.lexists(path):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path)) from None
            os.rename(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)


def write_if_changed(path: Path, data: bytes) -> bool:
    """Replace a file with these bytes unless it already holds them, so that its mtime stays. Return whether it was written."""
    if path.is_file() and path.read_bytes() == data:
        return False
    write_bytes_atomic(path, data)
    return True
