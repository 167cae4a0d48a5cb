"""What the file system says of a file without opening it."""

import os
from pathlib import Path
from typing import NamedTuple

import xxhash

_PIECE = 1 << 20


class StatTriple(NamedTuple):
    """Size in bytes, modification time in nanoseconds, inode: unchanged means not read again (CONTRACTS section 0)."""

    size: int
    mtime_ns: int
    inode: int


def stat_triple(source: Path | os.stat_result) -> StatTriple:
    stat = source if isinstance(source, os.stat_result) else os.stat(source)
    return StatTriple(stat.st_size, stat.st_mtime_ns, stat.st_ino)


def fingerprint(*parts: bytes | memoryview) -> str:
    """What bytes (the parts joined) are told apart by, with the algorithm's name in front: `xxh3:` and 32 hex digits.

    Fast and wide enough to tell a change or a damaged copy; not made to withstand an attacker.
    """
    if len(parts) == 1:
        return "xxh3:" + xxhash.xxh3_128_hexdigest(parts[0])
    digest = xxhash.xxh3_128()
    for part in parts:
        digest.update(part)
    return f"xxh3:{digest.hexdigest()}"


class RunningFingerprint:
    """`fingerprint` of bytes that come piece by piece."""

    def __init__(self) -> None:
        self._digest = xxhash.xxh3_128()

    def update(self, data: bytes | memoryview) -> None:
        self._digest.update(data)

    def __str__(self) -> str:
        return f"xxh3:{self._digest.hexdigest()}"


def fingerprint_file(path: Path) -> str:
    """`fingerprint` of a file's bytes, in bounded memory."""
    running = RunningFingerprint()
    with open(path, "rb", buffering=0) as file:
        while piece := file.read(_PIECE):
            running.update(piece)
    return str(running)
