"""The Dagster history of a data root: stock SQLite storage with batched event writes.

Stock storage writes two databases per event: 15 to 34 ms per image and asset. One transaction per batch: 0.3 ms.

`dagster.yaml` names `BatchSqliteStorage`. What it shares with PostgreSQL's is in batched_events.py.

The index has every event; the file of a run has, of the materialisations of a batch, the last one of each asset.

Private names of Dagster 1.13 are used. If one is missing, a message goes to stderr and the stock behaviour remains.
tests/dagster_project/internals/test_storage.py compares every table with stock storage's after the same runs.
"""

import functools
import os
import shutil
import sqlite3
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from datetime import datetime
from pathlib import Path
from typing import Any, Self

from alembic.config import Config
from alembic.script import ScriptDirectory
from dagster import EventLogEntry
from dagster._core.storage.event_log.sqlite.sqlite_event_log import INDEX_SHARD_NAME, SqliteEventLogStorage
from dagster._core.storage.sqlite_storage import DagsterSqliteStorage
from dagster._serdes import ConfigurableClassData
from filelock import FileLock
from sqlalchemy import URL, Table, create_engine, func
from sqlalchemy.engine import Connection, Engine
from sqlalchemy.event import listen
from sqlalchemy.exc import DisconnectionError
from sqlalchemy.pool import NullPool, QueuePool
from sqlalchemy.sql.elements import ColumnElement

from dagster_project.internals.batched_events import (
    BatchedEventLog,
    SqlEventLogStorageTable,
    is_of_partition,
    last_of_each_asset,
)
from imagemill.fs.atomic import write_new
from imagemill.store.ledger.table import in_statements
from resources.dagster_internals.events import interrupts_held
from resources.dagster_internals.missing import report_missing

try:
    from dagster._core.storage.sqlite_storage import _event_logs_directory
except ImportError as missing:
    _event_logs_directory = None
    report_missing(missing, "the history is written by Dagster's own storage: about 11 ms per image instead of 0.6")

# Python's SQLite gives up after five seconds; a busy disk may take longer, and one of two concurrent commands would lose its run.
LOCK_SECONDS = 60
_CONNECTING = {"timeout": LOCK_SECONDS}

LOCK_NAME = ".lock"  # held while a process opens the history
_UNFINISHED = ".new-"


def _read_migrations_once() -> None:
    """Keep the migrations of Dagster's databases, of which stock storage reads every file again for each new database."""
    read = ScriptDirectory.from_config
    known: dict[str, ScriptDirectory] = {}

    def from_config(config: Config) -> ScriptDirectory:
        place = config.get_main_option("script_location") or ""
        if place not in known:
            known[place] = read(config)
        return known[place]

    ScriptDirectory.from_config = from_config


_read_migrations_once()


@functools.lru_cache(maxsize=32)
def _engine(address: str) -> Engine:
    """Return the engine of a database, which holds no connection.

    For the file of a run: closing the last connection writes to it, of which the page of the run is notified.
    Stock storage makes an engine for each statement, and SQLAlchemy then compiles the statement again.
    """
    return create_engine(address, poolclass=NullPool, connect_args=_CONNECTING)


@functools.lru_cache(maxsize=32)
def _open_engine(address: str) -> Engine:
    """Return the engine of a database that keeps one connection open until `dispose`.

    Closing the last connection writes SQLite's log into the database and syncs it: a sixth of a small command's CPU time.
    """
    engine = create_engine(address, poolclass=QueuePool, pool_size=1, max_overflow=-1, connect_args=_CONNECTING)
    path = engine.url.database
    assert path

    def note(_connection: object, record: Any) -> None:
        record.info["file"] = _file_at(path)

    def compare(_connection: object, record: Any, _checked_out: object) -> None:
        if record.info["file"] != _file_at(path):
            raise DisconnectionError(f"{path} has been replaced")  # SQLAlchemy then opens the new file

    listen(engine, "connect", note)
    listen(engine, "checkout", compare)
    return engine


