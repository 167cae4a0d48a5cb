"""`regenerating`: kinds whose files are all being replaced, and how far that is (pipeline/stage2/regenerate.py)."""

import msgspec

from imagemill.files import FileSignature
from imagemill.store.ledger.database import Database
from imagemill.store.ledger.files import SUPERSEDED
from imagemill.store.ledger.table import Table


class Regeneration(msgspec.Struct, frozen=True):
    """A kind whose files are all being replaced."""

    kind: str
    state: str


class SupersededFile(msgspec.Struct, frozen=True):
    """What was known of a file before its kind was regenerated."""

    kind: str
    image_id: str
    stat: FileSignature = msgspec.field(name="signature")
    source: str | None
    maker: str


REGENERATING = Table("regenerating", Regeneration)
SUPERSEDED_FILES = Table("superseded", SupersededFile)


class Regenerations(Database):
    """Reads and writes of regenerations."""

    def regenerating(self) -> dict[str, str]:
        """Return the kinds whose files are all being replaced, with their state."""
        return {row.kind: row.state for row in self._select(REGENERATING)}

    def supersede_files(self, kind: str, state: str) -> None:
        """Mark every file of this kind as one to be replaced; what was known of it is kept until one has been replaced."""
        with self.transaction():
            self._change("DELETE FROM superseded WHERE kind = ?", (kind,))
            self._change(
                "INSERT INTO superseded SELECT kind, image_id, signature, source, maker FROM files WHERE kind = ?",
                (kind,),
            )
            self._change("UPDATE files SET maker = ?, source = NULL WHERE kind = ?", (SUPERSEDED, kind))
            self._insert(REGENERATING, [Regeneration(kind, state)])

    def restore_superseded(self, kind: str) -> int:
        """Undo `supersede_files`; return how many files count again.

        Returns -1, and changes nothing, if a file has been replaced already.
        """
        with self.transaction():
            replaced = self._one("SELECT 1 FROM files WHERE kind = ? AND maker != ? LIMIT 1", (kind, SUPERSEDED))
            if replaced:
                return -1
            restored = self._change(
                "UPDATE files SET (source, maker) = (SELECT s.source, s.maker FROM superseded s WHERE s.kind = files.kind"
                " AND s.image_id = files.image_id AND s.signature = files.signature)"
                " WHERE kind = ? AND EXISTS (SELECT 1 FROM superseded s WHERE s.kind = files.kind"
                " AND s.image_id = files.image_id AND s.signature = files.signature)",
                (kind,),
            )
            self._change("DELETE FROM superseded WHERE kind = ?", (kind,))
            self._change("DELETE FROM regenerating WHERE kind = ?", (kind,))
            return restored

    def note_regeneration(self, kind: str, state: str | None) -> None:
        """Record the state. None: every file has been replaced, and rows of earlier files that a kill left are deleted."""
        with self.transaction():
            self._change("DELETE FROM regenerating WHERE kind = ?", (kind,))
            if state is not None:
                self._insert(REGENERATING, [Regeneration(kind, state)])
            else:
                self._change("DELETE FROM files WHERE kind = ? AND maker = ?", (kind, SUPERSEDED))
                self._change("DELETE FROM superseded WHERE kind = ?", (kind,))
