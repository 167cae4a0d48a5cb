"""`problems`: one row per input and asset that was refused or failed, with reason code, detail and remedy."""

from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from typing import Literal

import msgspec

from imagemill.fs.fingerprints import FileSignature
from imagemill.store.ledger.database import Database
from imagemill.store.ledger.table import Table


class Problem(msgspec.Struct, frozen=True):
    """The reason why an asset did not process an input. `item`: image id, or file name if there is no id.

    `outcome`: *refused* if the input itself is the cause (not tried again until `stat` changes), *failed* otherwise.
    `at`: when it was first recorded for this reason, ISO 8601 in UTC; set by the ledger.
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

# Reasons that are decisions of the user: listed, but not a fault.
DECISIONS = frozenset({"withdrawn", "near_duplicate"})

# A problem recorded again keeps its first time, unless the reason changes.
_UPSERT = (
    PROBLEMS.insert.replace("INSERT OR REPLACE", "INSERT")
    + " ON CONFLICT (item, asset) DO UPDATE SET "
    + ", ".join(f"{name} = excluded.{name}" for name in PROBLEMS.names if name not in {"item", "asset", "at"})
    + ", at = CASE reason WHEN excluded.reason THEN at ELSE excluded.at END"
)


class Problems(Database):
    """Reads and writes of problems."""

    def problems(self, items: Sequence[str] | None = None) -> list[Problem]:
        """Return the problems, or those of `items`."""
        return list(self._select(PROBLEMS, items, key="item"))

    def record_problems(self, rows: Iterable[Problem]) -> None:
        """Record problems; if several rows have one item and asset, the last counts."""
        now = datetime.now(UTC).isoformat(timespec="seconds")
        last = {(row.item, row.asset): row for row in rows}.values()
        timed = (row if row.at else msgspec.structs.replace(row, at=now) for row in last)
        self._insert_each(_UPSERT, PROBLEMS.values(timed))

    def clear_problems(self, asset: str, items: Iterable[str]) -> None:
        """Delete an asset's problems of these items."""
        self._delete("problems", items, "asset = ?", (asset,), key="item")

    def replace_problems(
        self, asset: str, rows: Iterable[Problem], among: Callable[[Problem], bool] = lambda problem: True
    ) -> None:
        """Replace those of the asset's problems that `among` selects by these."""
        last = {row.item: row for row in rows}
        with self.transaction():
            before = {p.item: p for p in self._select(PROBLEMS, where="asset = ?", given=(asset,))}
            self.clear_problems(asset, [p.item for p in before.values() if p.item not in last and among(p)])
            self.record_problems(row for row in last.values() if not _is_recorded(row, before.get(row.item)))


def _is_recorded(row: Problem, before: Problem | None) -> bool:
    """Return whether recording this problem would change nothing, so that a pass without news does not write."""
    return before is not None and msgspec.structs.replace(row, at=before.at) == before
