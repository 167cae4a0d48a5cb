"""`runs`, and the columns `changed_at` and `run_id`: when an image, a caption or a file changed, and in which run.

A time is a number of seconds since the epoch. It is unknown, NULL, for rows of releases that recorded none, and for files that
imagemill did not make. A row that is recorded again with the same content keeps its time.
"""

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Self

import msgspec

from imagemill.store.ledger.database import Database
from imagemill.store.ledger.table import R, Table


class RunRow(msgspec.Struct, frozen=True):
    """A run, or a command or tick that changed something without one.

    Attributes:
        run_id: number of the run in this ledger.
        run: id of the run in Dagster; None without a run.
        began_at: seconds since the epoch; of a command, before it listed any folder.
    """

    run_id: int
    run: str | None
    began_at: int


RUNS = Table("runs", RunRow)


class Stamped(Database):
    """A connection whose changes are recorded with their time and run."""

    _run: tuple[str | None, int] | None = None  # run in Dagster, and its number in the ledger

    def in_run(self, run: str) -> None:
        """Record the changes that follow as those of this run; also earlier ones of this connection that were in none."""
        if self._run and self._run[0] == run:
            return
        with self.transaction():
            known = self._one("SELECT run_id FROM runs WHERE run = ?", (run,))
            if known is None and self._run and self._run[0] is None:
                self._change("UPDATE runs SET run = ? WHERE run_id = ?", (run, self._run[1]))
                known = self._run[1:]
            self._run = run, known[0] if known else self._new_run(run)

    @contextmanager
    def helper(self) -> Iterator[Self]:
        """Yield the second connection, whose changes are recorded as those of the same run."""
        with super().helper() as connection:
            connection._run = self._run
            yield connection

    def run_began_at(self, run: str) -> dict[str, int]:
        """Return when the runs whose id in Dagster begins with this text began, in seconds since the epoch."""
        rows = self._rows("SELECT run, began_at FROM runs WHERE substr(run, 1, length(?)) = ?", (run, run))
        return dict(rows)  # type: ignore[arg-type]

    def _new_run(self, run: str | None) -> int:
        began = int(time.time()) if self._run else self._opened_at
        self._change("INSERT INTO runs (run, began_at) VALUES (?, ?)", (run, began))
        row = self._one("SELECT last_insert_rowid()")
        assert row
        return int(row[0])

    def _record_stamped(self, insert: "StampedInsert", rows: Iterable[tuple[Any, ...]], *, known: bool = True) -> None:
        """Insert rows of values. `known`: whether they change now; if not, their time is unknown."""
        given = list(rows)
        if not given:
            return
        with self.transaction():
            if known and self._run is None:
                self._run = None, self._new_run(None)
            stamp = (int(time.time()), self._run[1]) if known and self._run else (None, None)
            stamps = (*stamp, stamp[0]) if insert.added else stamp
            self._insert_each(insert.statement, ((*values, *stamps) for values in given))


class StampedInsert(NamedTuple):
    """A statement that inserts a row of a stamped table, or replaces it if it differs: an equal row is no change.

    Attributes:
        statement: takes the row's values, then time and run.
        added: whether it takes the time once more, for the column `added_at`.
    """

    statement: str
    added: bool


def stamped(table: Table[R], key: str, same: str, *, added: bool = False) -> StampedInsert:
    """Return the statement for a stamped table.

    Args:
        table: the table, whose row type lacks the two columns.
        key: its key, as in SQL.
        same: condition under which the content of the row has not changed, on the table and `excluded`.
        added: whether the table also has the column `added_at`, the time of the first row.
    """
    keys = {name.strip() for name in key.split(",")}
    names = [name for name in table.names if name not in keys]
    replaced = [f"{name} = excluded.{name}" for name in names]
    kept = [f"{n} = CASE WHEN {same} THEN {table.name}.{n} ELSE excluded.{n} END" for n in ("changed_at", "run_id")]
    columns = [*table.names, "changed_at", "run_id", *(["added_at"] if added else [])]
    differs = " OR ".join(f"{table.name}.{name} IS NOT excluded.{name}" for name in names)
    return StampedInsert(
        f"INSERT INTO {table.name} ({', '.join(columns)}) VALUES ({', '.join('?' * len(columns))})"
        f" ON CONFLICT ({key}) DO UPDATE SET {', '.join((*replaced, *kept))} WHERE {differs}",
        added,
    )
