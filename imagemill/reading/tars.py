"""The tars of a set as they were when it was opened: bytes of that set, or an error, whatever is published meanwhile.

    imagemill shards --append, withdraw    the tars come along, as the same files: the reader goes on undisturbed
    imagemill shards --overwrite, --repack other tars have their names: ShardsReplaced, unless the bytes are equal

Belongs here: that a byte is of the set that was opened.
Belongs elsewhere: that the documents are of one set (sets.py), what the bytes mean (samples.py, formats/tar.py).
Spec: docs/spec/shards.md#replacement
"""

import errno
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from imagemill.errors import ImagemillError
from imagemill.fs.fingerprints import FileSignature, file_signature, fingerprint_file, is_copy
from imagemill.pipeline.shards.shard_manifest import Manifest
from imagemill.pipeline.shards.shard_sets import read_manifest

# The last: another client of a network file system removed what this one had looked up.
_GONE = {errno.ENOENT, errno.ENOTDIR, errno.ESTALE}


class ShardsReplaced(ImagemillError):
    """Another set has taken the place of the one that a reader opened."""


@dataclass(frozen=True, slots=True)
class OpenedTars:
    """A set's tars by name; may be pickled and used in another process, or on another machine with the same files.

    `checksums`: of the manifest. `stats`: when the set was opened, or of files of the same bytes that were met since.
    """

    folder: Path
    checksums: Mapping[str, str]
    stats: dict[str, FileSignature]

    @classmethod
    def of(cls, folder: Path, manifest: Manifest) -> "OpenedTars":
        """Those of the manifest; one that is not there has no stat."""
        checksums = _checksums(manifest)
        return cls(
            folder, checksums, {name: file_signature(folder / name) for name in checksums if (folder / name).is_file()}
        )

    def read(self, name: str, offset: int, size: int) -> bytes:
        """Bytes of a tar, fewer only where it ends. Raises ShardsReplaced where it is not the one of this set."""
        try:
            with open(self.folder / name, "rb") as file:
                self._check(name, file)
                file.seek(offset)
                return file.read(size)
        except OSError as error:
            if error.errno not in _GONE:
                raise
            raise self._replaced(name, "is gone") from error

    def _check(self, name: str, file: BinaryIO) -> None:
        now = file_signature(os.fstat(file.fileno()))
        if now != self.stats[name]:
            if not self._is_equal(name, file, now):
                raise self._replaced(name, "holds other bytes")
            self.stats[name] = now

    def _is_equal(self, name: str, file: BinaryIO, now: FileSignature) -> bool:
        """Whether another file under this name has the bytes of the one that was there."""
        manifest = read_manifest(self.folder)
        if manifest is None or _checksums(manifest).get(name) != self.checksums[name]:
            return False
        # A copy keeps the time: appending where the file system has no hardlinks. Reading it whole would cost an epoch.
        return is_copy(now, self.stats[name]) or fingerprint_file(file.fileno()) == self.checksums[name]

    def _replaced(self, name: str, why: str) -> ShardsReplaced:
        return ShardsReplaced(
            f"the shards of {self.folder.name} were replaced or removed since this reader opened them",
            where=self.folder / name,
            why=f"{name} {why}; a reader delivers samples of one set, never of two",
            do="open the reader again; load_state_dict says whether a saved state goes on in the set that is there now",
        )


def _checksums(manifest: Manifest) -> dict[str, str]:
    return {shard.name: shard.checksum for shard in manifest.shards}
