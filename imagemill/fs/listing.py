"""Directory listings with file signatures, without opening a file: in this process, or in a child process for large folders.

Spec: docs/spec/conventions.md#completion
"""

import errno
import itertools
import marshal
import os
import stat
import subprocess
import sys
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from pathlib import Path

from imagemill.fs.fingerprints import FileSignature, posix_fields, posix_signature
from imagemill.packed import PackedMapping


def is_inside(path: str, folder: str) -> bool:
    """Return whether a path leads into a folder. Both are absolute, without links.

    >>> is_inside("/a/b", "/a"), is_inside("/ab", "/a"), is_inside("/a", "/a")
    (True, False, False)
    """
    return path.startswith(folder.rstrip("/") + "/")


class FileListing(PackedMapping[int, FileSignature]):
    """Signatures of files by name, in order of the names. Each takes 24 bytes besides its name, and is made at its access.

    Args:
        states: name, size in bytes, modification time in nanoseconds, and inode of each file, in order of the names.
        like: another listing; if its names are the same, both share them.
    """

    def __init__(self, states: Iterable[tuple[str, int, int, int]] = (), like: "FileListing | None" = None) -> None:
        names: list[str] = []
        self._columns = sizes, times, inodes = array("q"), array("q"), array("Q")
        for name, size, time, inode in states:
            names.append(name)
            sizes.append(size)
            times.append(time)
            inodes.append(inode)
        self._packed = like._packed if like is not None and list(like) == names else _rows(names)

    def _unpacked(self, key: str, packed: int) -> FileSignature:
        sizes, times, inodes = self._columns
        return posix_signature(sizes[packed], times[packed], inodes[packed])

    def pairs(self) -> Iterator[tuple[str, FileSignature]]:
        """Yield name and signature of each file, as `items` in half the time."""
        return zip(self._packed, map(posix_signature, *self._columns), strict=True)

    def size(self, name: str) -> int:
        """Return the size of a file in bytes. Raises KeyError for a name that is not listed."""
        return self._columns[0][self._packed[name]]

    @classmethod
    def of(cls, signatures: Mapping[str, FileSignature]) -> "FileListing":
        """Return the listing of files with these signatures."""
        return cls().renewed(frozenset(), signatures)

    def renewed(
        self, names: Set[str], found: Mapping[str, FileSignature], like: "Iterable[FileListing]" = ()
    ) -> "FileListing":
        """Return the listing after the files with these names were looked up again.

        Args:
            names: the names.
            found: the files that exist.
            like: other listings; if one of them has the same names, both share them.
        """
        before, renewed, done = list(self), FileListing(), 0
        order: list[str] = []
        for name in sorted(names | found.keys()):
            row = bisect_left(before, name, done)
            is_known = row < len(before) and before[row] == name
            order += before[done:row]
            self._copy(renewed, done, row)
            done = row + is_known
            if name in found:
                order.append(name)
                for column, value in zip(renewed._columns, posix_fields(found[name]), strict=True):
                    column.append(value)
        order += before[done:]
        self._copy(renewed, done, len(before))
        renewed._packed = next((each._packed for each in (self, *like) if list(each) == order), None) or _rows(order)
        return renewed

    def _copy(self, target: "FileListing", first: int, end: int) -> None:
        """Append the signatures of these rows to another listing."""
        for column, values in zip(target._columns, self._columns, strict=True):
            column.extend(values[first:end])

    def sent(self, like: "FileListing | None") -> tuple[list[str] | None, list[bytes]]:
        """Return what `received` with the same `like` makes the listing from, for another process."""
        shared = like is not None and like._packed is self._packed
        return None if shared else list(self), [column.tobytes() for column in self._columns]

    @classmethod
    def received(cls, sent: tuple[list[str] | None, list[bytes]], like: "FileListing | None") -> "FileListing":
        """Return the listing from `sent`."""
        names, columns = sent
        found = cls()
        for column, values in zip(found._columns, columns, strict=True):
            column.frombytes(values)
        found._packed = like._packed if names is None and like is not None else _rows(names or [])
        return found


def _rows(names: Iterable[str]) -> dict[str, int]:
    return dict(zip(map(sys.intern, names), itertools.count()))


def list_files(folder: Path, suffix: str, like: FileListing | None = None) -> FileListing:
    """List the regular files (and links to such) with a suffix, by name without it. A missing folder gives an empty listing.

    `like`: a listing of another folder, which probably has the same names.
    """
    return FileListing(_states(folder, suffix), like)


def _states(folder: Path, suffix: str) -> Iterator[tuple[str, int, int, int]]:
    try:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return
    regular, cut = stat.S_ISREG, -len(suffix)
    try:
        for name in sorted(name[:cut] for name in os.listdir(handle) if name.endswith(suffix)):
            try:
                status = os.stat(
                    name + suffix, dir_fd=handle
                )  # relative to the folder: the system resolves one name instead of a path
            except OSError as error:
                if error.errno in (errno.ENOENT, errno.ELOOP):  # removed since the folder was listed; a link to itself
                    continue
                raise
            if regular(status.st_mode):
                yield name, status.st_size, status.st_mtime_ns, status.st_ino
    finally:
        os.close(handle)


def list_folders(folders: Iterable[Path], suffix: str) -> list[FileListing]:
    """Return `list_files` of each folder; equal names are in memory once."""
    found: list[FileListing] = []
    for folder in folders:
        found.append(list_files(folder, suffix, like=found[0] if found else None))
    return found


def start_listing(folders: Sequence[Path], suffix: str) -> Callable[[], list[FileListing]]:
    """Start `list_folders` in a child process, and return the function that waits for the results.

    Listing 60,000 files takes 0.2 s; a thread would alternate with the caller. All folders share one process, which leaves the
    caller a core on a machine with two.
    """
    command = [sys.executable, "-P", "-m", __name__, suffix, *map(str, folders)]
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd="/"
    )

    def results() -> list[FileListing]:
        listed, _ = process.communicate()
        if process.returncode:  # list again here, so that the error is raised in this process
            return list_folders(folders, suffix)
        found: list[FileListing] = []
        for sent in marshal.loads(listed):
            found.append(FileListing.received(sent, found[0] if found else None))
        return found

    return results


if __name__ == "__main__":
    suffix, *folders = sys.argv[1:]
    listings = list_folders(map(Path, folders), suffix)
    sys.stdout.buffer.write(marshal.dumps([each.sent(listings[0] if n else None) for n, each in enumerate(listings)]))


def nearest_existing(path: Path) -> Path:
    """Return the path itself, or its nearest parent that exists; a broken symlink exists."""
    absolute = Path(os.path.abspath(path))
    return next(place for place in (absolute, *absolute.parents) if os.path.lexists(place))
