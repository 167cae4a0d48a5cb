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
import tempfile
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import Protocol, TypeVar

from imagemill.fs.fingerprints import FileSignature, posix_fields, posix_signature
from imagemill.packed import PackedMapping


def is_inside(path: str, folder: str) -> bool:
    """Return whether a path leads into a folder. Both are absolute, without links.

    >>> is_inside("/a/b", "/a"), is_inside("/ab", "/a"), is_inside("/a", "/a")
    (True, False, False)
    """
    return path.startswith(folder.rstrip("/") + "/")


class _Signed(Protocol):
    """A file that is named after an image, with its signature at some time."""

    @property
    def image_id(self) -> str: ...
    @property
    def stat(self) -> FileSignature: ...


F = TypeVar("F", bound=_Signed)


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

    def unchanged(self, files: Iterable[F]) -> dict[str, F]:
        """Return those of these files whose signature is the listed one, by name; `get` for each takes a quarter longer."""
        row_of, (sizes, times, inodes) = self._packed.get, self._columns
        return {
            file.image_id: file
            for file in files
            if (row := row_of(file.image_id)) is not None
            and posix_signature(sizes[row], times[row], inodes[row]) == file.stat
        }

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


def list_folders(folders: Iterable[Path], suffix: str, like: FileListing | None = None) -> Iterator[FileListing]:
    """Yield `list_files` of each folder; equal names are in memory once."""
    for folder in folders:
        found = list_files(folder, suffix, like)
        like = like or found
        yield found


def start_listing(folders: Sequence[Path], suffix: str) -> Iterator[FileListing]:
    """Start `list_folders` in a child process, and return the iterator over its listings, which waits for each.

    Listing 60,000 files takes 0.2 s; a thread would alternate with the caller. All folders share one process, which leaves the
    caller a core on a machine with two. It writes to a file, because it would wait for the reader of a pipe.
    """
    try:
        file = tempfile.TemporaryFile()  # noqa: SIM115  # closed by the iterator
    except OSError:  # no folder is writable, or the disk is full
        return list_folders(folders, suffix)
    command = [sys.executable, "-P", "-m", __name__, str(file.fileno()), suffix, *map(str, folders)]
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        cwd="/",
        pass_fds=[file.fileno()],
    )

    def results() -> Iterator[FileListing]:
        found, end = list[FileListing](), 0
        assert process.stdout
        with process, file:
            while size := int.from_bytes(process.stdout.read(_SIZE_BYTES)):
                sent = os.pread(file.fileno(), size, end)
                found.append(FileListing.received(marshal.loads(sent), _first(found)))
                end += size
                yield found[-1]
        # List again what is missing here, so that the error is raised in this process.
        yield from list_folders(folders[len(found) :], suffix, _first(found))

    return results()


_SIZE_BYTES = 8


def _list_for_parent(file: str, suffix: str, *folders: str) -> None:
    """Write the listings to an open file. Once each is written, its size in bytes is printed."""
    found: list[FileListing] = []
    with open(int(file), "wb") as written:
        for listing in list_folders(map(Path, folders), suffix):
            sent = marshal.dumps(listing.sent(_first(found)))
            found.append(listing)
            written.write(sent)
            written.flush()
            os.write(sys.stdout.fileno(), len(sent).to_bytes(_SIZE_BYTES))


def _first(listings: Iterable[FileListing]) -> FileListing | None:
    """Return the first listing that is not empty, whose names the later ones share if they are the same."""
    return next(filter(None, listings), None)


if __name__ == "__main__":
    _list_for_parent(*sys.argv[1:])


def nearest_existing(path: Path) -> Path:
    """Return the path itself, or its nearest parent that exists; a broken symlink exists."""
    absolute = Path(os.path.abspath(path))
    return next(place for place in (absolute, *absolute.parents) if os.path.lexists(place))
