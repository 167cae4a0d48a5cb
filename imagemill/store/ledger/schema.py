"""The ledger's numbered schema: one step per version, each tested on a data root of the previous version.

A data root is upgraded when it is first opened for writing. Steps are never edited once released; a change is a new
step.
"""

import json
import os
import sqlite3
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path

from imagemill.fs.atomic import write_bytes_atomic
from imagemill.fs.fingerprints import file_signature

# State of a data root at the end of the last command, beside the ledger (pipeline/snapshot.py).
SNAPSHOT = "snapshot.json"

_FOLDER = Path(__file__).with_name("migrations")


def _import_identities(db: sqlite3.Connection, ledger: Path) -> None:
    """Import model identities, which earlier releases kept in one JSON file per kind. The files stay but are no longer read."""
    folder = ledger.parent / "provenance"
    for path in sorted(folder.glob("*.json")) if folder.is_dir() else ():
        kind = path.name.removesuffix(".json")
        try:
            identity = json.loads(path.read_bytes())
        except (ValueError, RecursionError):
            continue  # a damaged identity is unknown; the model keys of the recorded files then decide
        if "." not in kind and isinstance(identity, dict) and isinstance(identity.get("facts"), dict):
            row = (f"identity.{kind}", json.dumps(identity, sort_keys=True, ensure_ascii=False))
            db.execute("INSERT OR REPLACE INTO settings VALUES (?, ?)", row)


# Functions that complete a step after its SQL.
_AFTERWARDS: dict[int, Callable[[sqlite3.Connection, Path], None]] = {3: _import_identities}
_STEPS = {int(file.name[:3]): file for file in sorted(_FOLDER.glob("*.sql"))}
VERSION = max(_STEPS)


def _take_step(db: sqlite3.Connection, number: int, path: Path | None) -> None:
    for statement in _STEPS[number].read_text("utf-8").split(";\n"):
        db.execute(statement)
    if number in _AFTERWARDS and path is not None:
        _AFTERWARDS[number](db, path)


def migrate(db: sqlite3.Connection, path: Path | None) -> None:
    """Create the tables, or upgrade those of an earlier version: in one transaction, under a file lock.

    A snapshot that held for the ledger before the upgrade holds afterwards, because an upgrade is no change of the data root.

    Args:
        db: the connection.
        path: of the ledger; None for one in memory.
    """
    from filelock import FileLock

    # If two processes enable the write-ahead log at once, SQLite fails instead of waiting.
    with nullcontext() if path is None else FileLock(path.with_name(f".{path.name}.lock")):
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("BEGIN IMMEDIATE")
        try:
            before = state_of_files(path) if path else ""
            version = db.execute("PRAGMA user_version").fetchone()[0]
            for number in _STEPS:
                # The tables of version 2 are also created for ledgers that already claim version 2: early ones lack
                # some.
                if number > version or (number == 2 and version == 2):
                    _take_step(db, number, path)
            db.execute(f"PRAGMA user_version = {VERSION}")
            db.execute("COMMIT")
        except BaseException:
            if db.in_transaction:
                db.execute("ROLLBACK")
            raise
        if before and path:
            db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
            keep_snapshot(path.with_name(SNAPSHOT), before, state_of_files(path))


def keep_snapshot(file: Path, before: str, after: str) -> None:
    """Replace the state of the ledger in a snapshot, if it is the earlier one. Without a snapshot, the next run does more."""
    with suppress(OSError, ValueError, RecursionError):
        snapshot = json.loads(file.read_bytes())
        if isinstance(snapshot, dict) and snapshot.get("ledger") == before:
            write_bytes_atomic(file, json.dumps({**snapshot, "ledger": after}).encode())


def wal_files(path: Path) -> list[Path]:
    """Return the files that belong to a ledger: the database, its write-ahead log and shared index."""
    return [file for suffix in ("", "-wal", "-shm") if os.path.lexists(file := Path(f"{path}{suffix}"))]


def state_of_files(path: Path) -> str:
    """Return a text that changes whenever a ledger's content does, without opening the ledger; "" if it does not exist."""
    log = path.with_name(f"{path.name}-wal")
    states = [file_signature(file) for file in (path, log) if file.exists() and file.stat().st_size]
    return " ".join(states)
