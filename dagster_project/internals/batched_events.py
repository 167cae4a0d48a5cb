"""An event log that stores the asset events of a batch together and caches partition keys, for any SQL database.

Stock storage writes one event after another. SQLite's part is in storage.py, PostgreSQL's in postgres_storage.py; events are
built in resources/dagster_internals/events.py.

Private names of Dagster 1.13 are used. If one is missing, a message goes to stderr and the stock behaviour remains.
"""

import functools
import itertools
import os
import sys
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager, contextmanager, nullcontext
from operator import attrgetter
from typing import Any, NamedTuple, SupportsIndex

from dagster import AssetKey, DagsterEventType, DagsterInstance, EventLogEntry
from dagster._core.storage.event_log.sql_event_log import SqlEventLogStorage
from dagster_shared.serdes import serialize_value
from sqlalchemy import Table, select
from sqlalchemy.engine import Connection
from sqlalchemy.sql.elements import ColumnElement

from resources.dagster_internals.missing import report_missing

try:
    from dagster._core.storage.event_log.schema import (
        AssetEventTagsTable,
        DynamicPartitionsTable,
        SqlEventLogStorageTable,
    )

    from dagster_project.internals.event_json import EventJson
except ImportError as missing:
    AssetEventTagsTable = DynamicPartitionsTable = SqlEventLogStorageTable = EventJson = None
    report_missing(missing, "the history is written by Dagster's own storage: about 11 ms per image instead of 0.6")

# Events that concern only one asset: no check, no run status. With the function that returns what has asset key and partition,
# because the properties of an event look up its type each time, which takes longer than everything else about it.
_SUBJECTS: Mapping[str, Callable[[Any], Any]] = {
    DagsterEventType.ASSET_MATERIALIZATION.value: attrgetter("materialization"),
    DagsterEventType.ASSET_OBSERVATION.value: attrgetter("asset_observation"),
    DagsterEventType.ASSET_MATERIALIZATION_PLANNED.value: lambda planned: planned,
}
_METHODS = (
    "_event_insert_timestamp", "_tags_for_asset_event", "_store_asset_event_tags", "_store_asset_event", "_get_assets_details",
    "run_connection", "index_transaction",
)  # fmt: skip
_MISSING = [name for name in _METHODS if not hasattr(SqlEventLogStorage, name)]
CAN_BATCH = SqlEventLogStorageTable is not None and not _MISSING
if _MISSING:
    report_missing(", ".join(_MISSING), "events are stored one at a time: about 11 ms per image instead of 0.6")

BATCH_VARIABLE = "DAGSTER_EVENT_BATCH_SIZE"
BATCH_SIZE = "1000"


class Keys(tuple[str, ...]):
    """Different keys in order of registration. Any of them is found by bisection: Dagster looks up the ends of each range."""

    @functools.cached_property
    def _in_order(self) -> "array[int]":
        return array("I", sorted(range(len(self)), key=self.__getitem__))

    def position(self, key: str) -> int | None:
        """Return the position of a key, None if it is not among these."""
        at = bisect_left(self._in_order, key, key=self.__getitem__)
        found = self._in_order[at] if at < len(self) else None
        return found if found is not None and self[found] == key else None


class KeyList(list[str]):
    """A list of these keys, whose `index` is as fast as `Keys.position`."""

    def __init__(self, keys: Keys) -> None:
        super().__init__(keys)
        self._keys = keys

    def index(self, key: str, *bounds: SupportsIndex) -> int:
        """Return the position of a key, between `bounds` if given; raise ValueError as a list does."""
        at = None if bounds else self._keys.position(key)
        # The list may have been changed since.
        return at if at is not None and self[at : at + 1] == [key] else super().index(key, *bounds)


class _PartitionKeys(NamedTuple):
    """The keys of a set of partitions, with the version of the database and the stamp that they were read at."""

    version: object
    stamp: tuple[object, ...]
    keys: Keys


