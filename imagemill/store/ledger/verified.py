"""`verified`: shard sets that were written or passed a full check, with the signature of their files at that time."""

from pathlib import Path

import msgspec

from imagemill.store.ledger.database import Database
from imagemill.store.ledger.table import Table


class VerifiedSet(msgspec.Struct, frozen=True):
    """One set, by its path."""

    path: str
    signature: str


VERIFIED = Table("verified", VerifiedSet)


class VerifiedSets(Database):
    """Reads and writes of verified shard sets."""

    def verified(self, path: Path) -> str | None:
        """Return the signature with which a set was last verified."""
        row = next(self._select(VERIFIED, [str(path)], key="path"), None)
        return row.signature if row else None

    def record_verified(self, path: Path, signature: str) -> None:
        """Insert or replace the signature of a verified set."""
        self._insert(VERIFIED, [VerifiedSet(str(path), signature)])
