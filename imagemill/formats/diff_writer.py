"""A file rewritten only where it differs: compared while it is made, under a temporary name from the first difference.

Several drafts are made in one pass and get their names together, when all are known to be good.
Spec: docs/spec/conventions.md#completion, docs/spec/conventions.md#atomic-names
"""

import os
from pathlib import Path
from typing import BinaryIO

from imagemill.fs.atomic import temporary_path
from imagemill.fs.durable import flush

_COPY_BYTES = 1 << 20


class Draft:
    """New content for one name in a folder. Feed it with `write`, then `finish`, then `publish` or `discard`.

    Args:
        temporary: the name of the file until it is whole, in the same folder.
    """

    def __init__(self, folder: Path, name: str, temporary: Path | None = None) -> None:
        self._folder, self._name = folder, name
        self._old: BinaryIO | None = self.path.open("rb") if self.path.is_file() else None
        self._same = 0
        self._planned, self._temporary = temporary, None
        self._new = None if self._old else self._begin()

    @property
    def path(self) -> Path:
        """The final name."""
        return self._folder / self._name

    def write(self, data: bytes) -> None:
        if self._new is None:
            if self._old and self._old.read(len(data)) == data:
                self._same += len(data)
                return
            self._new = self._begin()
        self._new.write(data)

    def finish(self) -> bool:
        """Nothing more comes; flushes what was written. Returns whether it differs from what stands there."""
        if self._new is None and self._old and self._old.read(1):
            self._new = self._begin()
        if self._new:
            self._new.flush()
            flush(self._new.fileno())
        self._close()
        return self._temporary is not None

    def move(self, folder: Path) -> None:
        """Its folder has another name now."""
        self._folder = folder
        if self._temporary:
            self._temporary = folder / self._temporary.name

    def publish(self) -> None:
        """Take the final name; the folder is the caller's to flush."""
        if self._temporary:
            os.replace(self._temporary, self.path)
            self._temporary = None

    def discard(self) -> None:
        """Leave nothing behind, whatever has been done so far."""
        self._close()
        if self._temporary:
            self._temporary.unlink(missing_ok=True)
            self._temporary = None

    def _begin(self) -> BinaryIO:
        self._temporary = self._planned or temporary_path(self._folder)
        new = self._temporary.open("wb")
        if self._old:
            self._old.seek(0)
            left = self._same
            while left:
                left -= new.write(self._old.read(min(left, _COPY_BYTES)))
        return new

    def _close(self) -> None:
        for file in (self._old, self._new):
            if file:
                file.close()
        self._old = self._new = None
