"""The tars of a set as of its opening: reads return bytes of that set or fail, even if other sets are published later.

    imagemill run, withdraw                tars without a change stay, perhaps with another number: the reader continues
    imagemill shards --overwrite, --repack other tars get their names: ShardsReplaced, unless the bytes are equal

Consistency of the documents is checked in sets.py; bytes are decoded in samples.py and formats/tar.py.

Spec: docs/spec/shards.md#replacement
"""

import errno
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from imagemill.errors import ImagemillError
from imagemill.fs.fingerprints import FileSignature, file_signature, fingerprint_file, is_copy
from imagemill.pipeline.shards.shard_manifest import Manifest
from imagemill.pipeline.shards.shard_sets import read_manifest

# ESTALE: another client of a network file system removed a file that this one had looked up.
_GONE = {errno.ENOENT, errno.ENOTDIR, errno.ESTALE}


class ShardsReplaced(ImagemillError):
    """Another set has replaced the one that a reader opened."""


@dataclass(frozen=True, slots=True)
class OpenedTars:
    """A set's tars by name; may be pickled and used in another process, or on another machine with the same files.

    `checksums`: of the manifest. `stats`: signatures as of the set's opening, or of files with the same bytes found
    since. `names`: present names of tars that were renamed because an earlier one was removed.
    """

    folder: Path
    checksums: Mapping[str, str]
    stats: dict[str, FileSignature]
    names: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, folder: Path, manifest: Manifest) -> "OpenedTars":
        """Return the tars of the manifest; a missing one has no signature."""
        checksums = _checksums(manifest)
        return cls(
            folder, checksums, {name: file_signature(folder / name) for name in checksums if (folder / name).is_file()}
        )

    def read_into(self, name: str, offset: int, buffer: memoryview) -> int:
        """Fill a buffer with bytes of a tar; return their number, which is smaller only at the end of the tar.

        The tar is opened for each call: an open file for each tar would exceed the limit of a process in large sets.

        Raises:
            ShardsReplaced: if the tar no longer belongs to this set.
        """
        try:
            return self._read_into(name, offset, buffer)
        except ShardsReplaced:
            if not self._find(name):
                raise
        return self._read_into(name, offset, buffer)

    def _read_into(self, name: str, offset: int, buffer: memoryview) -> int:
        try:
            descriptor = os.open(self.folder / self.names.get(name, name), os.O_RDONLY | os.O_CLOEXEC)
            try:
                self._check(name, descriptor)
                filled = count = os.preadv(descriptor, [buffer], offset)
                while count and filled < len(buffer):  # interrupted by a signal, or more than one call can read
                    count = os.preadv(descriptor, [buffer[filled:]], offset + filled)
                    filled += count
                return filled
            finally:
                os.close(descriptor)
        except OSError as error:
            if error.errno not in _GONE:
                raise
            raise self._replaced(name, "is gone") from error

    def _find(self, name: str) -> bool:
        """Look up a tar under another name in the present set; return whether there is one with its checksum."""
        manifest = read_manifest(self.folder)
        present = {checksum: now for now, checksum in _checksums(manifest).items()} if manifest else {}
        now = present.get(self.checksums[name])
        if now is None or now == self.names.get(name, name):
            return False
        self.names[name] = now
        return True

    def _check(self, name: str, descriptor: int) -> None:
        now = file_signature(os.fstat(descriptor))
        if now != self.stats[name]:
            if not self._is_equal(name, descriptor, now):
                raise self._replaced(name, "has other bytes")
            self.stats[name] = now

    def _is_equal(self, name: str, descriptor: int, now: FileSignature) -> bool:
        """Return whether another file under this name has the same bytes as the opened one."""
        manifest = read_manifest(self.folder)
        if manifest is None or _checksums(manifest).get(self.names.get(name, name)) != self.checksums[name]:
            return False
        # A copy with the same mtime comes from an update on a file system without hardlinks. Reading it in full would
        # cost an epoch.
        return is_copy(now, self.stats[name]) or fingerprint_file(descriptor) == self.checksums[name]

    def _replaced(self, name: str, why: str) -> ShardsReplaced:
        return ShardsReplaced(
            f"the shards of {self.folder.name} were replaced or removed since this reader opened them",
            where=self.folder / name,
            why=f"{name} {why}; a reader delivers samples of one set, never of two",
            do="open the reader again; load_state_dict checks whether a saved state can continue in the current set",
        )


def _checksums(manifest: Manifest) -> dict[str, str]:
    return {shard.name: shard.checksum for shard in manifest.shards}
