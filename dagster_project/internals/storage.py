"""The Dagster history of a data root: stock SQLite storage with batched event writes.

Stock storage writes two databases per event: 15 to 34 ms per image and asset. One transaction per batch: 0.3 ms.

`dagster.yaml` names `BatchSqliteStorage`. Events are built in resources/dagster_internals/events.py.

The index has every event; the file of a run has, of the materialisations of a batch, the last one of each asset.

Private names of Dagster 1.13 are used. If one is missing, a message goes to stderr and the stock behaviour remains.
tests/dagster_project/internals/test_storage.py compares every table with stock storage's after the same runs.
"""

import itertools
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any, Self

from dagster import AssetKey, DagsterEventType, EventLogEntry
from dagster._core.storage.event_log.sqlite.sqlite_event_log import SqliteEventLogStorage
from dagster._core.storage.sqlite_storage import DagsterSqliteStorage
from dagster._serdes import ConfigurableClassData
from dagster_shared.serdes import serialize_value
from filelock import FileLock
from sqlalchemy import Table, func, select
from sqlalchemy.engine import Connection

from resources.dagster_internals.events import interrupts_held
from resources.dagster_internals.missing import report_missing

try:
    from dagster._core.storage.event_log.schema import (
        AssetEventTagsTable,
        DynamicPartitionsTable,
        SqlEventLogStorageTable,
    )
    from dagster._core.storage.sqlite_storage import _event_logs_directory

    from dagster_project.internals.event_json import EventJson
except ImportError as missing:
    AssetEventTagsTable = DynamicPartitionsTable = SqlEventLogStorageTable = _event_logs_directory = EventJson = None
    report_missing(missing, "the history is written by Dagster's own storage: about 11 ms per image instead of 0.6")

# Events that concern only one asset: no check, no run status.
ONE_ASSET_TYPES = frozenset(
    {
        DagsterEventType.ASSET_MATERIALIZATION,
        DagsterEventType.ASSET_OBSERVATION,
        DagsterEventType.ASSET_MATERIALIZATION_PLANNED,
    }
)
_METHODS = (
    "_event_insert_timestamp", "_tags_for_asset_event", "_store_asset_event_tags", "_store_asset_event", "_get_assets_details",
    "run_connection", "index_transaction",
)  # fmt: skip
_MISSING = [name for name in _METHODS if not hasattr(SqliteEventLogStorage, name)]
_CAN_BATCH = SqlEventLogStorageTable is not None and not _MISSING
if _MISSING:
    report_missing(", ".join(_MISSING), "events are stored one at a time: about 11 ms per image instead of 0.6")

# Python's SQLite gives up after five seconds; a busy disk may take longer, and one of two concurrent commands would lose its run.
LOCK_SECONDS = 60

LOCK_NAME = ".lock"  # held while a process opens the history

BATCH_VARIABLE = "DAGSTER_EVENT_BATCH_SIZE"
BATCH_SIZE = "1000"


