"""Files that are rewritten only if their content changes: new content is compared with the old while it is written.

From the first difference on, the content goes to a temporary file. Several drafts can be written in one pass and renamed
together once all are complete.
Spec: docs/spec/conventions.md#completion, docs/spec/conventions.md#atomic-names
"""

import os
from pathlib import Path
from typing import BinaryIO

from imagemill.fs.atomic import temporary_path
from imagemill.fs.durable import flush

_COPY_BYTES = 1 << 20


class Draft:
    """New content for one file name in a folder. Call `write` repeatedly, then `finish`, then `publish` or `discard`.

    Args:
        temporary: name of the file until it is complete, in the same folder.
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
        """Append bytes: compare them with the old file, or write them once the content differs."""
        if self._new is None:
            if self._old and self._old.read(len(data)) == data:
                self._same += len(data)
                return
            self._new = self._begin()
        self._new.write(data)

    def finish(self) -> bool:
        """End the content and flush it. Return whether it differs from the existing file."""
        if self._new is None and self._old and self._old.read(1):
            self._new = self._begin()
        if self._new:
            self._new.flush()
            flush(self._new.fileno())
        self._close()
        return self._temporary is not None

    def move(self, folder: Path) -> None:
        """Follow a rename of the folder."""
        self._folder = folder
        if self._temporary:
            self._temporary = folder / self._temporary.name

    def publish(self) -> None:
        """Rename the file to its final name. The caller flushes the folder."""
        if self._temporary:
            os.replace(self._temporary, self.path)
            self._temporary = None

    def discard(self) -> None:
        """Close the files and remove the temporary file, in any state of the draft."""
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
