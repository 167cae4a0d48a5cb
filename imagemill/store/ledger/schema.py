"""The ledger's numbered schema: one step per version, each tested on a data root of the version before it.

A data root is upgraded when it is first opened for writing. Steps are never edited once released; a change is a new step.
"""

import json
import os
import sqlite3
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

_SIGNATURE = "CASE WHEN size IS NULL THEN NULL ELSE 'posix:' || size || ':' || mtime_ns || ':' || inode END"


def _tables_of_version_2(db: sqlite3.Connection, _: Path | None) -> None:
    """Tables of the first releases. Some ledgers of version 1 and 2 lack tables that came without a version of their own."""
    for statement in (
        "sources (image_id TEXT PRIMARY KEY, file_name TEXT NOT NULL, size INT, mtime_ns INT, inode INT,"
        " fingerprint TEXT NOT NULL, height INT NOT NULL, width INT NOT NULL)",
        "captions (image_id TEXT PRIMARY KEY, size INT, mtime_ns INT, inode INT, text TEXT NOT NULL,"
        " origin TEXT NOT NULL, fingerprint TEXT NOT NULL, mask TEXT, truncated INT)",
        "captioned (image_id TEXT PRIMARY KEY, image TEXT NOT NULL, maker TEXT NOT NULL)",
        "files (kind TEXT, image_id TEXT, size INT, mtime_ns INT, inode INT, source TEXT, content TEXT NOT NULL,"
        " maker TEXT NOT NULL, PRIMARY KEY (kind, image_id, size, mtime_ns, inode))",
        "problems (item TEXT, asset TEXT, outcome TEXT NOT NULL, reason TEXT NOT NULL, detail TEXT NOT NULL,"
        " remedy TEXT NOT NULL, size INT, mtime_ns INT, inode INT, run_id TEXT, at TEXT NOT NULL,"
        " PRIMARY KEY (item, asset))",
        "counts (run_id TEXT, asset TEXT, counts TEXT NOT NULL, PRIMARY KEY (run_id, asset))",
        "changes (item TEXT, asset TEXT, what TEXT, PRIMARY KEY (item, asset, what))",
        "regenerating (kind TEXT PRIMARY KEY, state TEXT NOT NULL)",
        "withdrawn (image_id TEXT PRIMARY KEY, at TEXT NOT NULL)",
        "claims (asset TEXT, item TEXT, owner TEXT NOT NULL, run_id TEXT NOT NULL, PRIMARY KEY (asset, item))",
        "verified (path TEXT PRIMARY KEY, signature TEXT NOT NULL)",
        "places (name TEXT PRIMARY KEY, path TEXT NOT NULL)",
    ):
        db.execute(f"CREATE TABLE IF NOT EXISTS {statement} WITHOUT ROWID")


