"""The Dagster history in PostgreSQL: stock storage with one transaction per batch of asset events. Needs `imagemill[postgres]`.

Stock storage commits an event before the row of its asset, so a lost connection between the two leaves a gap, and it writes
planned events one by one: 7 ms each.

`dagster.yaml` names `BatchPostgresStorage`. What it shares with SQLite's storage is in batched_events.py.
tests/dagster_project/internals/test_postgres_storage.py compares every table with stock storage's after the same runs.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

from dagster import EventLogEntry
from dagster._serdes import ConfigurableClassData
from dagster_postgres import DagsterPostgresStorage, PostgresEventLogStorage
from dagster_postgres.utils import (
    create_pg_connection,
    create_pg_engine,
    get_token_provider_from_config,
    pg_url_from_config,
)
from sqlalchemy import Table, func, insert
from sqlalchemy.engine import Connection
from sqlalchemy.pool import NullPool
from sqlalchemy.sql.elements import ColumnElement

from dagster_project.internals import batched_events
from dagster_project.internals.batched_events import BatchedEventLog, concerns_one_asset, last_of_each_asset

# SQLAlchemy 2.1 would look for another driver than the one that dagster-postgres installs.
DRIVER = "postgresql+psycopg2"

LOCK_NUMBER = 0x696D6167656D696C  # "imagemil": of the advisory lock that is held while a process opens the history


class BatchPostgresEventLogStorage(BatchedEventLog, PostgresEventLogStorage):
    """PostgreSQL event log storage with one transaction per batch of asset events, and cached partition keys."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self._found: set[tuple[str, str]] = set()  # tables and columns of the schema, which are never removed
        super().__init__(*args, **options)

    def has_table(self, table_name: str) -> bool:
        """Return whether a table exists. A table that was found is not looked up again."""
        return self._is_found("table", table_name, super().has_table)

    def has_asset_key_col(self, column_name: str) -> bool:
        """Return whether `asset_keys` has a column. Dagster asks five times per asset for each page; one look-up takes 10 ms."""
        return self._is_found("column", column_name, super().has_asset_key_col)

    def _is_found(self, kind: str, name: str, look_up: Callable[[str], bool]) -> bool:
        if (kind, name) not in self._found and look_up(name):
            self._found.add((kind, name))
        return (kind, name) in self._found

    def store_event(self, event: EventLogEntry) -> None:
        """Store one event; that of a single asset in one transaction with the asset's row."""
        if batched_events.CAN_BATCH and concerns_one_asset(event):
            self._store_together([event])
        else:
            super().store_event(event)

    def _store_together(self, events: Sequence[EventLogEntry]) -> None:
        assert batched_events.SqlEventLogStorageTable is not None
        rows = [self._row(event) for event in events]
        with self.index_transaction() as connection:
            ids = self._insert(connection, batched_events.SqlEventLogStorageTable, rows)
            self._store_asset_event_tags(connection, events, ids)
            # Always in the same order, because two transactions that lock the same rows in different orders block each other.
            for event, number in sorted(last_of_each_asset(events, ids), key=_asset):
                self._store_asset_event(connection, event, number)

    def _insert(self, connection: Connection, table: Table, rows: Sequence[Mapping[str, Any]]) -> Sequence[int]:
        statement = insert(table).returning(table.c.id, sort_by_parameter_order=True)
        return connection.execute(statement, list(rows)).scalars().all()

    def _stamp_columns(self, table: Table) -> Sequence[ColumnElement[Any]]:
        """Return newest id, sum of the ids, and the count. PostgreSQL never uses an id twice."""
        return [func.max(table.c.id), func.sum(table.c.id), func.count()]


def _asset(stored: tuple[EventLogEntry, int]) -> str:
    return str(stored[0].get_dagster_event().asset_key)


def with_driver(url: str) -> str:
    """Return the URL of a database with the driver that dagster-postgres installs, unless it names one."""
    scheme, separator, rest = url.partition("://")
    return f"{DRIVER}{separator}{rest}" if scheme in {"postgres", "postgresql"} else url


class BatchPostgresStorage(DagsterPostgresStorage):
    """The storage that `dagster.yaml` names: stock PostgreSQL storage with a batched event log."""

    def __init__(
        self,
        postgres_url: str,
        should_autocreate_tables: bool = True,
        inst_data: ConfigurableClassData | None = None,
        **options: Any,
    ) -> None:
        engine = create_pg_engine(postgres_url, options.get("token_provider"), poolclass=NullPool)
        # Dagster creates the tables of an empty database without checking whether another command does the same.
        with create_pg_connection(engine) as connection, connection.begin():
            connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({LOCK_NUMBER})")
            super().__init__(postgres_url, should_autocreate_tables, inst_data, **options)
            self._event_log_storage = BatchPostgresEventLogStorage(postgres_url, should_autocreate_tables, **options)

    @classmethod
    def from_config_value(cls, inst_data: ConfigurableClassData | None, config_value: Mapping[str, Any]) -> Self:
        """Return the storage with the configuration of dagster.yaml, which is that of Dagster's own storage."""
        return cls(
            with_driver(pg_url_from_config(config_value)),
            config_value.get("should_autocreate_tables", True),
            inst_data,
            token_provider=get_token_provider_from_config(config_value),
        )
