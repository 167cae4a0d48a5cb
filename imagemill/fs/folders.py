"""A folder of input files: on a disk, a `pathlib.Path`; in object storage, an object with the same interface for reading.

    folder / name         a file
    file.open("rb")       a binary file; of an object, in memory
    file.read_bytes()

Spec: docs/spec/object-storage.md#photographs
"""

import errno
import io
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from imagemill.fs.blobs import Blob, Changed, Missing, StoreFailed
from imagemill.fs.fingerprints import FileSignature, file_signature, read_signed, read_whole
from imagemill.fs.location import Location
from imagemill.fs.objects import Objects

# Reads of objects at a time, which wait for the network most of the time.
READS_AHEAD = 32

# Read at a time from an opened object: the headers of nearly all pictures end within the first part.
PART_BYTES = 1 << 16


class ObjectError(OSError):
    """A read of an object failed; a run treats it as one of a disk."""


@dataclass(frozen=True)
class ObjectFile:
    """An object of a folder."""

    store: Objects
    key: str

    def __str__(self) -> str:
        return str(self.store.location / self.key)

    def __fspath__(self) -> str:
        raise TypeError(f"{self} is not on a disk of this machine")

    @property
    def name(self) -> str:
        """The last part of the key."""
        return self.key.rpartition("/")[2]

    def read_bytes(self, expect: FileSignature | None = None) -> bytes:
        """Return the bytes.

        Raises:
            FileNotFoundError: if the object does not exist.
            OSError: if it has another signature than `expect`, or the store fails.
        """
        with _as_errors_of_a_disk(self):
            return self.store.read(self.key, expect and tag_of(expect))[0]

    def read_head(self, size: int) -> bytes:
        """Return the first bytes. Raises as `read_bytes`."""
        with _as_errors_of_a_disk(self):
            return bytes(self.store.read_range(self.key, 0, size))

    def open(self, mode: str = "rb") -> BinaryIO:
        """Return a file that asks for the parts that are read. Raises as `read_bytes`."""
        assert mode == "rb"
        return io.BufferedReader(_Parts(self), PART_BYTES)  # type: ignore[return-value]  # has the methods of a BinaryIO

    def head(self) -> Blob:
        """Return the state. Raises as `read_bytes`."""
        with _as_errors_of_a_disk(self):
            return self.store.head(self.key)


class _Parts(io.RawIOBase):
    """An object as a file, of which each read is a request."""

    def __init__(self, file: ObjectFile) -> None:
        self._file, self._position = file, 0
        self._size: int | None = None

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position}.get(whence)
        self._position = offset + (self._length() if base is None else base)
        return self._position

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]  # any buffer
        if self._position and self._position >= self._length():
            return 0
        with _as_errors_of_a_disk(self._file):
            try:
                part = self._file.store.read_range(self._file.key, self._position, len(buffer))
            except StoreFailed:
                if self._length():
                    raise
                return 0  # an empty object has no range
        buffer[: len(part)] = memoryview(part)
        if len(part) < len(buffer):
            self._size = self._position + len(part)
        self._position += len(part)
        return len(part)

    def _length(self) -> int:
        if self._size is None:
            self._size = self._file.head().size
        return self._size


@dataclass(frozen=True)
class ObjectFolder:
    """A folder in object storage. Processes may send it to each other; it contains no credentials."""

    store: Objects
    path: str = field(default="")

    @property
    def location(self) -> Location:
        """Its place in object storage."""
        return self.store.location / self.path if self.path else self.store.location

    def __str__(self) -> str:
        return str(self.location)

    def __truediv__(self, name: str) -> ObjectFile:
        return ObjectFile(self.store, f"{self.path}/{name}" if self.path else name)

    def list(self) -> Iterator[Blob]:
        """Yield the objects in any order. Raises StoreFailed."""
        self.store.check_listing()
        for page in self.store.list(self.path):
            yield from page


@dataclass(frozen=True)
class SentFile:
    """A file that another process sent, in memory."""

    name: str
    data: bytes

    def __str__(self) -> str:
        return self.name

    def read_bytes(self, expect: FileSignature | None = None) -> bytes:
        """Return the bytes, which the sender has compared with the signature that it expected."""
        return self.data

    def open(self, mode: str = "rb") -> BinaryIO:
        """Return a binary file."""
        assert mode == "rb"
        return io.BytesIO(self.data)


@dataclass(frozen=True)
class SentFolder:
    """Files that another process sent, by their names in its folder."""

    files: dict[str, bytes] = field(default_factory=dict)

    def __truediv__(self, name: str) -> SentFile:
        """Return a file. Raises FileNotFoundError for one that was not sent."""
        if name not in self.files:
            raise FileNotFoundError(errno.ENOENT, "not among the files that were sent to this process", name)
        return SentFile(name, self.files[name])


Folder = Path | ObjectFolder
File = Path | ObjectFile

# Sources of a worker, on any machine.
SourceFolder = Folder | SentFolder
SourceFile = File | SentFile


def tag_of(signature: FileSignature) -> str | None:
    """Return the tag of an object's signature; None for one without."""
    return signature.split(":", 2)[2] or None


def reads_ahead(folder: Folder, threads: int) -> int:
    """Return the number of threads that read files of a folder, which is at least `threads`: objects are waited for."""
    return threads if isinstance(folder, Path) else max(threads, READS_AHEAD)


def is_folder(folder: Folder) -> bool:
    """Return whether a folder exists; one in object storage always does."""
    return not isinstance(folder, Path) or folder.is_dir()


def file_bytes(file: SourceFile, expect: FileSignature | None = None) -> bytes:
    """Return the bytes of a file; of an object, only those with the signature `expect`. Raises OSError."""
    return read_whole(file) if isinstance(file, Path) else file.read_bytes(expect)


def signed_bytes(file: File) -> tuple[bytes, FileSignature]:
    """Return a file's bytes, and the signature that it had when they were read. Raises OSError."""
    if isinstance(file, Path):
        return read_signed(file)
    with _as_errors_of_a_disk(file):
        data, blob = file.store.read(file.key)
        return data, blob.signature


def state_of_file(file: File) -> tuple[FileSignature, int]:
    """Return the signature of a file, and the time of its last change in nanoseconds. Raises OSError."""
    if isinstance(file, ObjectFile):
        blob = file.head()
        return blob.signature, blob.modified_ns
    stat = os.stat(file)
    return file_signature(stat), max(stat.st_mtime_ns, stat.st_ctime_ns)


@contextmanager
def on_disk(file: File) -> Iterator[Path]:
    """Make a file available under a path while the block runs. Raises OSError."""
    if isinstance(file, Path):
        yield file
        return
    with tempfile.NamedTemporaryFile(prefix="imagemill-", suffix=f"-{file.name}") as copy, file.open() as source:
        shutil.copyfileobj(source, copy)
        copy.flush()
        yield Path(copy.name)


@contextmanager
def _as_errors_of_a_disk(file: ObjectFile) -> Iterator[None]:
    try:
        yield
    except Missing as error:
        raise FileNotFoundError(errno.ENOENT, error.what, str(file)) from error
    except (Changed, StoreFailed) as error:
        why = f"{error.what}: {error.why}" if error.why else error.what
        raise ObjectError(errno.EIO, why, str(file)) from error
