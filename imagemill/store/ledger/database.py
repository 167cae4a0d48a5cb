"""The SQLite connection of a ledger: opening, transactions, selection by ids."""

import os
import sqlite3
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import chain
from operator import attrgetter
from pathlib import Path
from typing import Any, Self, TypeVar

import msgspec

from imagemill.errors import ImagemillError, disk_full_reported
from imagemill.fs.mounts import refuse_network_folder
from imagemill.parts import in_parts
from imagemill.store.ledger.schema import SNAPSHOT, VERSION, keep_snapshot, migrate, state_of_files
from imagemill.store.ledger.table import Table, in_statements

_DAMAGED = ("SQLITE_CORRUPT", "SQLITE_NOTADB", "SQLITE_ERROR")

R = TypeVar("R", bound=msgspec.Struct)

_ROWS_AT_ONCE, _IMAGES_AT_ONCE = 500, 8192
_IMAGE_ID = attrgetter("image_id")

# Seconds for which a connection waits for another one to finish a transaction.
_SECONDS = 60

# An in-memory ledger, for read-only work on a data root without one.
IN_MEMORY = Path(":memory:")


class LedgerDamaged(ImagemillError, RuntimeError):
    """The ledger's file cannot be read as a database; `imagemill repair` rebuilds it."""

    @classmethod
    def at(cls, path: Path, error: object) -> "LedgerDamaged":
        """Return the error for a damaged file."""
        return cls(
            f"the ledger is damaged: {error}",
            where=path,
            why="a part of the file was overwritten, lost or truncated",
            do="run `imagemill repair`, which reports what it can rebuild from files, records and shards; "
            "`imagemill repair --apply` rebuilds it and keeps the damaged file in .imagemill/quarantine/",
        )


