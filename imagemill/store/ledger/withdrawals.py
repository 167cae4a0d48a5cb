"""`withdrawn`: images that a user withdrew from the shards."""

from collections.abc import Iterable
from datetime import UTC, datetime

import msgspec

from imagemill.store.ledger.database import Database
from imagemill.store.ledger.table import Table


class Withdrawal(msgspec.Struct, frozen=True):
    """One withdrawn image. `at`: UTC, ISO 8601."""

    image_id: str
    at: str


WITHDRAWN = Table("withdrawn", Withdrawal)


class Withdrawals(Database):
    """Reads and writes of withdrawals."""

    def withdrawals(self) -> dict[str, str]:
        """Return the withdrawn images with the time of their withdrawal."""
        return {row.image_id: row.at for row in self._select(WITHDRAWN)}

    def withdraw(self, ids: Iterable[str]) -> None:
        """Record these images as withdrawn now."""
        now = datetime.now(UTC).isoformat(timespec="microseconds")
        self.record_withdrawals(dict.fromkeys(ids, now))

    def record_withdrawals(self, withdrawn: dict[str, str]) -> None:
        """Insert or replace withdrawals with their times."""
        self._insert(WITHDRAWN, (Withdrawal(image_id, at) for image_id, at in withdrawn.items()))

    def restore(self, ids: Iterable[str]) -> None:
        """Delete the withdrawals of these images."""
        self._change_each("DELETE FROM withdrawn WHERE image_id = ?", ((image_id,) for image_id in ids))
