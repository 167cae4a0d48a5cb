"""Location and state of the Dagster history of a data root, read without importing Dagster.

Reference: docs/decisions/0121-history-that-was-reported-to.md.
"""

import contextlib
import json
import os
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

from imagemill.config import name_in_history
from imagemill.domain.layout import DataRoot, home_of
from imagemill.errors import ImagemillError
from imagemill.fs.fingerprints import fingerprint
from imagemill.store.trust import DAGSTER_CONFIG, read_mapping

# Below the history's folder: the runs, and the index of the event log.
_RUNS = Path("history", "runs.db")
_INDEX = Path("history", "runs", "index.db")

_ID = "SELECT run_storage_id FROM instance_info"
_STATE = (
    "SELECT asset_key, wipe_timestamp FROM asset_keys ORDER BY asset_key",
    "SELECT partitions_def_name, count(*), max(id) FROM dynamic_partitions GROUP BY 1 ORDER BY 1",
)
# Differs after the tables were created again, as by a restored dump.
_TABLE = "SELECT 'event_logs'::regclass::oid"

# Module and class of `storage.custom` in dagster.yaml, if the history is kept in PostgreSQL.
_POSTGRES = {
    ("dagster_project.storage", "BatchPostgresStorage"),
    ("dagster_postgres", "DagsterPostgresStorage"),
}

Query = Callable[[str], Sequence[tuple[Any, ...]]]


class HistoryState(NamedTuple):
    """The identity of a history, and a text that differs after assets of a root are wiped or partitions deleted in the UI.

    `id` is that of Dagster's run storage, None if Dagster has not made it yet. A copy of a history has the same one; `state`
    also differs for a copy.
    """

    id: str | None
    state: str


def history_state(root: DataRoot) -> HistoryState | None:
    """Return the state of the history; None if it does not exist yet or cannot be read."""
    home = home_of(root)
    with contextlib.suppress(ImagemillError, LookupError, ImportError):
        name = name_in_history(root)
        database = _postgres(read_mapping(home / DAGSTER_CONFIG).get("storage"))
        return _in_postgres(database, name) if database else _in_sqlite(home, name)
    return None


def _in_sqlite(home: Path, name: str | None) -> HistoryState | None:
    index = home / _INDEX
    try:
        inode = index.stat().st_ino
        with _sqlite(home / _RUNS) as query:
            storage_id = _first(query(_ID))
        with _sqlite(index) as query:
            return HistoryState(storage_id, _text(str(index), inode, query, name))
    except (OSError, sqlite3.Error):
        return None


@contextlib.contextmanager
def _sqlite(file: Path) -> Iterator[Query]:
    with closing(sqlite3.connect(f"{file.as_uri()}?mode=ro", uri=True)) as connection:
        yield lambda sql: connection.execute(sql).fetchall()


def _in_postgres(database: Mapping[str, Any], name: str | None) -> HistoryState | None:
    import psycopg2

    try:
        with closing(psycopg2.connect(**database)) as connection, connection.cursor() as cursor:

            def query(sql: str) -> Sequence[tuple[Any, ...]]:
                cursor.execute(sql)
                return cursor.fetchall()

            return HistoryState(_first(query(_ID)), _text(cursor.connection.dsn, _first(query(_TABLE)), query, name))
    except psycopg2.Error:
        return None


def _first(rows: Sequence[tuple[Any, ...]]) -> Any:
    return rows[0][0] if rows else None


def _text(place: str, number: int, query: Query, name: str | None) -> str:
    known = [[row for row in query(sql) if _belongs(row[0], name)] for sql in _STATE]
    return fingerprint(repr((place, number, known)).encode())


def _belongs(key: str, name: str | None) -> bool:
    """Return whether an asset key, or the name of a partition set, is of the root with this name in a shared history."""
    parts = json.loads(key) if key.startswith("[") else key.split("/")
    return len(parts) == 1 if name is None else parts[0] == name


def _postgres(storage: object) -> dict[str, Any] | None:
    """Return the arguments with which psycopg2 connects to the database of a `storage` setting; None for SQLite's.

    Raises:
        LookupError: if the setting is incomplete, or a password is made by an identity provider.
    """
    match storage:
        case {"postgres": dict(config)}:
            pass
        case {"custom": {"module": module, "class": name, "config": dict(config)}} if (module, name) in _POSTGRES:
            pass
        case _:
            return None
    match config:
        case {"auth_provider": _}:
            raise LookupError("auth_provider")
        case {"postgres_url": url}:
            scheme, _, rest = str(_value(url)).partition("://")
            return {"dsn": f"{scheme.partition('+')[0]}://{rest}"}
        case {"postgres_db": dict(fields)}:
            values = {name: _value(value) for name, value in fields.items()}
            names = {
                "user": "username",
                "password": "password",
                "host": "hostname",
                "port": "port",
                "dbname": "db_name",
            }
            return {**{ours: values.get(theirs) for ours, theirs in names.items()}, **(values.get("params") or {})}
        case _:
            raise LookupError("postgres_url")


def _value(setting: Any) -> Any:
    """Return a setting, or the variable of the environment that it names."""
    match setting:
        case {"env": str(variable)}:
            return os.environ[variable]
        case _:
            return setting
