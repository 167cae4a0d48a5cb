"""What the file system says of a file without opening it."""

import os
from pathlib import Path
from typing import NamedTuple

import xxhash


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

    Fast and wide enough for change detection inside a data root; what leaves the house carries sha256.
    """
    if len(parts) == 1:
        return "xxh3:" + xxhash.xxh3_128_hexdigest(parts[0])
    digest = xxhash.xxh3_128()
    for part in parts:
        digest.update(part)
    return f"xxh3:{digest.hexdigest()}"