class BatchedEventLog(SqlEventLogStorage):
    """Mixin in front of an event log storage: one transaction per batch of asset events, and cached partition keys."""

    def __init__(self, *args: Any, **options: Any) -> None:
        # Dagster passes batches only if this variable is set, in every process that writes events.
        os.environ.setdefault(BATCH_VARIABLE, BATCH_SIZE)
        self._partition_keys: dict[str, _PartitionKeys] = {}
        self._of_block: dict[str, Keys] | None = None
        self._json = EventJson() if EventJson else None
        self._has_tags = False
        self._indexed: dict[tuple[str, ...], frozenset[str]] = {}
        super().__init__(*args, **options)

    # ---- for each database

    def _store_together(self, events: Sequence[EventLogEntry]) -> None:
        """Store events of single assets in one transaction."""
        raise NotImplementedError

    def _insert(self, connection: Connection, table: Table, rows: Sequence[Mapping[str, Any]]) -> Sequence[int]:
        """Insert rows of equal columns; return their ids."""
        raise NotImplementedError

    def _stamp_columns(self, table: Table) -> Sequence[ColumnElement[Any]]:
        """Return columns of a query over a set's partition keys, whose row changes whenever a key is added or deleted."""
        raise NotImplementedError

    def _version(self, connection: Connection) -> object:
        """Return a value that changes whenever the database does, for less than a query; None from a database without one."""
        return None

    # ---- events

    def store_event_batch(self, events: Sequence[EventLogEntry]) -> None:
        """Store events in order: adjacent events of single assets together, all others one by one."""
        for together, group in itertools.groupby(events, concerns_one_asset):
            batch = list(group)
            if together and CAN_BATCH:
                self._store_together(batch)
            elif together:
                super().store_event_batch(batch)
            else:
                for event in batch:
                    self.store_event(event)

    def _row(self, event: EventLogEntry) -> dict[str, Any]:
        """Return the row of an asset's event: as `_event_to_row`, with the text of EventJson."""
        of_asset, subject = event.get_dagster_event(), _subject(event)
        return {
            "run_id": event.run_id,
            "event": self._json.text(event) if self._json else serialize_value(event),
            "dagster_event_type": of_asset.event_type_value,
            "timestamp": self._event_insert_timestamp(event),
            "step_key": of_asset.step_key,
            "asset_key": _text_of(subject.asset_key),
            "partition": subject.partition or None,
        }

    def _store_asset_event_tags(
        self, conn: Connection, events: Sequence[EventLogEntry], event_ids: Sequence[int]
    ) -> None:
        """Store the tags of assets' events that Dagster searches for."""
        if AssetEventTagsTable is None:
            super()._store_asset_event_tags(conn, events, event_ids)
            return
        rows: list[dict[str, Any]] = []
        for event, number in zip(events, event_ids, strict=True):
            if tags := self._tags(event):
                of_event = {"event_id": number, "asset_key": _key(event)}
                timestamp = self._event_insert_timestamp(event)
                rows += [
                    {**of_event, "key": key, "value": value, "event_timestamp": timestamp}
                    for key, value in tags.items()
                ]
        if rows:
            self._has_tags = self._has_tags or self.has_table(AssetEventTagsTable.name)
            if self._has_tags:
                self._insert(conn, AssetEventTagsTable, rows)

    def _tags(self, event: EventLogEntry) -> Mapping[str, str]:
        """Return the tags of an event that Dagster searches for."""
        if not concerns_one_asset(event):
            return self._tags_for_asset_event(event)
        tags = getattr(_subject(event), "tags", None) or {}
        names = tuple(tags)
        if names not in self._indexed:
            self._indexed[names] = frozenset(self.get_asset_tags_to_index(set(names)))
        indexed = self._indexed[names]
        return {name: value for name, value in tags.items() if name in indexed}

    # ---- partitions

    def get_dynamic_partitions(self, partitions_def_name: str) -> Sequence[str]:
        """Return all keys, in order of registration. Cached, because a range run reads them 15 times (0.2 s each at 60,000)."""
        if DynamicPartitionsTable is None:
            return super().get_dynamic_partitions(partitions_def_name)
        return KeyList(self._kept_keys(partitions_def_name))

    @contextmanager
    def keeping_partitions(self) -> Iterator[None]:
        """Read the keys of each set once in the block, and after each change by this object; a block may contain others.

        Otherwise the keys are counted each time, to see changes by other processes.
        """
        if self._of_block is not None:
            yield
            return
        self._of_block = {}
        try:
            yield
        finally:
            self._of_block = None

    def add_dynamic_partitions(self, partitions_def_name: str, partition_keys: Sequence[str]) -> None:
        """Add keys to a set."""
        super().add_dynamic_partitions(partitions_def_name, partition_keys)
        (self._of_block or {}).pop(partitions_def_name, None)

    def delete_dynamic_partition(self, partitions_def_name: str, partition_key: str) -> None:
        """Delete a key of a set."""
        super().delete_dynamic_partition(partitions_def_name, partition_key)
        (self._of_block or {}).pop(partitions_def_name, None)

    def _kept_keys(self, name: str) -> Keys:
        if self._of_block is None:
            return self._current_keys(name)
        if name not in self._of_block:
            self._of_block[name] = self._current_keys(name)
        return self._of_block[name]

    def _current_keys(self, name: str) -> Keys:
        assert DynamicPartitionsTable is not None
        known = self._partition_keys.get(name)
        with self.index_connection() as connection:
            version = self._version(connection)
            if known and version is not None and known.version == version:
                return known.keys
            query = select(*self._stamp_columns(DynamicPartitionsTable))
            stamp = tuple(connection.execute(query.where(DynamicPartitionsTable.c.partitions_def_name == name)).one())
            keys = known.keys if known and known.stamp == stamp else _keys(connection, name, known, stamp)
        self._partition_keys[name] = _PartitionKeys(version, stamp, keys)
        return keys

    def get_existing_dynamic_partitions(
        self, partitions_def_name: str, partition_keys: Sequence[str]
    ) -> AbstractSet[str]:
        """Return those of the keys that are registered: from the cache, instead of a query for each 1,000 keys."""
        if DynamicPartitionsTable is None:
            return super().get_existing_dynamic_partitions(partitions_def_name, partition_keys)
        return set(partition_keys).intersection(self._kept_keys(partitions_def_name))

    def has_dynamic_partition(self, partitions_def_name: str, partition_key: str) -> bool:
        """Return whether a key is registered: in a block without a query, because a range run asks 18 times."""
        if self._of_block is None or DynamicPartitionsTable is None:
            return super().has_dynamic_partition(partitions_def_name, partition_key)
        return self._kept_keys(partitions_def_name).position(partition_key) is not None

    def get_materialized_partitions(
        self, asset_key: AssetKey, before_cursor: int | None = None, after_cursor: int | None = None
    ) -> set[str]:
        """Return the partitions with a materialisation: the names alone, where Dagster also selects the newest event of each."""
        if not CAN_BATCH or any(each and each.last_wipe_timestamp for each in self._get_assets_details([asset_key])):
            return super().get_materialized_partitions(asset_key, before_cursor, after_cursor)
        assert SqlEventLogStorageTable is not None
        columns = SqlEventLogStorageTable.c
        query = (
            select(columns.partition)
            .distinct()
            .where(
                columns.asset_key == asset_key.to_string(),
                columns.dagster_event_type == DagsterEventType.ASSET_MATERIALIZATION.value,
                columns.partition.is_not(None),
                *([columns.id > after_cursor] if after_cursor else []),
                *([columns.id < before_cursor] if before_cursor else []),
            )
        )
        with self.index_connection() as connection:
            return set(connection.execute(query).scalars())


