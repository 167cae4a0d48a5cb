"""`files`: every npy file that is known to be valid, by the signature that it has on disk.

A file's row is committed before the file gets its final name, and is found by signature: a kill between the two leaves either
the old file with its old row or the new file with its new one, never a file with the wrong history.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

from imagemill.columns import END, Column
from imagemill.files import FileSignature
from imagemill.listing import Listing
from imagemill.store.ledger.database import Database
from imagemill.store.ledger.sources import SourceColumns
from imagemill.store.ledger.table import Table

# Maker of a file that is still there while its kind is being regenerated.
SUPERSEDED = "superseded"


class FileRow(msgspec.Struct, frozen=True, gc=False):
    """One valid npy file.

    Attributes:
        source: fingerprint of its input, None if unknown. content: of the file's bytes.
        maker: key of the model's identity, or `unknown` for adopted files.
    """

    kind: str
    image_id: str
    stat: FileSignature = msgspec.field(name="signature")
    source: str | None
    content: str
    maker: str


class FileColumns(NamedTuple):
    """Rows of one kind's files in columns: many are compared at once, and few are looked at one by one.

    `listing`: the files with the signatures that were recorded, by image id.
    """

    kind: str
    listing: Listing
    sources: Column
    contents: Column
    makers: Column

    @classmethod
    def of(cls, kind: str, texts: Sequence[str]) -> "FileColumns":
        return cls(kind, Listing.of(texts[:2]), *map(Column, texts[2:]))

    @classmethod
    def none(cls, kind: str) -> "FileColumns":
        return cls.of(kind, [""] * len(_FILE_COLUMNS))

    def row(self, at: int) -> FileRow:
        image_id, source = self.listing.names.values[at], self.sources.values[at] or None
        stat = self.listing.stat(at)
        return FileRow(self.kind, image_id, stat, source, self.contents.values[at], self.makers.values[at])


_FILE_COLUMNS = ("image_id", "signature", "ifnull(source, '')", "content", "maker")
_SOURCE_COLUMNS = ("image_id", "fingerprint", "height", "width")

FILES = Table("files", FileRow)


class Files(Database):
    """Reads and writes of npy files."""

    def files(self, kind: str, ids: Sequence[str] | None = None) -> dict[tuple[str, FileSignature], FileRow]:
        """Return the valid files of a kind by (image id, signature)."""
        if ids is None:
            known = self.file_columns(kind)
            return {(row.image_id, row.stat): row for row in map(known.row, range(len(known.makers.values)))}
        return {(row.image_id, row.stat): row for row in self._select(FILES, ids, "kind = ?", (kind,))}

    def makers(self, kind: str) -> set[str]:
        """Return the makers of a kind's files: keys of identities, `unknown`, `superseded`."""
        return {maker for (maker,) in self._rows("SELECT DISTINCT maker FROM files WHERE kind = ?", (kind,))}

    def maker_counts(self, kind: str) -> dict[str, int]:
        """Return how many files of a kind each maker has made."""
        return dict(self._rows("SELECT maker, count(*) FROM files WHERE kind = ? GROUP BY maker", (kind,)))  # type: ignore[arg-type]

    def file_columns(self, kind: str) -> FileColumns:
        """Return the valid files of a kind, in the order of the key."""
        return FileColumns.of(kind, self._columns(_FILE_COLUMNS, "files WHERE kind = ?", kind))

    def source_columns(self) -> SourceColumns:
        """Return what records are compared with, in the order of the key."""
        return SourceColumns(*map(Column, self._columns(_SOURCE_COLUMNS, "sources")))

    def _columns(self, names: Sequence[str], rows: str, *given: str) -> Sequence[str]:
        """Return each column as a text that SQLite joins, with no Python per row.

        The order is the table's own, which is its key's. Sorting would take a third more time, and the order matters for
        speed only.
        """
        texts = ", ".join(f"ifnull(group_concat({name}, '{END}') || '{END}', '')" for name in names)
        return self._one(f"SELECT {texts} FROM {rows}", given) or [""] * len(names)

    def record_files(self, rows: Iterable[FileRow]) -> None:
        self._insert(FILES, rows)

    def forget_superseded(self, rows: Iterable[FileRow]) -> None:
        """Delete the rows of files that these have replaced on disk. Call after the rename."""
        self._change_each(
            "DELETE FROM files WHERE kind = ? AND image_id = ? AND signature != ?",
            ((row.kind, row.image_id, row.stat) for row in rows),
        )

    def forget_files(self, kind: str) -> None:
        """Delete every row of a kind."""
        self._change("DELETE FROM files WHERE kind = ?", (kind,))
