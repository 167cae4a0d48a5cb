"""`verified`: shard sets that were written or passed a full check, and records as merged, with signatures at that time."""

from pathlib import Path

import msgspec

from imagemill.store.ledger.database import Database
from imagemill.store.ledger.table import Table


class VerifiedSet(msgspec.Struct, frozen=True):
    """One set, or the file of records, by its path."""

    path: str
    signature: str


VERIFIED = Table("verified", VerifiedSet)


class VerifiedSets(Database):
    """Reads and writes of verified shard sets and merged records."""

    def verified(self, path: Path) -> str | None:
        """Return the signature with which a set was last verified, or the records were last merged."""
        row = next(self._select(VERIFIED, [str(path)], key="path"), None)
        return row.signature if row else None

    def record_verified(self, path: Path, signature: str) -> None:
        """Insert or replace the signature of a verified set, or of merged records."""
        self._insert(VERIFIED, [VerifiedSet(str(path), signature)])