def _signatures_settings_leases(db: sqlite3.Connection, path: Path | None) -> None:
    """Version 3: signatures as one text, settings in one table, leases that name a lock file."""
    for name, columns, kept in (
        (
            "sources",
            "image_id TEXT PRIMARY KEY, file_name TEXT NOT NULL, signature TEXT NOT NULL, fingerprint TEXT NOT NULL,"
            " height INT NOT NULL, width INT NOT NULL",
            f"image_id, file_name, {_SIGNATURE}, fingerprint, height, width",
        ),
        (
            "captions",
            "image_id TEXT PRIMARY KEY, signature TEXT, text TEXT NOT NULL, origin TEXT NOT NULL,"
            " fingerprint TEXT NOT NULL, mask TEXT, truncated INT NOT NULL",
            f"image_id, {_SIGNATURE}, text, origin, fingerprint, mask, ifnull(truncated, 0)",
        ),
        (
            "files",
            "kind TEXT, image_id TEXT, signature TEXT, source TEXT, content TEXT NOT NULL, maker TEXT NOT NULL,"
            " PRIMARY KEY (kind, image_id, signature)",
            f"kind, image_id, {_SIGNATURE}, source, content, maker",
        ),
        (
            "problems",
            "item TEXT, asset TEXT, outcome TEXT NOT NULL, reason TEXT NOT NULL, detail TEXT NOT NULL,"
            " remedy TEXT NOT NULL, signature TEXT, run_id TEXT NOT NULL, at TEXT NOT NULL, PRIMARY KEY (item, asset)",
            f"item, asset, outcome, reason, detail, remedy, {_SIGNATURE}, ifnull(run_id, ''), at",
        ),
    ):
        db.execute(f"ALTER TABLE {name} RENAME TO {name}_2")
        db.execute(f"CREATE TABLE {name} ({columns}) WITHOUT ROWID")
        db.execute(f"INSERT INTO {name} SELECT {kept} FROM {name}_2")
        db.execute(f"DROP TABLE {name}_2")
    db.execute("CREATE TABLE recorded_captions (image_id TEXT PRIMARY KEY, fingerprint TEXT NOT NULL) WITHOUT ROWID")
    db.execute("INSERT INTO recorded_captions SELECT image_id, fingerprint FROM captions")
    db.execute(
        "CREATE TABLE superseded (kind TEXT, image_id TEXT, signature TEXT, source TEXT, maker TEXT NOT NULL,"
        " PRIMARY KEY (kind, image_id, signature)) WITHOUT ROWID"
    )
    db.execute("CREATE TABLE settings (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID")
    db.execute("INSERT INTO settings SELECT 'place.' || name, path FROM places")
    db.execute("DROP TABLE places")
    db.execute("INSERT INTO settings SELECT 'regenerating.' || kind, state FROM regenerating")
    db.execute("DROP TABLE regenerating")
    db.execute(
        "INSERT INTO settings SELECT 'begun', '1' WHERE EXISTS (SELECT 1 FROM sources) OR EXISTS (SELECT 1 FROM files)"
    )
    db.execute(
        "INSERT INTO settings SELECT 'stage1', 'migrated' WHERE EXISTS (SELECT 1 FROM counts"
        " WHERE asset = 'stage2_jsonl' AND json_extract(counts, '$.migrated') > 0)"
    )
    db.execute("DROP TABLE claims")  # processes of an earlier release cannot use this schema
    db.execute(
        "CREATE TABLE leases (asset TEXT, item TEXT, owner TEXT NOT NULL, run_id TEXT NOT NULL, boot_id TEXT NOT NULL,"
        " pid_namespace TEXT NOT NULL, host TEXT NOT NULL, pid INT NOT NULL, PRIMARY KEY (asset, item)) WITHOUT ROWID"
    )
    if path is not None:
        _import_identities(db, path.parent / "provenance")


def _import_identities(db: sqlite3.Connection, folder: Path) -> None:
    """Take over model identities, which earlier releases kept as one JSON file per kind. The files stay; nothing reads them."""
    for path in sorted(folder.glob("*.json")) if folder.is_dir() else ():
        kind = path.name.removesuffix(".json")
        try:
            identity = json.loads(path.read_bytes())
        except (ValueError, RecursionError):
            continue  # a damaged identity is unknown: the makers of the recorded files then decide
        if "." not in kind and isinstance(identity, dict) and isinstance(identity.get("facts"), dict):
            row = (f"identity.{kind}", json.dumps(identity, sort_keys=True, ensure_ascii=False))
            db.execute("INSERT OR REPLACE INTO settings VALUES (?, ?)", row)


def _summaries(db: sqlite3.Connection, _: Path | None) -> None:
    """Version 4: finished summaries of Stage-A. The files that held them are imported when their mission is next run."""
    db.execute(
        "CREATE TABLE summaries (fingerprint TEXT, summary TEXT NOT NULL, mission TEXT, image TEXT, stat TEXT,"
        " content TEXT NOT NULL, at INT NOT NULL, PRIMARY KEY (mission, fingerprint, image)) WITHOUT ROWID"
    )


_STEPS: dict[int, Callable[[sqlite3.Connection, Path | None], None]] = {
    2: _tables_of_version_2,
    3: _signatures_settings_leases,
    4: _summaries,
}
VERSION = max(_STEPS)


def migrate(db: sqlite3.Connection, path: Path | None) -> None:
    """Create the tables, or bring those of an earlier version up to date: in one transaction, under a file lock.

    Args:
        path: of the ledger; None for one in memory.
    """
    from filelock import FileLock

    # If two processes turn on the write-ahead log at once, SQLite fails instead of waiting.
    with nullcontext() if path is None else FileLock(path.with_name(f".{path.name}.lock")):
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("BEGIN IMMEDIATE")
        try:
            version = db.execute("PRAGMA user_version").fetchone()[0]
            for number, step in _STEPS.items():
                # The tables of version 2 are also made for ledgers that call themselves 2: early ones lack some.
                if number > version or (number == 2 and version == 2):
                    step(db, path)
            db.execute(f"PRAGMA user_version = {VERSION}")
            db.execute("COMMIT")
        except BaseException:
            if db.in_transaction:
                db.execute("ROLLBACK")
            raise


def wal_files(path: Path) -> list[Path]:
    """Return the files that belong to a ledger: the database, its write-ahead log and shared index."""
    return [file for suffix in ("", "-wal", "-shm") if os.path.lexists(file := Path(f"{path}{suffix}"))]
