"""Errors of the Dagster history as messages: a damaged database, an unusable dagster.yaml, an unreadable disk, a lost server.

The history is located and opened in instance.py; errors inside a run are handled in runs.py.
"""

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from imagemill.errors import ImagemillError, causes, is_disk_full
from imagemill.store.trust import DAGSTER_CONFIG

_DO_DATABASE = (
    "move {folder} elsewhere and run the command again: images, files and shards do not depend on it, "
    "and their events are reported again"
)
_DO_DISK = (
    "check that the disk has free space and no errors, then run the same command again: finished work is kept. If the error "
    "returns, " + _DO_DATABASE
)
_DO_SERVER = (
    "check that the PostgreSQL server runs, accepts connections and has free disk space, then run the same command again: "
    "finished work is kept, and its events are reported again"
)
# Errors of a file's contents. All others may be temporary errors of the disk.
_DAMAGE = ("malformed", "not a database", "no such table", "no such column")
_DO_CONFIG = "correct the file, or delete it: the next command writes imagemill's own"


class HistoryUnusable(ImagemillError, RuntimeError):
    """The Dagster history of a data root cannot be opened, read or written."""


@contextmanager
def history_errors(home: Path) -> Iterator[None]:
    """Raise errors of Dagster's databases in the block as HistoryUnusable; all others propagate."""
    try:
        yield
    except ImagemillError:
        raise
    except Exception as error:
        cause = _database_error(error)
        if cause and not isinstance(cause, sqlite3.Error):
            raise server_unusable(home, str(cause)) from error
        if is_disk_full(error) or not cause:
            raise
        raise database_unusable(home, str(cause)) from error


def database_unusable(home: Path, why: str) -> HistoryUnusable:
    """Return the error for databases below this home. It names the first damaged one that can be found quickly."""
    if not any(words in why for words in _DAMAGE):
        history = home / "history"
        return HistoryUnusable(
            "the Dagster history cannot be read or written", where=history, why=why, do=_DO_DISK.format(folder=history)
        )
    damaged = next((file for file in sorted(home.rglob("*.db")) if not _opens(file)), None)
    folder = home / damaged.relative_to(home).parts[0] if damaged else home / "history"
    return HistoryUnusable(
        "the Dagster history cannot be used",
        where=damaged or f"{home / 'history'}, {home / 'schedules'}",
        why=why,
        do=_DO_DATABASE.format(folder=folder),
    )


def server_unusable(home: Path, why: str) -> HistoryUnusable:
    """Return the error for a history in PostgreSQL. `why` is the driver's message."""
    return HistoryUnusable(
        "the Dagster history in PostgreSQL cannot be read or written",
        where=f"the database that {home / DAGSTER_CONFIG} names",
        why=" ".join(why.split()),
        do=_DO_SERVER,
    )


def _opens(file: Path) -> bool:
    """Return whether SQLite can read the schema table of a database."""
    try:
        with closing(sqlite3.connect(f"{file.as_uri()}?mode=ro", uri=True)) as database:
            database.execute("SELECT name FROM sqlite_master").fetchall()
    except sqlite3.Error:
        return False
    return True


def config_unusable(file: Path, why: str) -> HistoryUnusable:
    """Return the error for an instance configuration."""
    return HistoryUnusable("dagster.yaml cannot be used", where=file, why=why, do=_DO_CONFIG)


def _database_error(error: BaseException | None) -> BaseException | None:
    """Return the driver's error that an exception of SQLAlchemy wraps, or None.

    The ledger is read without SQLAlchemy, so its errors are not mistaken for the history's.
    """
    from sqlalchemy.exc import DBAPIError

    wrapped = (cause.orig for cause in causes(error) if isinstance(cause, DBAPIError))
    return next((orig for orig in wrapped if orig is not None), None)