class Database:
    """One connection to the ledger's file. Use it as a context manager; `transaction()` groups writes.

    Raises:
        LedgerDamaged: if the file is not a ledger, or a page of it cannot be read.
        ImagemillError: if the file cannot be opened, is on a network file system, or has a later version.
    """

    def __init__(self, path: Path, *, read_only: bool = False) -> None:
        self.path = path
        self._helper: Self | None = None
        self._as_before: dict[int, int] = {}
        self._opened_at = int(time.time())
        with self._errors():
            self._db = _connect(path, read_only)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection, and that of `helper`."""
        if self._helper:
            self._helper.close()
        self._db.close()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Commit all changes of the block durably, or none. Nested blocks join the outer transaction."""
        if self._db.in_transaction:
            yield
            return
        with self._errors():
            self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
            with self._errors():
                self._db.execute("COMMIT")
        except BaseException:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise

    def version_seen(self) -> int:
        """Return a number that changes whenever another connection has changed the ledger, except those of `helper`."""
        version = self._data_version()
        return self._as_before.get(version, version)

    @contextmanager
    def helper(self) -> Iterator[Self]:
        """Yield a second connection, for a thread that ends before the block does. It is opened once.

        Its changes do not count as those of another connection, unless this connection or another one made changes as well.
        """
        self._helper = connection = self._helper or type(self)(self.path)
        of_helper, before = connection._data_version(), self.version_seen()
        try:
            yield connection
        finally:
            after = self._data_version()
            if connection._data_version() == of_helper:  # so only the helper has made changes
                self._as_before[after] = before

    def file_state(self) -> str:
        """Write the log into the database, unless another connection reads it; return a text that each later change changes."""
        with self._errors():
            self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        return state_of_files(self.path)

    @contextmanager
    def keeping_snapshot(self) -> Iterator[None]:
        """Change in one transaction what the snapshot does not contain: if it holds before the block, it holds afterwards.

        It does not if another connection reads the ledger or changes it meanwhile.
        """
        with self.transaction():
            before, version = state_of_files(self.path), self._data_version()
            yield
        with self._errors():
            self._db.execute("PRAGMA busy_timeout = 0")  # not to wait for readers
            try:
                after = self.file_state()
            finally:
                self._db.execute(f"PRAGMA busy_timeout = {1000 * _SECONDS}")
        if before and self._data_version() == version:
            keep_snapshot(self.path.with_name(SNAPSHOT), before, after)

    def _data_version(self) -> int:
        row = self._one("PRAGMA data_version")
        assert row
        return int(row[0])

    def _errors(self) -> AbstractContextManager[None]:
        return ledger_errors(self.path)

    # ---- statements

    def _rows(self, sql: str, given: Sequence[Any] = ()) -> Iterator[tuple[Any, ...]]:
        """Return an iterator over the rows of a query, which is executed on first use."""
        return chain.from_iterable(self._parts(sql, given))

    def _parts(self, sql: str, given: Sequence[Any]) -> Iterator[list[tuple[Any, ...]]]:
        """Yield the rows of a query in lists: a generator per row would take half of the time."""
        with self._errors():
            found = self._db.execute(sql, given)
            while rows := found.fetchmany(_ROWS_AT_ONCE):
                yield rows

    def _one(self, sql: str, given: Sequence[Any] = ()) -> tuple[Any, ...] | None:
        with self._errors():
            return self._db.execute(sql, given).fetchone()

    def _change(self, sql: str, given: Sequence[Any] = ()) -> int:
        """Execute one statement in a transaction; return the number of changed rows."""
        with self.transaction(), self._errors():
            return self._db.execute(sql, given).rowcount

    def _change_each(self, sql: str, rows: Iterable[Sequence[Any]]) -> int:
        """Execute one statement for each row, in a transaction; return the number of changed rows."""
        with self.transaction(), self._errors():
            return self._db.executemany(sql, rows).rowcount

    def _insert_each(self, insert: str, rows: Iterable[Sequence[Any]]) -> int:
        """Insert rows by a statement with one `VALUES (?, …)`, in a transaction; return the number of changed rows."""
        with self.transaction(), self._errors():
            return sum(self._db.execute(*part).rowcount for part in in_statements(insert, rows))

    def _insert(self, table: Table[R], rows: Iterable[R]) -> None:
        self._insert_each(table.insert, table.values(rows))

    def _delete(
        self, table: str, ids: Iterable[str], where: str = "1", given: Sequence[Any] = (), *, key: str = "image_id"
    ) -> int:
        """Delete the rows of these ids; return their number."""
        statement = f"DELETE FROM {table} WHERE {where} AND {key} IN (SELECT value FROM json_each(?))"
        return self._change(statement, (*given, json_of(list(ids))))

    def _select(
        self,
        table: Table[R],
        ids: Sequence[str | int] | None = None,
        where: str = "1",
        given: Sequence[Any] = (),
        *,
        key: str = "image_id",
    ) -> Iterator[R]:
        chosen, values = one_of(ids, key)
        rows = self._rows(f"SELECT {table.columns} FROM {table.name} WHERE {where} AND {chosen}", (*given, *values))
        return table.rows(rows)

    def _of_images(
        self, table: Table[R], ids: Sequence[str], where: str = "1", given: Sequence[Any] = ()
    ) -> Iterator[R]:
        """Return an iterator over the rows of these images, many of which are read as one value.

        A row of its own for each takes twice the time, and wakes other threads each time.
        """
        parts = in_parts(sorted(ids), _IMAGES_AT_ONCE)
        return chain.from_iterable(self._together(table, part, where, given) for part in parts)

    def _together(self, table: Table[R], ids: list[str], where: str, given: Sequence[Any]) -> Iterable[R]:
        """Return the rows of these images, whose ids are sorted, read as one value."""
        chosen, values = in_range((ids[0], ids[-1]))
        many = f"SELECT 1 FROM {table.name} WHERE {where} AND {chosen} LIMIT 1 OFFSET {2 * len(ids)}"
        # A search for each image takes twice as long as reading all rows between the first and the last one.
        if is_sparse := self._one(many, (*given, *values)) is not None:
            chosen, values = one_of(ids)
        columns = f"json_group_array(json_array({table.columns}))"
        found = self._one(f"SELECT {columns} FROM {table.name} WHERE {where} AND {chosen}", (*given, *values))
        assert found
        rows = table.together.decode(found[0])
        found_ids = list(map(_IMAGE_ID, rows))
        if is_sparse or found_ids == ids:
            return rows
        wanted = set(ids)
        return [row for row, image_id in zip(rows, found_ids, strict=True) if image_id in wanted]


def in_range(between: tuple[str, str] | None) -> tuple[str, Sequence[str]]:
    """Return the condition of the rows from the first of two image ids to the last, and its parameters; None: of all rows."""
    return ("image_id BETWEEN ? AND ?", between) if between else ("1", ())


def one_of(values: Collection[str | int] | None, column: str = "image_id") -> tuple[str, Sequence[str]]:
    """Return the condition of rows with one of these values in a column, and its parameters; None: of all rows."""
    # json_each takes any number of values in one parameter; IN (?, ?, …) has a limit.
    return ("1", ()) if values is None else (f"{column} IN (SELECT value FROM json_each(?))", (json_of([*values]),))


