"""File signatures and content fingerprints."""

import hashlib
import os
import sys
from collections.abc import Iterable, MutableMapping
from contextlib import suppress
from pathlib import Path
from typing import NewType

import xxhash

from imagemill.packed import PackedMapping
from imagemill.parts import in_parts

FileSignature = NewType("FileSignature", str)
"""State of a file without opening it: `posix:<size>:<mtime_ns>:<inode>`. A file with an equal signature is not read again."""


def file_signature(source: Path | os.stat_result) -> FileSignature:
    """Return the signature of a file, or of a stat result. Raises OSError if the file cannot be accessed."""
    stat = source if isinstance(source, os.stat_result) else os.stat(source)
    return f"posix:{stat.st_size}:{stat.st_mtime_ns}:{stat.st_ino}"  # type: ignore[return-value]  # a call less per file


def signature_if_there(path: Path) -> FileSignature | None:
    """Return the signature of a file, None if it cannot be accessed."""
    with suppress(OSError):
        return file_signature(path)
    return None


def folder_time(folder: Path) -> int | None:
    """Return the time at which an entry was last added to a folder or removed, in nanoseconds; None if it cannot be accessed."""
    with suppress(OSError):
        return folder.stat().st_mtime_ns
    return None


def posix_signature(size: int, mtime_ns: int, inode: int) -> FileSignature:
    """Return the signature with these values."""
    return f"posix:{size}:{mtime_ns}:{inode}"  # type: ignore[return-value]  # a call less per file


def posix_fields(signature: FileSignature) -> tuple[int, int, int]:
    """Return the values of `posix_signature`."""
    _, size, mtime_ns, inode = signature.split(":")
    return int(size), int(mtime_ns), int(inode)


StoredSignature = FileSignature | tuple[int, int, int]
"""A stored signature. Earlier releases stored size, mtime in nanoseconds and inode as an array."""


def stored_signature(stored: StoredSignature) -> FileSignature:
    """Return a stored signature in today's form."""
    return posix_signature(*stored) if isinstance(stored, tuple) else stored


def read_signed(path: Path) -> tuple[bytes, FileSignature]:
    """Return a file's bytes and its signature."""
    with open(path, "rb") as file:
        # Taken before the bytes: a file that changes while it is read has another signature afterwards.
        signature = file_signature(os.fstat(file.fileno()))
        return file.read(), signature


def read_whole(path: Path) -> bytes:
    """Return a file's bytes: `Path.read_bytes` in half as many system calls, after each of which a thread may have to wait."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        size = os.fstat(handle).st_size
        data = os.read(handle, size + 1)
        if len(data) == size:
            return data
        parts = [data]
        while data := os.read(handle, 1 << 20):
            parts.append(data)
        return b"".join(parts)
    finally:
        os.close(handle)


def is_copy(one: FileSignature, other: FileSignature) -> bool:
    """Return whether two signatures differ at most in the inode, as those of a copy that kept its modification time do."""
    return one.rpartition(":")[0] == other.rpartition(":")[0]


def signature_bytes(signature: FileSignature) -> int:
    """Return the file size in bytes, which is the second field of a signature."""
    return int(signature.split(":", 2)[1])


_PREFIX = "xxh3:"


def fingerprint(*parts: bytes | memoryview) -> str:
    """Return the content hash of the concatenated parts: `xxh3:` and 32 hex digits.

    It detects changes and damaged copies; it is not cryptographic.
    """
    if len(parts) == 1:
        return _PREFIX + xxhash.xxh3_128_hexdigest(parts[0])
    digest = xxhash.xxh3_128()
    for part in parts:
        digest.update(part)
    return f"{_PREFIX}{digest.hexdigest()}"


class FingerprintTable(PackedMapping[int, str], MutableMapping[str, str]):
    """Fingerprints by key, in the order of their first assignment. Each takes 48 bytes instead of 96, and is made at its access.

    Args:
        items: the first ones.
    """

    def __init__(self, items: Iterable[tuple[str, str]] = ()) -> None:
        self._packed = {}
        self.update(items)

    def _unpacked(self, key: str, packed: int) -> str:
        return f"{_PREFIX}{packed:032x}"

    def __setitem__(self, key: str, value: str) -> None:
        self._packed[sys.intern(key)] = int(value.removeprefix(_PREFIX), 16)

    def __delitem__(self, key: str) -> None:
        del self._packed[key]

    def take(self, key: str, other: "FingerprintTable") -> None:
        """Assign what another table has under a key, if anything."""
        packed = other._packed.get(key)
        if packed is not None:
            self._packed[sys.intern(key)] = packed


_LINES_AT_ONCE = 10_000


class RunningFingerprint:
    """Incremental `fingerprint` of a byte stream."""

    def __init__(self) -> None:
        self._digest = xxhash.xxh3_128()

    def update(self, data: bytes | memoryview) -> None:
        """Add the next bytes."""
        self._digest.update(data)

    def update_lines(self, lines: Iterable[str]) -> None:
        """Add lines of text, which may be names of files that are not UTF-8. Many together take half the time."""
        for part in in_parts(lines, _LINES_AT_ONCE):
            self.update(("\n".join(part) + "\n").encode("utf-8", "surrogateescape"))

    def __str__(self) -> str:
        return f"{_PREFIX}{self._digest.hexdigest()}"


def has_content(path: Path, content: str) -> bool:
    """Return True if the bytes of a file have this fingerprint; False if they differ or cannot be read."""
    try:
        return fingerprint_file(path) == content
    except OSError:
        return False


def fingerprint_file(path: Path | int) -> str:
    """Return the `fingerprint` of the bytes of a file, or of an open file by its descriptor, in bounded memory."""
    with open(path, "rb", buffering=0, closefd=not isinstance(path, int)) as file:
        return f"{_PREFIX}{hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()}"
