"""Process liveness by file locks, across containers and host names on one kernel.

    .imagemill/owners/<device>.<inode>.<boot>-<random>    locked by one process from its first use until it ends

A process is dead if the lock of its file can be taken, or if the file does not exist: the kernel releases the lock when the
process ends. This works across process namespaces and host names. Temporary files, leases and runs contain the file's name.

The lock is an open file description lock: it belongs to the open file, not to the process id. On systems without it,
flock(2) has the same property on local disks.
"""

import fcntl
import json
import os
import re
import secrets
import socket
import struct
import tempfile
import time
from collections import OrderedDict
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import msgspec

from imagemill.errors import ImagemillError

# Maximum number of folders in which a process holds a lock; only tests work on more data roots.
_MOST_FOLDERS = 32
_NEW = ".new-"
_BOOT = re.compile(r"[0-9a-f]{8}")
_OF_EARLIER_RELEASES = re.compile(r"[0-9a-f]{8}-\d+-(\d+|None)")


class Owner(msgspec.Struct, frozen=True):
    """One process, as recorded in leases, temporary names and run tags.

    Attributes:
        name: name of its lock file.
        host: host name, for messages.
        pid: process id, for messages.
        boot_id: boot id of the kernel of the pid.
        pid_namespace: namespace of the pid.
    """

    name: str
    host: str
    pid: int
    boot_id: str
    pid_namespace: str


class _Held(msgspec.Struct):
    """A lock file of this process. `number`: device and inode of the locked file, which is open until it is released."""

    owner: Owner
    handle: int
    path: Path
    number: tuple[int, int]


_held: OrderedDict[Path, _Held] = OrderedDict()
_folders: dict[str, Path] = {}
_current: list[Path] = []
_acting_for: list[str] = []


def use(folder: Path) -> Owner:
    """Make this the folder of the process's lock file from now on, and return the process's owner record.

    The lock is taken at the first use and kept until the process ends. Locks of dead processes are removed.
    """
    folder = folder.absolute()
    _current[:] = [folder]
    return _owner(folder).owner


def act_for(owner: str) -> None:
    """Let the temporary files of this process belong to another one, which gives them their final names."""
    _acting_for[:] = [owner]


def owner_name() -> str:
    """Return the name of this process's lock file, in the folder most recently passed to `use`, or that of `act_for`."""
    if _acting_for:
        return _acting_for[0]
    return _owner(_current[0] if _current else _default_folder()).owner.name


def is_dead_owner(name: str) -> bool:
    """Return whether the process with that lock file has ended.

    If the lock file's folder is unknown, the process counts as alive until the system has been rebooted. Earlier releases named
    processes by host, pid and start time (three parts); such processes count as dead, because they cannot run beside
    this release.
    """
    if _OF_EARLIER_RELEASES.fullmatch(name):
        return True
    if any(held.owner.name == name for held in _held.values()):
        return False  # this process itself
    prefix = name.partition("-")[0]
    _known_folder(_default_folder())
    if prefix in _folders:
        return not _is_locked(_folders[prefix] / name)
    boot = prefix.rpartition(".")[2]
    return bool(_BOOT.fullmatch(boot)) and boot != _boot()


def is_dead_in(folder: Path, name: str) -> bool:
    """Return whether the process with that lock file has ended, if its lock file can only be in this folder."""
    return bool(_OF_EARLIER_RELEASES.fullmatch(name)) or not _is_locked(folder / name)


def is_dead_among(folders: Iterable[Path], name: str) -> bool:
    """Return whether the process with that lock file has ended; False if its lock file is in none of these folders."""
    prefix = name.partition("-")[0]
    return any(_known_folder(folder) == prefix and not _is_locked(folder / name) for folder in folders)


def living(folder: Path) -> list[Owner]:
    """Return the processes other than this one whose lock files in this folder are locked."""
    own = {held.owner.name for held in _held.values()}
    found = []
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if path.name not in own and not path.name.startswith(_NEW) and _is_locked(path):
            with suppress(OSError, msgspec.DecodeError):
                found.append(msgspec.json.decode(path.read_bytes(), type=Owner))
    return found