def json_of(values: Sequence[Any]) -> str:
    """Return values as the parameter of SQLite's `json_each`."""
    return msgspec.json.encode(values).decode()


@contextmanager
def ledger_errors(path: Path) -> Iterator[None]:
    """Translate SQLite's exceptions: a full disk, a damaged file, a file that cannot be opened.

    Raises:
        LedgerDamaged: if the file is damaged.
        DiskFull: if the disk is full.
        ImagemillError: for other errors of the file.
    """
    try:
        with disk_full_reported(path):
            yield
    except sqlite3.OperationalError as error:
        # A missing table, a malformed schema, invalid text.
        if _name_of(error).startswith(_DAMAGED) or "Could not decode" in str(error):
            raise LedgerDamaged.at(path, error) from error
        if _name_of(error).startswith("SQLITE_IOERR"):
            raise ImagemillError(
                f"the ledger cannot be read or written: {error}",
                where=path,
                why="the disk or its file system reported an error",
                do="check the disk, then run the same command again; if the file itself is damaged, run `imagemill repair`",
            ) from error
        raise ImagemillError(
            f"the ledger cannot be used: {error}",
            where=path,
            why="its folder cannot be written to or has no room for another file, or another program has locked the file",
            do="make the folder writable, delete files if `df -i` shows that no further ones can be made, or end the other "
            "program, then run the same command again",
        ) from error
    except sqlite3.ProgrammingError:
        raise  # for example a closed ledger: an error of the program, not of the file
    except (sqlite3.DatabaseError, UnicodeDecodeError, msgspec.DecodeError) as error:
        raise LedgerDamaged.at(path, error) from error


def _name_of(error: sqlite3.OperationalError) -> str:
    return getattr(error, "sqlite_errorname", None) or ""


def _connect(path: Path, read_only: bool) -> sqlite3.Connection:
    if path != IN_MEMORY:
        refuse_network_folder(path.parent, "the ledger")
    if read_only:
        db = sqlite3.connect(_read_only_uri(path), uri=True, timeout=_SECONDS, isolation_level=None)
        try:
            is_current = _version(db, path) == VERSION
        except sqlite3.OperationalError as error:
            # The transaction of a killed process must be rolled back first, which needs write access.
            if not _name_of(error).startswith("SQLITE_READONLY"):
                raise
            is_current = False
        if not is_current:  # also if an earlier release wrote it, or its creation was interrupted
            db.close()
            _connect(path, read_only=False).close()
            return _connect(path, read_only=True)
        return db
    path.parent.mkdir(parents=True, exist_ok=True)
    # One thread at a time uses a connection: that of `helper` is opened in one thread and used in another.
    db = sqlite3.connect(path, timeout=_SECONDS, isolation_level=None, check_same_thread=False, uri=path == IN_MEMORY)
    try:
        # FULL: a row is on disk before the file that it describes gets its name.
        db.execute("PRAGMA synchronous = FULL")
        if _version(db, path) < VERSION:
            migrate(db, None if path == IN_MEMORY else path)
    except BaseException:
        db.close()
        raise
    return db


@contextmanager
def attached(db: sqlite3.Connection, path: Path, name: str) -> Iterator[None]:
    """Attach a ledger to an in-memory database, read-only, under a name for statements."""
    db.execute(f"ATTACH ? AS {name}", (_read_only_uri(path),))
    try:
        yield
    finally:
        db.execute(f"DETACH {name}")


def _read_only_uri(path: Path) -> str:
    """Return the URI of a ledger for reading.

    SQLite must write beside a database with a write-ahead log, unless the file is declared immutable. That is valid in
    a folder that cannot be written to and contains no log.
    """
    log = path.with_name(f"{path.name}-wal")
    is_fixed = not os.access(path.parent, os.W_OK) and not (log.exists() and log.stat().st_size)
    return f"{path.as_uri()}?mode=ro{'&immutable=1' if is_fixed else ''}"


def _version(db: sqlite3.Connection, path: Path) -> int:
    version = db.execute("PRAGMA user_version").fetchone()[0]
    if version > VERSION:
        raise ImagemillError(
            f"the ledger has schema version {version}; this imagemill supports up to {VERSION}",
            where=path,
            do="upgrade imagemill",
        )
    return version
