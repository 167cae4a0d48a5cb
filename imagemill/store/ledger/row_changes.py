"""`row_changes`, `merged` and `packed`: of which images rows have changed, and what merge and packing have seen of it.

Triggers on `sources`, `captions`, `captioned`, `files` and `problems` write the rows of `row_changes`, for the changes of every
process. So a reader of these tables that keeps `last_row_change` can later read the rows of `row_changes_after` alone.
"""

from pathlib import Path

import msgspec

from imagemill.fs.fingerprints import FileSignature
from imagemill.store.ledger.database import Database
from imagemill.store.ledger.table import Codec, Table

# Most row changes that are kept for a packing that has not seen them; it then looks at every image.
KEPT_CHANGES = 1_000_000


class RowChange(msgspec.Struct, frozen=True):
    """A row of an image was inserted, changed or deleted; of problems, a row of an item. `number`: larger than all before."""

    number: int
    image_id: str


class MergedRecords(msgspec.Struct, frozen=True):
    """The last merge, which wrote the file of records or found that it stays.

    Attributes:
        path: of the file.
        signature: of the file after the merge.
        parameters: of the merge: everything but the ledger's rows that lines were made from.
        epoch: number of merges so far that have compared all lines: since the one before, only lines of images whose rows have
            changed may differ.
        seen: `last_row_change` before the merge read any row.
    """

    path: str
    signature: FileSignature
    parameters: str
    epoch: int
    seen: int


class PackedSets(msgspec.Struct, frozen=True):
    """The last packing of all buckets, after which every set had the samples of its plan.

    Attributes:
        path: parent of the sets.
        sets: the `manifest_digest` of each set by bucket.
        parameters: fingerprint of everything but rows, records and files that decides which samples are ready.
        epoch: of the merged records that were packed.
        seen: `last_row_change` before packing read any row.
    """

    path: str
    sets: dict[str, str]
    parameters: str
    epoch: int
    seen: int


ROW_CHANGES = Table("row_changes", RowChange)
MERGED = Table("merged", MergedRecords)
PACKED = Table("packed", PackedSets, sets=Codec(lambda sets: msgspec.json.encode(sets).decode(), msgspec.json.decode))


class RowChanges(Database):
    """Reads of changed rows; reads and writes of the last merge and packing. Rows of `row_changes` are written by triggers."""

    def last_row_change(self) -> int:
        """Return the number of the last change, also if its row has been deleted; 0 before the first one."""
        row = self._one("SELECT seq FROM sqlite_sequence WHERE name = 'row_changes'")
        return row[0] if row else 0

    def row_changes_after(self, number: int) -> set[str] | None:
        """Return the images whose rows have changed after the change with this number; None if that is no longer known."""
        first = self._one("SELECT min(number) FROM row_changes")
        known_from = first[0] if first and first[0] is not None else self.last_row_change() + 1
        if number + 1 < known_from:
            return None
        return {i for (i,) in self._rows("SELECT DISTINCT image_id FROM row_changes WHERE number > ?", (number,))}

    def merged(self, path: Path, signature: FileSignature | None) -> MergedRecords | None:
        """Return the last merge of the records; None if it was of another file, or the file has been changed since."""
        found = next(self._select(MERGED, [str(path)], key="path"), None)
        return found if found and found.signature == signature else None

    def record_merged(
        self, path: Path, signature: FileSignature, parameters: str, seen: int, *, compared_all: bool
    ) -> None:
        """Record a merge. There is one file of records: the data root may have had another path before.

        `compared_all`: whether the merge has compared all lines.
        """
        with self.transaction():
            last = self._one("SELECT max(epoch) FROM merged")
            epoch = (last[0] if last and last[0] else 0) + compared_all
            self._change("DELETE FROM merged")
            self._insert(MERGED, [MergedRecords(str(path), signature, parameters, epoch, seen)])

    def packed(self, path: Path) -> PackedSets | None:
        """Return the last packing of all buckets below this folder."""
        return next(self._select(PACKED, [str(path)], key="path"), None)

    def record_packed(self, packed: PackedSets) -> None:
        """Record a packing of all buckets instead of the last one."""
        with self.transaction():
            self._change("DELETE FROM packed")
            self._insert(PACKED, [packed])

    def forget_row_changes(self) -> None:
        """Delete the changes that the last merge has seen, and the last packing unless it is `KEPT_CHANGES` behind."""
        with self.transaction():
            self._change("DELETE FROM packed WHERE seen < (SELECT seen FROM merged) - ?", (KEPT_CHANGES,))
            seen = "SELECT seen FROM merged UNION ALL SELECT seen FROM packed"
            self._change(
                f"DELETE FROM row_changes WHERE EXISTS (SELECT 1 FROM merged) AND number <= (SELECT min(seen) FROM ({seen}))"
            )
