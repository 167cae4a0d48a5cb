"""Kinds whose files are all being replaced: settings `regenerating.<kind>`, and the table `superseded`.

The setting's value is the state of the regeneration (pipeline/stage2/regenerate.py).
"""

import msgspec

from imagemill.fs.fingerprints import FileSignature
from imagemill.store.ledger.files import SUPERSEDED
from imagemill.store.ledger.settings import Settings
from imagemill.store.ledger.table import Table

_MARK = "regenerating."


class SupersededFile(msgspec.Struct, frozen=True):
    """The row of a file before its kind was regenerated."""

    kind: str
    image_id: str
    stat: FileSignature = msgspec.field(name="signature")
    source: str | None
    model_key: str = msgspec.field(name="maker")


SUPERSEDED_FILES = Table("superseded", SupersededFile)

# Selects superseded files whose earlier row is known.
_KNOWN = f"""SELECT 1 FROM superseded s WHERE s.kind = files.kind AND s.image_id = files.image_id
    AND s.signature = files.signature AND s.maker != '{SUPERSEDED}'"""


class Regenerations(Settings):
    """Reads and writes of regenerations."""

    def regenerating(self) -> dict[str, str]:
        """Return the kinds whose files are all being replaced, with their state."""
        marks = {name: value for name, value in self.settings().items() if name.startswith(_MARK)}
        return {name.removeprefix(_MARK): value for name, value in marks.items()}

    def supersede_files(self, kind: str, state: str) -> None:
        """Mark every file of this kind for replacement; keep the earlier rows until a file has been replaced."""
        with self.transaction():
            self._change("DELETE FROM superseded WHERE kind = ?", (kind,))
            self._change(f"INSERT INTO superseded SELECT {SUPERSEDED_FILES.columns} FROM files WHERE kind = ?", (kind,))
            self._change("UPDATE files SET maker = ?, source = NULL WHERE kind = ?", (SUPERSEDED, kind))
            self.record_setting(f"{_MARK}{kind}", state)

    def restore_superseded(self, kind: str) -> int | None:
        """Undo `supersede_files`; return the number of restored files.

        Return None, without changes, if a file has been replaced or an earlier row is unknown.
        """
        with self.transaction():
            replaced = "SELECT 1 FROM files WHERE kind = ? AND maker != ? LIMIT 1"
            unknown = f"SELECT 1 FROM files WHERE kind = ? AND NOT EXISTS ({_KNOWN}) LIMIT 1"
            if self._one(replaced, (kind, SUPERSEDED)) or self._one(unknown, (kind,)):
                return None
            restored = self._change(
                "UPDATE files SET (source, maker) = (SELECT s.source, s.maker FROM superseded s WHERE s.kind = files.kind"
                " AND s.image_id = files.image_id AND s.signature = files.signature) WHERE kind = ?",
                (kind,),
            )
            self._change("DELETE FROM superseded WHERE kind = ?", (kind,))
            self.forget_setting(f"{_MARK}{kind}")
            return restored

    def note_regeneration(self, kind: str, state: str | None) -> None:
        """Record the state; None after every file has been replaced, which deletes remaining rows of superseded files."""
        with self.transaction():
            if state is not None:
                self.record_setting(f"{_MARK}{kind}", state)
                return
            self.forget_setting(f"{_MARK}{kind}")
            self._change("DELETE FROM files WHERE kind = ? AND maker = ?", (kind, SUPERSEDED))
            self._change("DELETE FROM superseded WHERE kind = ?", (kind,))
