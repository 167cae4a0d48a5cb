"""`counts` and `changes`: counters of each run, and changes to each image since the last merge of the records."""

import sys
from collections.abc import Iterable, Sequence
from itertools import groupby
from operator import itemgetter

import msgspec

from imagemill.store.ledger.database import Database
from imagemill.store.ledger.table import Codec, Table


class RunCounts(msgspec.Struct, frozen=True):
    """Counters of one asset in one run."""

    run_id: str
    asset: str
    counts: dict[str, int]


class Change(msgspec.Struct, frozen=True):
    """A change that an asset made for an image since the last merge."""

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
        """Insert or replace the counters of one asset in one run."""
        self._insert(COUNTS, [RunCounts(run_id, asset, counts)])

    def changes(self) -> dict[str, frozenset[tuple[str, str]]]:
        """Return (asset, change) pairs per image since the last merge. Images with equal pairs share one set."""
        found: dict[str, frozenset[tuple[str, str]]] = {}
        shared: dict[frozenset[tuple[str, str]], frozenset[tuple[str, str]]] = {}
        rows = self._rows("SELECT item, asset, what FROM changes ORDER BY item")
        for item, of_item in groupby(rows, itemgetter(0)):
            made = frozenset([(asset, what) for _, asset, what in of_item])
            found[sys.intern(item)] = shared.setdefault(made, made)
        return found

    def record_changes(self, rows: Iterable[tuple[str, str, str]]) -> None:
        """Record rows of (image id, asset, change)."""
        self._insert(CHANGES, (Change(*row) for row in rows))

    def forget_changes(self) -> None:
        """Delete all changes, after a merge."""
        self._change("DELETE FROM changes")
