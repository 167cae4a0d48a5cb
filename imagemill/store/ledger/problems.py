"""`problems`: one row per input and asset that did not get through, with reason code, detail and remedy."""

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Literal

import msgspec

from imagemill.files import FileSignature
from imagemill.store.ledger.database import Database
from imagemill.store.ledger.table import Table


class Problem(msgspec.Struct, frozen=True):
    """Why an input did not get through an asset. `item`: image id, or file name if there is no id.

    `outcome`: *refused* if the input itself is the cause (not tried again until `stat` changes), *failed* otherwise.
    """

    item: str
    asset: str
    outcome: Literal["refused", "failed"]
    reason: str
    detail: str
    remedy: str
    stat: FileSignature | None = msgspec.field(name="signature", default=None)
    run_id: str = ""
    at: str = ""


PROBLEMS = Table("problems", Problem)


class Problems(Database):
    """Reads and writes of problems."""

    def problems(self, items: Sequence[str] | None = None) -> list[Problem]:
        return list(self._select(PROBLEMS, items, key="item"))

    def record_problems(self, rows: Iterable[Problem]) -> None:
        now = datetime.now(UTC).isoformat(timespec="seconds")
        self._insert(PROBLEMS, (row if row.at else msgspec.structs.replace(row, at=now) for row in rows))

    def clear_problems(self, asset: str, items: Iterable[str]) -> None:
        self._change_each("DELETE FROM problems WHERE item = ? AND asset = ?", ((item, asset) for item in items))

    def replace_problems(self, asset: str, rows: Iterable[Problem]) -> None:
        """Make these the asset's only problems."""
        with self.transaction():
            self._change("DELETE FROM problems WHERE asset = ?", (asset,))
            self.record_problems(rows)
