"""The bytes of npy files against what the ledger recorded of them.

Only a file that still has the recorded size, time and inode is compared: any other is read in full by the next run anyway.

Belongs here: which file is damaged. Nothing is written.
Belongs elsewhere: what a run does about it (pipeline/stage2/damage.py), headers and values (formats/npy.py).
"""

import functools
from collections.abc import Iterator
from typing import Any

from imagemill.errors import InvalidNpy
from imagemill.formats.npy import NpyStore
from imagemill.fs.fingerprints import fingerprint_file
from imagemill.pipeline.stage2.damage import file_name
from imagemill.store.ledger import FileRow, Ledger
from imagemill.validation.catalogue import finding
from imagemill.validation.findings import Finding

_MESSAGE = "not the bytes that were recorded, though size, time and inode are"


class RecordedContents:
    """The ledger's rows of npy files, each kind's read once; `damaged` collects (kind, image id) as files are compared."""

    def __init__(self, ledger: Ledger) -> None:
        self._rows_of = functools.cache(ledger.files)
        # Kinds whose files are being replaced: shards keep the earlier ones until the last is done.
        self.regenerating = frozenset(ledger.regenerating())
        self.damaged: list[tuple[str, str]] = []

    def row(self, store: NpyStore, image_id: str) -> FileRow | None:
        """Return the row of the file as it is now; None if it has no row, or does not exist."""
        try:
            return self._rows_of(store.spec.kind).get((image_id, store.stat(image_id)))
        except (OSError, ValueError):  # not there, or no name that a file can have
            return None

    def find_damage(self, store: NpyStore, image_id: str) -> Finding | None:
        """Return a finding that names the npy file if its bytes are not those of its row."""
        row = self.row(store, image_id)
        try:
            # A file that was replaced while it was read has another row, or none.
            if row is None or fingerprint_file(store.path(image_id)) == row.content or row != self.row(store, image_id):
                return None
        except OSError:
            return None
        self.damaged.append((store.spec.kind, image_id))
        return finding("damaged", _MESSAGE, file=file_name(store.spec.kind, image_id), item=image_id)


def check_file(
    store: NpyStore, image_id: str, size: tuple[int, int], at: dict[str, Any], contents: RecordedContents | None = None
) -> Iterator[Finding]:
    """Check the file of one image of that (height, width): its bytes, else its header and values."""
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