def current_folder() -> Path | None:
    """Return the folder most recently passed to `use`, for child processes."""
    return _current[0] if _current else None


def _default_folder() -> Path:
    """Return the folder of a process that works on no data root."""
    return Path(tempfile.gettempdir()) / f"imagemill-owners-{os.getuid()}"


def _owner(folder: Path) -> _Held:
    held = _held.get(folder)
    if held is None or not _is_ours(held):  # the folder was removed or replaced
        if held is not None:
            _release(folder)
        held = _held[folder] = _take(folder)
        while len(_held) > _MOST_FOLDERS:
            _release(next(iter(_held)))
    _held.move_to_end(folder)
    return held


def _is_ours(held: _Held) -> bool:
    """Return whether the lock file still has its name. A copy of the folder contains a file of that name, without the lock."""
    try:
        found = os.stat(held.path)
    except OSError:
        return False
    return (found.st_dev, found.st_ino) == held.number


def _take(folder: Path) -> _Held:
    """Create a lock file, lock it, and only then give it its name."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        prefix = _known_folder(folder)
        _sweep(folder)
        name = f"{prefix}-{secrets.token_hex(6)}"
        new, path = folder / f"{_NEW}{secrets.token_hex(6)}", folder / name
        handle = os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise ImagemillError(
            f"cannot create a lock file: {error.strerror}",
            where=folder,
            do="make the folder writable, then run the same command again",
        ) from error
    try:
        _lock(handle)
        owner = Owner(name, socket.gethostname(), os.getpid(), boot_id(), pid_namespace())
        os.write(handle, json.dumps(msgspec.to_builtins(owner)).encode())
        stat = os.fstat(handle)
        os.rename(new, path)
    except BaseException:
        os.close(handle)
        new.unlink(missing_ok=True)
        raise
    return _Held(owner, handle, path, (stat.st_dev, stat.st_ino))


def _known_folder(folder: Path) -> str:
    with suppress(OSError):
        stat = folder.stat()
        prefix = f"{stat.st_dev:x}.{stat.st_ino:x}.{_boot()}"
        _folders[prefix] = folder
        return prefix
    return ""


def _release(folder: Path) -> None:
    held = _held.pop(folder)
    if _is_ours(held):
        held.path.unlink(missing_ok=True)
    os.close(held.handle)


def _sweep(folder: Path) -> None:
    """Remove lock files whose processes are dead."""
    for path in list(folder.iterdir()):
        with suppress(OSError):
            # A file that is about to be locked has no lock yet.
            is_begun = path.name.startswith(_NEW) and time.time() - path.stat().st_mtime < 60
            if not is_begun and not _is_locked(path):
                path.unlink()


_FLOCK = struct.Struct("hhqqi0q")


def _lock(handle: int) -> None:
    if hasattr(fcntl, "F_OFD_SETLK"):
        fcntl.fcntl(handle, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))
    else:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _is_locked(path: Path) -> bool:
    """Return whether another open file holds the lock. A file that cannot be opened counts as locked."""
    try:
        handle = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    try:
        if hasattr(fcntl, "F_OFD_GETLK"):
            found = fcntl.fcntl(handle, fcntl.F_OFD_GETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))
            return _FLOCK.unpack(found)[0] != fcntl.F_UNLCK
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False
    finally:
        os.close(handle)


def boot_id() -> str:
    """Return the kernel's boot id; empty if the system has none."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


def _boot() -> str:
    return boot_id()[:8]


def pid_namespace() -> str:
    """Return the name of this process's pid namespace, such as `pid:[4026531836]`; empty if the system has none."""
    with suppress(OSError):
        return os.readlink("/proc/self/ns/pid")
    return ""


def _forget_after_fork() -> None:
    """Close the parent's lock files in a forked child, which must not keep its parent's locks alive."""
    for held in _held.values():
        with suppress(OSError):
            os.close(held.handle)
    _held.clear()


os.register_at_fork(after_in_child=_forget_after_fork)
