"""`sources`: each approved image as it was last read."""

from collections.abc import Iterable, Sequence

import msgspec

from imagemill.fs.fingerprints import FileSignature
from imagemill.store.ledger.database import Database
from imagemill.store.ledger.table import Table


class SourceRow(msgspec.Struct, frozen=True, gc=False):
    """An approved image as last read. `height` and `width` in pixels, after EXIF orientation."""

    image_id: str
    file_name: str
    stat: FileSignature = msgspec.field(name="signature")
    fingerprint: str
    height: int
    width: int


SOURCES = Table("sources", SourceRow)


class Sources(Database):
    """Reads and writes of approved images."""

    def sources(self, ids: Sequence[str] | None = None) -> dict[str, SourceRow]:
        """Return the images by id, or only those of `ids`."""
        return {row.image_id: row for row in self._select(SOURCES, ids)}

    def sources_like(self, fingerprint: str) -> dict[str, SourceRow]:
        """Return the images with these bytes, by id."""
        return {row.image_id: row for row in self._select(SOURCES, where="fingerprint = ?", given=(fingerprint,))}

    def record_sources(self, rows: Iterable[SourceRow]) -> None:
        """Insert or replace rows of images."""
        self._insert(SOURCES, rows)
