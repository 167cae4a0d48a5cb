"""`counts` and `changes`: what each run did, and what happened to which image since the last merge of the records."""

from collections.abc import Iterable, Sequence

import msgspec

from imagemill.store.ledger.database import Database
from imagemill.store.ledger.table import Codec, Table


class RunCounts(msgspec.Struct, frozen=True):
    """Counters of one asset in one run."""

    run_id: str
    asset: str
    counts: dict[str, int]


class Change(msgspec.Struct, frozen=True):
    """Something that an asset did for an image since the last merge."""

    item: str
    asset: str
    what: str


COUNTS = Table(
    "counts", RunCounts, counts=Codec(lambda counts: msgspec.json.encode(counts).decode(), msgspec.json.decode)
)
CHANGES = Table("changes", Change)


class Counts(Database):
    """Reads and writes of counters and changes."""

    def counts(self, run_ids: Sequence[str]) -> dict[str, dict[str, int]]:
        """Return counters per asset, added up over these runs."""
        total: dict[str, dict[str, int]] = {}
        for row in self._select(COUNTS, run_ids, key="run_id"):
            into = total.setdefault(row.asset, {})
            for name, value in row.counts.items():
                into[name] = into.get(name, 0) + value
        return total

    def record_counts(self, run_id: str, asset: str, counts: dict[str, int]) -> None:
        self._insert(COUNTS, [RunCounts(run_id, asset, counts)])

    def changes(self) -> dict[str, set[tuple[str, str]]]:
        """Return (asset, what) per image, since the last merge."""
        found: dict[str, set[tuple[str, str]]] = {}
        for row in self._select(CHANGES):
            found.setdefault(row.item, set()).add((row.asset, row.what))
        return found

    def record_changes(self, rows: Iterable[tuple[str, str, str]]) -> None:
        """Record (image id, asset, what was done)."""
        self._insert(CHANGES, (Change(*row) for row in rows))

    def forget_changes(self) -> None:
        self._change("DELETE FROM changes")