def _file_at(path: str) -> tuple[int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino


# Whether the databases that this thread opens may be lost when the machine stops.
_without_syncs: ContextVar[bool] = ContextVar("_without_syncs", default=False)


def _switch_off_syncs(connection: object, _record: object) -> None:
    if isinstance(connection, sqlite3.Connection):
        connection.execute("PRAGMA synchronous=OFF")


@functools.cache
def _allow_without_syncs() -> None:
    """Let `_without_syncs` take effect for engines that other code makes.

    The listener stays: SQLAlchemy raises in a thread that connects while another one adds or removes a listener of all engines.
    """

    def switch_off(connection: object, record: object) -> None:
        if _without_syncs.get():
            _switch_off_syncs(connection, record)

    listen(Engine, "connect", switch_off)


def _create_history(home: Path) -> None:
    """Create the databases of a history; each appears whole. Call it with the lock.

    They are written without syncing the disk, which stock storage does forty times, and synced at the end.
    """
    _allow_without_syncs()
    with tempfile.TemporaryDirectory(dir=home, prefix=_UNFINISHED) as folder:
        before = _without_syncs.set(True)
        try:
            DagsterSqliteStorage(folder).dispose()
        finally:
            _without_syncs.reset(before)
        for file in [path for path in Path(folder).rglob("*") if path.is_file()]:
            target = home / file.relative_to(folder)
            target.parent.mkdir(parents=True, exist_ok=True)
            with suppress(FileExistsError):
                write_new(target, file.read_bytes())


@contextmanager
def _transaction(engine: Engine) -> Iterator[Connection]:
    with engine.connect() as connection, connection.begin():
        yield connection


class BatchSqliteEventLogStorage(BatchedEventLog, SqliteEventLogStorage):
    """SQLite event log storage with one transaction per batch of asset events, and cached partition keys."""

    @contextmanager
    def _connect(self, shard: str) -> Iterator[Connection]:
        with interrupts_held(), self._db_lock:
            address = self.conn_string_for_shard(shard)
            engine = _open_engine(address) if shard == INDEX_SHARD_NAME else _engine(address)
            if shard not in self._initialized_dbs:
                path = Path(self.path_for_shard(shard))
                if shard == INDEX_SHARD_NAME or path.exists():
                    self._initdb(engine)
                else:
                    with suppress(FileExistsError):  # the page of a run looks for events at the same moment
                        write_new(path, self._without_events)
                self._initialized_dbs.add(shard)
            with _transaction(engine) as connection:
                yield connection

    @functools.cached_property
    def _without_events(self) -> bytes:
        """The file of a run without events: every new one has these bytes."""
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "run.db")
            engine = create_engine(URL.create("sqlite", database=str(file)), poolclass=NullPool)
            listen(engine, "connect", _switch_off_syncs)
            self._initdb(engine)
            return file.read_bytes()

    def dispose(self) -> None:
        """Stop watching, and close the index."""
        super().dispose()
        _open_engine(self.conn_string_for_shard(INDEX_SHARD_NAME)).dispose()

    def _store_together(self, events: Sequence[EventLogEntry]) -> None:
        assert SqlEventLogStorageTable is not None
        table = SqlEventLogStorageTable
        rows = [self._row(event) for event in events]
        last = list(last_of_each_asset(events, range(len(events))))
        shown = {number for _, number in last}
        in_run = [row for number, row in enumerate(rows) if number in shown or not is_of_partition(events[number])]
        for run_id, group in _by_run(in_run).items():
            with self.run_connection(run_id) as connection:
                connection.execute(table.insert(), group)
        with self.index_transaction() as connection:
            ids = self._insert(connection, table, rows)
            self._store_asset_event_tags(connection, events, ids)
            for event, number in last:
                self._store_asset_event(connection, event, ids[number])

    def _insert(self, connection: Connection, table: Table, rows: Sequence[Mapping[str, Any]]) -> range:
        """Insert rows by the driver, which takes a fifth of SQLAlchemy's time; return their ids.

        The first statement takes SQLite's write lock, so no other writer's ids lie among them.
        """
        columns = list(rows[0])
        insert = f"INSERT INTO {table.name} ({', '.join(columns)}) VALUES ({', '.join('?' * len(columns))})"
        # A time is stored as SQLAlchemy stores it in SQLite.
        values = (
            [value.isoformat(" ", "microseconds") if type(value) is datetime else value for value in row.values()]
            for row in rows
        )
        last = [
            connection.exec_driver_sql(statement, tuple(given)).lastrowid
            for statement, given in in_statements(insert, values)
        ][-1]
        return range(last - len(rows) + 1, last + 1)

    def _stamp_columns(self, table: Table) -> Sequence[ColumnElement[Any]]:
        """Return newest id, its key, and the count.

        SQLite reuses the newest id after its row is deleted, hence the key. It takes a bare column from the row of the maximum.
        """
        return [func.max(table.c.id), table.c.partition, func.count()]

    def _version(self, connection: Connection) -> object:
        """Return the connection with its numbers of changes by others and by itself."""
        ours = connection.connection.dbapi_connection
        if not isinstance(ours, sqlite3.Connection):
            return None
        # The connection itself, because the numbers of another one would mean something else.
        return ours, ours.execute("PRAGMA data_version").fetchone(), ours.total_changes


def _by_run(rows: Iterable[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    runs: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        runs.setdefault(row["run_id"], []).append(row)
    return runs


class BatchSqliteStorage(DagsterSqliteStorage):
    """The storage that `dagster.yaml` names: stock SQLite storage for runs and schedules, batched storage for the event log."""

    def __init__(self, base_dir: str, inst_data: ConfigurableClassData | None = None) -> None:
        # Dagster creates the tables of a new history without checking whether another command does the same.
        Path(base_dir).mkdir(parents=True, exist_ok=True)
        with FileLock(Path(base_dir, LOCK_NAME)):
            self._open(base_dir, inst_data)

    def _open(self, base_dir: str, inst_data: ConfigurableClassData | None) -> None:
        for left in Path(base_dir).glob(f"{_UNFINISHED}*"):
            shutil.rmtree(left)  # of a process that was killed
        if not Path(base_dir, "history").exists():
            _create_history(Path(base_dir))
        super().__init__(base_dir, inst_data)
        runs = _open_engine(self._run_storage._conn_string)
        self._run_storage.connect = functools.partial(_transaction, runs)
        self._run_storage.dispose = runs.dispose
        self._schedule_storage.connect = functools.partial(_transaction, _engine(self._schedule_storage._conn_string))
        if _event_logs_directory is not None:
            self._event_log_storage = BatchSqliteEventLogStorage(_event_logs_directory(base_dir))

    @classmethod
    def from_config_value(cls, inst_data: ConfigurableClassData, config_value: Mapping[str, Any]) -> Self:
        """Return the storage with the configuration of dagster.yaml."""
        return cls.from_local(inst_data=inst_data, **config_value)
