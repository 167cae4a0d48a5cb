"""A cache of pictures on the disk, for several processes and threads; in memory where the disk cannot be written.

    .imagemill/look/            mode 0700
    └─ 0f6a…-256-srgb.jpg       a picture, then the 16 bytes of its XXH3 hash

A file that was used last is removed last. Every file can be made again, so none is flushed to the disk; one that is damaged is
removed when it is read. Names are defined by pictures.py and latents.py.
"""

import os
import threading
from collections import OrderedDict
from contextlib import suppress
from pathlib import Path

import xxhash

from imagemill.errors import ImagemillError
from imagemill.fs.atomic import sweep_temporaries, temporary_path

GIBIBYTE = 1 << 30
MEMORY_BYTES = 64 << 20

_MODE = 0o700
_HASH_BYTES = 16
# After writing this part of the limit, a process counts again, because other processes may have written, too.
_COUNTED_AGAIN = 1 / 16


class PictureCache:
    """Bytes by name. Reading a name counts as use.

    Args:
        folder: the folder, which is created if its parent exists; None to keep everything in memory.
        limit_bytes: most bytes in the folder. Several processes that write at once may exceed it by a sixteenth each. In
            memory, at most 64 MiB are kept.
    """

    def __init__(self, folder: Path | None, limit_bytes: int = GIBIBYTE) -> None:
        self._folder = folder
        self._limit = limit_bytes
        self._room = 0
        self._memory: OrderedDict[str, bytes] = OrderedDict()
        self._memory_bytes = 0
        self._lock = threading.Lock()

    def get(self, name: str) -> bytes | None:
        """Return the bytes with this name, None if they are not kept."""
        found = self._read(self._folder / name) if self._folder else None
        return self._remembered(name) if found is None else found

    def put(self, name: str, data: bytes) -> None:
        """Keep bytes, atomically; in memory if they cannot be written."""
        try:
            if self._folder is None:
                raise FileNotFoundError
            self._write(self._folder, name, data)
        except (OSError, ImagemillError):
            self._remember(name, data)

    # ---- on the disk

    @staticmethod
    def _read(path: Path) -> bytes | None:
        try:
            stored = path.read_bytes()
        except OSError:
            return None
        data, digest = stored[:-_HASH_BYTES], stored[-_HASH_BYTES:]
        whole = xxhash.xxh3_128_digest(data) == digest
        with suppress(OSError):  # a folder that is only read, or another process has just removed the file
            if whole:
                os.utime(path)
            else:
                path.unlink()
        return data if whole else None

    def _write(self, folder: Path, name: str, data: bytes) -> None:
        folder.mkdir(_MODE, exist_ok=True)
        temporary = temporary_path(folder)
        try:
            with open(temporary, "xb") as file:
                file.write(data)
                file.write(xxhash.xxh3_128_digest(data))
            os.replace(temporary, folder / name)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        with self._lock:
            self._room -= len(data) + _HASH_BYTES
            if self._room < 0:
                self._room = self._trim(folder)

    def _trim(self, folder: Path) -> int:
        """Remove the files that were used least recently; return how many bytes may be written before the next call."""
        folder.chmod(_MODE)
        sweep_temporaries(folder)
        files = []
        for entry in os.scandir(folder):
            with suppress(FileNotFoundError):
                stat = entry.stat()
                files.append((stat.st_mtime_ns, stat.st_size, entry.path))
        step = int(self._limit * _COUNTED_AGAIN)
        total = sum(size for _, size, _ in files)
        if total > self._limit:
            for _, size, path in sorted(files):
                if total <= self._limit - step:
                    break
                Path(path).unlink(missing_ok=True)
                total -= size
        return min(step, self._limit - total)

    # ---- in memory

    def _remember(self, name: str, data: bytes) -> None:
        with self._lock:
            self._forget(name)
            self._memory[name] = data
            self._memory_bytes += len(data)
            while self._memory_bytes > min(self._limit, MEMORY_BYTES):
                self._forget(next(iter(self._memory)))

    def _forget(self, name: str) -> None:
        self._memory_bytes -= len(self._memory.pop(name, b""))

    def _remembered(self, name: str) -> bytes | None:
        with self._lock:
            if name in self._memory:
                self._memory.move_to_end(name)
            return self._memory.get(name)
