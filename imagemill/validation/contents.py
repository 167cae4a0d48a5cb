"""Comparison of npy files with their recorded content fingerprints.

Only a file that still has the recorded size, mtime and inode is compared: any other is read in full by the next run
anyway.

Damaged files are found here, and nothing is written. A run handles them in pipeline/stage2/damage.py; headers and
values are checked in formats/npy.py.
"""

import functools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from imagemill.domain.embedding_specs import EmbeddingSpec, embedding_specs
from imagemill.errors import InvalidNpy
from imagemill.formats.npy import NpyStore
from imagemill.fs.fingerprints import fingerprint_file
from imagemill.pipeline.stage2.damage import file_name
from imagemill.store.ledger import FileRow, Ledger
from imagemill.store.provenance import spec_in_force
from imagemill.validation.catalogue import finding
from imagemill.validation.findings import Finding

_MESSAGE = "not the recorded bytes, although size, time and inode are unchanged"


class RecordedContents:
    """The ledger's rows of npy files, read once per kind; `damaged` collects (kind, image id) as files are compared."""

    def __init__(self, ledger: Ledger, in_force: Callable[[EmbeddingSpec], EmbeddingSpec] | None = None) -> None:
        self._rows_of = functools.cache(ledger.files)
        in_force = in_force or partial(spec_in_force, ledger=ledger)
        self.in_force = {spec: in_force(spec) for spec in embedding_specs()}
        # Kinds whose files are being replaced: shards keep the earlier files until all new ones are written.
        self.regenerating = frozenset(ledger.regenerating())
        self.damaged: list[tuple[str, str]] = []

    def row(self, store: NpyStore, image_id: str) -> FileRow | None:
        """Return the row that matches the file on disk; None if there is no such row or no such file."""
        try:
            return self._rows_of(store.spec.kind).get((image_id, store.stat(image_id)))
        except (OSError, ValueError):  # no such file, or an invalid file name
            return None

    def find_damage(self, store: NpyStore, image_id: str) -> Finding | None:
        """Return a finding that names the npy file if its bytes differ from its row."""
        row = self.row(store, image_id)
        try:
            # A file that was replaced during the read has another row, or no row.
            if row is None or fingerprint_file(store.path(image_id)) == row.content or row != self.row(store, image_id):
                return None
        except OSError:
            return None
        self.damaged.append((store.spec.kind, image_id))
        return finding("damaged", _MESSAGE, file=file_name(store.spec.kind, image_id), item=image_id)


def check_file(
    store: NpyStore, image_id: str, size: tuple[int, int], at: dict[str, Any], contents: RecordedContents | None = None
) -> Iterator[Finding]:
    """Check the file of one image of size (height, width): its recorded bytes, else its header and values."""
    if contents and (damage := contents.find_damage(store, image_id)):
        yield damage
        return
    try:
        store.check(image_id, *size)
    except InvalidNpy as invalid:
        yield finding(invalid.reason, invalid.what, remedy=invalid.do, **at)
    except FileNotFoundError:
        yield finding("missing_file", "no npy file", **at)
    except OSError as error:
        yield finding("read_error", str(error), **at)
