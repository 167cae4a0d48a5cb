"""`withdrawn`: images that a user withdrew from the shards; `marks`: images that a user has marked, to withdraw them."""

from collections.abc import Iterable
from datetime import UTC, datetime

import msgspec

from imagemill.store.ledger.database import Database
from imagemill.store.ledger.table import Table


class Decision(msgspec.Struct, frozen=True):
    """One image that was withdrawn or marked. `at`: UTC, ISO 8601."""

    image_id: str
    at: str


WITHDRAWN = Table("withdrawn", Decision)
MARKS = Table("marks", Decision)


class Withdrawals(Database):
    """Reads and writes of withdrawals and marks."""

    def withdrawals(self) -> dict[str, str]:
        """Return the withdrawn images with the time of their withdrawal."""
        return {row.image_id: row.at for row in self._select(WITHDRAWN)}

    def withdraw(self, ids: Iterable[str]) -> None:
        """Record these images as withdrawn now, and remove their marks."""
        withdrawn = dict.fromkeys(ids, _now())
        with self.transaction():
            self.record_withdrawals(withdrawn)
            self._delete("marks", withdrawn)

    def record_withdrawals(self, withdrawn: dict[str, str]) -> None:
        """Insert or replace withdrawals with their times."""
        self._insert(WITHDRAWN, (Decision(image_id, at) for image_id, at in withdrawn.items()))

    def restore(self, ids: Iterable[str]) -> None:
        """Delete the withdrawals of these images."""
        self._delete("withdrawn", ids)

    def marks(self) -> dict[str, str]:
        """Return the marked images with the time of their mark."""
        return {row.image_id: row.at for row in self._select(MARKS)}

    def mark(self, ids: Iterable[str]) -> None:
        """Mark these images; one that is marked keeps its time."""
        now = _now()
        with self.keeping_snapshot():
            self._insert_each("INSERT OR IGNORE INTO marks VALUES (?, ?)", ((image_id, now) for image_id in ids))

    def unmark(self, ids: Iterable[str]) -> None:
        """Remove the marks of these images."""
        with self.keeping_snapshot():
            self._delete("marks", ids)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="microseconds")
