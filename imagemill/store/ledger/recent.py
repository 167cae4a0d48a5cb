"""`solved` and `gone`, and what changed since a time.

Rows of `solved` are written by a trigger when a problem is deleted. Which images are gone is decided in
pipeline/problem_list.py.
"""

import time
from collections.abc import Collection, Iterator

import msgspec

from imagemill.store.ledger.database import Database
from imagemill.store.ledger.problems import DECISIONS
from imagemill.store.ledger.table import Table

# Solved problems are kept for this time.
KEPT_DAYS = 30


class SolvedProblem(msgspec.Struct, frozen=True):
    """A problem that was removed, because it no longer held. `solved_at`: seconds since the epoch."""

    item: str
    asset: str
    reason: str
    outcome: str
    detail: str
    at: str
    solved_at: int


class GoneImage(msgspec.Struct, frozen=True):
    """An image that is no longer in `approved/`. `at`: when a command first noticed it, in seconds since the epoch."""

    image_id: str
    at: int


SOLVED = Table("solved", SolvedProblem)
GONE = Table("gone", GoneImage)

# Conditions of an image that was not added since then, and of one of its rows. With the sign, the rows that changed are looked
# for first; there are fewer of them than images.
_NOT_ADDED = "(added_at IS NULL OR added_at < ?1)"
_OF_NOT_ADDED = f"+image_id IN (SELECT image_id FROM {{db}}sources WHERE {_NOT_ADDED})"
_FAULT = "reason NOT IN ({})".format(", ".join(f"'{reason}'" for reason in sorted(DECISIONS)))
_SECONDS = "CAST(strftime('%s', at) AS INT)"
_QUERIES = {
    "added": "SELECT image_id FROM {db}sources WHERE added_at >= ?1",
    "replaced": f"SELECT image_id FROM {{db}}sources WHERE changed_at >= ?1 AND {_NOT_ADDED}",
    "recaptioned": f"SELECT image_id FROM {{db}}captions WHERE changed_at >= ?1 AND {_OF_NOT_ADDED}",
    "recomputed": f"SELECT DISTINCT image_id FROM {{db}}files WHERE changed_at >= ?1 AND {_OF_NOT_ADDED}",
    "withdrawn": f"SELECT image_id FROM {{db}}withdrawn WHERE {_SECONDS} >= ?1",
    "newly_refused": f"SELECT DISTINCT item FROM {{db}}problems WHERE outcome = 'refused' AND {_FAULT} AND {_SECONDS} >= ?1",
    "solved": f"SELECT DISTINCT item FROM {{db}}solved o WHERE solved_at >= ?1 AND {_FAULT}"
    " AND NOT EXISTS (SELECT 1 FROM {db}problems p WHERE p.item = o.item AND p.asset = o.asset)",
    "gone": "SELECT image_id FROM {db}gone WHERE at >= ?1",
}
CHANGES_SINCE = tuple(_QUERIES)


def query_since(kind: str, since: int, db: str = "main") -> str:
    """Return the query of the items with a kind of change since a time, in seconds since the epoch.

    `db`: SQLite's name of the ledger. The query has no parameters, so that it may be a part of another one.
    """
    return _QUERIES[kind].format(db=f"{db}.").replace("?1", str(int(since)))


class Recent(Database):
    """Reads of recent changes, and writes of images that are gone."""

    def changed_since(self, since: int) -> Iterator[tuple[str, list[str]]]:
        """Yield each kind of change with its images, in order of id; of problems, with their items.

        Args:
            since: seconds since the epoch.
        """
        for kind in CHANGES_SINCE:
            yield kind, sorted(item for (item,) in self._rows(query_since(kind, since)))

    def unknown_times(self) -> int:
        """Return the number of images of which it is not known when they last changed."""
        row = self._one("SELECT count(*) FROM sources WHERE changed_at IS NULL")
        return row[0] if row else 0

    def note_gone(self, ids: Collection[str]) -> None:
        """Record which images are gone. One that was gone before keeps its time."""
        now, known = int(time.time()), {row.image_id for row in self._select(GONE)}
        if known == set(ids):
            return
        with self.transaction():
            self._delete("gone", known.difference(ids))
            self._insert(GONE, (GoneImage(each, now) for each in ids if each not in known))

    def forget_solved(self) -> None:
        """Delete the problems that were solved more than `KEPT_DAYS` days ago."""
        self._change("DELETE FROM solved WHERE solved_at < ?", (int(time.time()) - KEPT_DAYS * 24 * 3600,))