def keeping_partitions(instance: DagsterInstance) -> AbstractContextManager[None]:
    """Return a block in which an instance reads the keys of each set of partitions once, unless its storage is another one."""
    log = instance.event_log_storage
    return log.keeping_partitions() if isinstance(log, BatchedEventLog) else nullcontext()


def _keys(connection: Connection, name: str, known: _PartitionKeys | None, stamp: tuple[object, ...]) -> Keys:
    """Return all keys of a set of partitions, in order of registration; of those known, only the last one is read again.

    `stamp`: begins with the newest id, and ends with the number of keys.
    """
    assert DynamicPartitionsTable is not None
    columns = DynamicPartitionsTable.c
    query = select(columns.partition).where(columns.partitions_def_name == name).order_by(columns.id)
    if known and known.keys:
        last, *new = [*connection.execute(query.where(columns.id >= known.stamp[0])).scalars()] or [None]
        # Fewer if a key was deleted.
        if last == known.keys[-1] and len(known.keys) + len(new) == stamp[-1]:
            return Keys((*known.keys, *map(sys.intern, new)))
    # Interned, because other tables have the ids of images too.
    return Keys(map(sys.intern, connection.execute(query).scalars()))


def _key(event: EventLogEntry) -> str | None:
    key = _subject(event).asset_key if concerns_one_asset(event) else event.get_dagster_event().asset_key
    return _text_of(key) if key else None


# Thousands of events have one of a few keys.
_text_of = functools.lru_cache(maxsize=64)(AssetKey.to_string)


def concerns_one_asset(event: EventLogEntry) -> bool:
    """Return whether an event concerns only one asset."""
    return event.dagster_event is not None and event.dagster_event.event_type_value in _SUBJECTS


def is_of_partition(event: EventLogEntry) -> bool:
    """Return True for the materialisation of one partition.

    Pages of partitions and assets read the index. The page of a run lists the run's own file, where a line per image would
    double the history and slow the page.
    """
    is_made = event.get_dagster_event().event_type_value == DagsterEventType.ASSET_MATERIALIZATION.value
    return is_made and _subject(event).partition is not None


def _subject(event: EventLogEntry) -> Any:
    """Return the part of an event of one asset that has its asset key, its partition, and tags if there are any."""
    of_asset = event.get_dagster_event()
    return _SUBJECTS[of_asset.event_type_value](of_asset.event_specific_data)


def last_of_each_asset(events: Sequence[EventLogEntry], ids: Sequence[int]) -> Iterable[tuple[EventLogEntry, int]]:
    """Return the events that determine an asset's row, with their ids.

    They are the last of each type, because each type sets other columns.
    """
    last: dict[object, tuple[EventLogEntry, int]] = {}
    for event, row_id in zip(events, ids, strict=True):
        key = _subject(event).asset_key, event.get_dagster_event().event_type_value
        last.pop(key, None)
        last[key] = event, row_id
    return last.values()
