"""`settings`: named settings that a data root records about itself.

    identity.<kind>   model that generates the files of an embedding kind (provenance.py)
    place.<name>      folder outside the data root (locations.py)
    regenerating.<kind>   present while all files of a kind are being replaced
    stage1            present if records of the data root were migrated from Stage 1
    root.id           the data root's random id, made with the ledger
    history           id of the Dagster history that a complete run last reported to (dagster_project/snapshot.py)
    begun             present once the second copy was looked for: a ledger without it may lack settings of the copy

All settings but the places, and the withdrawals, have a second copy beside the data (store/second_copy.py).
"""

import msgspec

from imagemill.store.ledger.database import Database
from imagemill.store.ledger.table import Table

BEGUN = "begun"
ROOT_ID = "root.id"
HISTORY = "history"


class Setting(msgspec.Struct, frozen=True):
    """One recorded setting; `value` is text, JSON if it is structured."""

    name: str
    value: str


SETTINGS = Table("settings", Setting)


class Settings(Database):
    """Reads and writes of settings."""

    def settings(self) -> dict[str, str]:
        """Return all settings by name."""
        return {row.name: row.value for row in self._select(SETTINGS)}

    def setting(self, name: str) -> str | None:
        """Return one setting, None if it is not recorded."""
        row = next(self._select(SETTINGS, [name], key="name"), None)
        return row.value if row else None

    def record_setting(self, name: str, value: str) -> None:
        """Insert or replace one setting."""
        self._insert(SETTINGS, [Setting(name, value)])

    def forget_setting(self, name: str) -> None:
        """Delete one setting."""
        self._change("DELETE FROM settings WHERE name = ?", (name,))