class BatchSqliteEventLogStorage(SqliteEventLogStorage):
    """Event log storage with one transaction per batch of asset events, and cached partition keys."""

    def __init__(self, base_dir: str, inst_data: ConfigurableClassData | None = None) -> None:
        # Dagster passes batches only if this variable is set, in every process that writes events.
        os.environ.setdefault(BATCH_VARIABLE, BATCH_SIZE)
        self._partition_keys: dict[str, tuple[object, tuple[str, ...]]] = {}
        self._json = EventJson() if EventJson else None
        self._has_tags = False
        super().__init__(base_dir, inst_data)

    @contextmanager
    def _connect(self, shard: str) -> Iterator[Connection]:
        with interrupts_held(), super()._connect(shard) as connection:
            connection.exec_driver_sql(f"PRAGMA busy_timeout = {1000 * LOCK_SECONDS}")
            yield connection

    def store_event_batch(self, events: Sequence[EventLogEntry]) -> None:
        """Store events in order: adjacent events of single assets together, all others one by one."""
        for together, group in itertools.groupby(events, _concerns_one_asset):
            batch = list(group)
            if together and _CAN_BATCH and len(batch) > 1:
                self._store_together(batch)
            else:
                super().store_event_batch(batch)

    def _store_together(self, events: Sequence[EventLogEntry]) -> None:
        assert SqlEventLogStorageTable is not None
        table = SqlEventLogStorageTable
        rows = [self._row(event) for event in events]
        last = list(_last_of_each_asset(events, range(len(events))))
        shown = {number for _, number in last}
        in_run = [row for number, row in enumerate(rows) if number in shown or not _is_of_partition(events[number])]
        for run_id, group in _by_run(in_run).items():
            with self.run_connection(run_id) as connection:
                connection.execute(table.insert(), group)
        with self.index_transaction() as connection:
            ids = _insert(connection, table, rows)
            self._store_asset_event_tags(connection, events, ids)
            for event, number in last:
                self._store_asset_event(connection, event, ids[number])

    def _row(self, event: EventLogEntry) -> dict[str, Any]:
        """Return the row of an asset's event: as `_event_to_row`, with the text of EventJson."""
        of_asset = event.get_dagster_event()
        return {
            "run_id": event.run_id,
            "event": self._json.text(event) if self._json else serialize_value(event),
            "dagster_event_type": of_asset.event_type_value,
            "timestamp": self._event_insert_timestamp(event),
            "step_key": of_asset.step_key,
            "asset_key": _key(event),
            "partition": of_asset.partition or None,
        }

    def _store_asset_event_tags(
        self, conn: Connection, events: Sequence[EventLogEntry], event_ids: Sequence[int]
    ) -> None:
        """Store the tags of assets' events that Dagster searches for."""
        if AssetEventTagsTable is None:
            super()._store_asset_event_tags(conn, events, event_ids)
            return
        rows = [
            {
                "event_id": number,
                "asset_key": _key(event),
                "key": key,
                "value": value,
                "event_timestamp": self._event_insert_timestamp(event),
            }
            for event, number in zip(events, event_ids, strict=True)
            for key, value in self._tags_for_asset_event(event).items()
        ]
        if rows:
            self._has_tags = self._has_tags or self.has_table(AssetEventTagsTable.name)
            if self._has_tags:
                _insert(conn, AssetEventTagsTable, rows)

    def get_dynamic_partitions(self, partitions_def_name: str) -> Sequence[str]:
        """Return all keys, in order of registration. Cached, because a range run reads them 15 times (0.2 s each at 60,000)."""
        if DynamicPartitionsTable is None:
            return super().get_dynamic_partitions(partitions_def_name)
        stamp = self._partitions_stamp(partitions_def_name)
        known = self._partition_keys.get(partitions_def_name)
        if known is None or known[0] != stamp:
            known = stamp, tuple(super().get_dynamic_partitions(partitions_def_name))
            self._partition_keys[partitions_def_name] = known
        return list(known[1])

    def get_existing_dynamic_partitions(
        self, partitions_def_name: str, partition_keys: Sequence[str]
    ) -> AbstractSet[str]:
        """Return those of the keys that are registered: from the cache, instead of a query for each 1,000 keys."""
        return set(partition_keys).intersection(self.get_dynamic_partitions(partitions_def_name))

    def get_materialized_partitions(
        self, asset_key: AssetKey, before_cursor: int | None = None, after_cursor: int | None = None
    ) -> set[str]:
        """Return the partitions with a materialisation: the names alone, where Dagster also selects the newest event of each."""
        if not _CAN_BATCH or any(each and each.last_wipe_timestamp for each in self._get_assets_details([asset_key])):
            return super().get_materialized_partitions(asset_key, before_cursor, after_cursor)
        bounds = [("id > ?", after_cursor), ("id < ?", before_cursor)]
        given = [(text, number) for text, number in bounds if number]
        where = " AND ".join(
            ["asset_key = ?", "dagster_event_type = ?", "partition IS NOT NULL", *(t for t, _ in given)]
        )
        values = (asset_key.to_string(), DagsterEventType.ASSET_MATERIALIZATION.value, *(number for _, number in given))
        with self.index_connection() as connection:
            rows = connection.exec_driver_sql(f"SELECT DISTINCT partition FROM event_logs WHERE {where}", values)
            return set(rows.scalars())

    def _partitions_stamp(self, partitions_def_name: str) -> object:
        """Return newest id, its key, and the count, which change whenever any process adds or deletes keys.

        SQLite reuses the newest id after its row is deleted, hence the key. It takes a bare column from the row of the maximum.
        """
        assert DynamicPartitionsTable is not None
        columns = DynamicPartitionsTable.c
        query = select(func.max(columns.id), columns.partition, func.count())
        with self.index_connection() as connection:
            return tuple(connection.execute(query.where(columns.partitions_def_name == partitions_def_name)).one())


