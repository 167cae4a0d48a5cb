"""Location and state of the Dagster history of a data root, read without importing Dagster."""

import sqlite3
from pathlib import Path

from imagemill.domain.layout import DataRoot, home_of
from imagemill.fs.fingerprints import fingerprint

# The index of the event log, below the history's folder.
_INDEX = Path("history", "runs", "index.db")

_STATE = (
    "SELECT asset_key, wipe_timestamp FROM asset_keys ORDER BY asset_key",
    "SELECT partitions_def_name, count(*), max(id) FROM dynamic_partitions GROUP BY 1 ORDER BY 1",
)


def history_state(root: DataRoot) -> str | None:
    """Return a text that differs for another history, and after assets are wiped or partitions deleted in the UI.

    None if the history is not kept in SQLite files, or cannot be read.
    """
    index = home_of(root) / _INDEX
    try:
        inode = index.stat().st_ino
        connection = sqlite3.connect(f"{index.as_uri()}?mode=ro", uri=True)
        try:
            known = [connection.execute(sql).fetchall() for sql in _STATE]
        finally:
            connection.close()
    except (OSError, sqlite3.Error):
        return None
    return fingerprint(repr((str(index), inode, known)).encode())
