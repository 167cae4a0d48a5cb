"""`row_changes` and `merged`: of which images rows have changed, and what the last merge of the records has seen of it.

Triggers on `sources`, `captions`, `captioned`, `files` and `problems` write the rows of `row_changes`, for the changes of every
process. So a reader of these tables that keeps `last_row_change` can later read the rows of `row_changes_after` alone.
"""

from pathlib import Path

import msgspec

from imagemill.fs.fingerprints import FileSignature
from imagemill.store.ledger.database import Database
from imagemill.store.ledger.table import Table


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
        seen: `last_row_change` before the merge read any row.
    """

    path: str
    signature: FileSignature
    parameters: str
    seen: int


ROW_CHANGES = Table("row_changes", RowChange)
MERGED = Table("merged", MergedRecords)


class RowChanges(Database):
    """Reads of changed rows, and of the last merge; writes of the latter. Rows of `row_changes` are written by triggers."""

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

    def changed_since_merge(self, path: Path, signature: FileSignature | None, parameters: str) -> set[str] | None:
        """Return the images whose rows have changed since the last merge; None if its file or its parameters were others."""
        merged = next(self._select(MERGED, [str(path)], key="path"), None)
        if merged is None or (merged.signature, merged.parameters) != (signature, parameters):
            return None
        return self.row_changes_after(merged.seen)

    def record_merged(self, path: Path, signature: FileSignature, parameters: str, seen: int) -> None:
        """Record a merge. There is one file of records: the data root may have had another path before."""
        with self.transaction():
            self._change("DELETE FROM merged")
            self._insert(MERGED, [MergedRecords(str(path), signature, parameters, seen)])

    def forget_row_changes(self) -> None:
        """Delete the changes that the last merge has seen."""
        self._change("DELETE FROM row_changes WHERE number <= (SELECT seen FROM merged)")