def _insert(connection: Connection, table: Table, rows: Sequence[Mapping[str, Any]]) -> range:
    """Insert rows by the driver, which takes a fifth of SQLAlchemy's time; return their ids.

    The first row takes SQLite's write lock, so no other writer's ids lie among them.
    """
    columns = list(rows[0])
    statement = f"INSERT INTO {table.name} ({', '.join(columns)}) VALUES ({', '.join('?' * len(columns))})"
    values = [tuple(map(_stored, row.values())) for row in rows]
    first = connection.exec_driver_sql(statement, values[0]).lastrowid
    if len(values) > 1:
        connection.exec_driver_sql(statement, values[1:])
    return range(first, first + len(values))


def _stored(value: object) -> object:
    """Return a value as SQLAlchemy stores it in SQLite."""
    return value.isoformat(" ", "microseconds") if isinstance(value, datetime) else value


def _key(event: EventLogEntry) -> str | None:
    key = event.get_dagster_event().asset_key
    return key.to_string() if key else None


def _concerns_one_asset(event: EventLogEntry) -> bool:
    return event.is_dagster_event and event.dagster_event_type in ONE_ASSET_TYPES


def _is_of_partition(event: EventLogEntry) -> bool:
    """Return True for the materialisation of one partition.

    Pages of partitions and assets read the index. The page of a run lists the run's own file, where a line per image would
    double the history and slow the page.
    """
    of_asset = event.get_dagster_event()
    return of_asset.event_type is DagsterEventType.ASSET_MATERIALIZATION and of_asset.partition is not None


def _by_run(rows: Iterable[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    runs: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        runs.setdefault(row["run_id"], []).append(row)
    return runs


def _last_of_each_asset(events: Sequence[EventLogEntry], ids: Sequence[int]) -> Iterable[tuple[EventLogEntry, int]]:
    """Return the events that determine an asset's row, with their ids.

    They are the last of each type, because each type sets other columns.
    """
    last: dict[object, tuple[EventLogEntry, int]] = {}
    for event, row_id in zip(events, ids, strict=True):
        key = event.get_dagster_event().asset_key, event.dagster_event_type
        last.pop(key, None)
        last[key] = event, row_id
    return last.values()


class BatchSqliteStorage(DagsterSqliteStorage):
    """The storage that `dagster.yaml` names: stock SQLite storage for runs and schedules, batched storage for the event log."""

    def __init__(self, base_dir: str, inst_data: ConfigurableClassData | None = None) -> None:
        # Dagster creates the tables of a new history without checking whether another command does the same.
        Path(base_dir).mkdir(parents=True, exist_ok=True)
        with FileLock(Path(base_dir, LOCK_NAME)):
            self._open(base_dir, inst_data)

    def _open(self, base_dir: str, inst_data: ConfigurableClassData | None) -> None:
        super().__init__(base_dir, inst_data)
        for storage in (self._run_storage, self._schedule_storage):
            storage._conn_string += f"?timeout={LOCK_SECONDS}"  # for each engine that the storage creates
        if _event_logs_directory is not None:
            self._event_log_storage = BatchSqliteEventLogStorage(_event_logs_directory(base_dir))

    @classmethod
    def from_config_value(cls, inst_data: ConfigurableClassData, config_value: Mapping[str, Any]) -> Self:
        """Return the storage with the configuration of dagster.yaml."""
        return cls.from_local(inst_data=inst_data, **config_value)
