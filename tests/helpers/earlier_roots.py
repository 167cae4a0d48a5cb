"""Data roots of earlier releases, from tests/fixtures/roots."""

import sqlite3
import tarfile
from contextlib import closing
from pathlib import Path

from imagemill.domain.embedding_specs import embedding_specs
from imagemill.domain.layout import DataRoot

# The dagster.yaml of a data root that an earlier release began.
DAGSTER_YAML = """\
telemetry: {enabled: false}
storage:
  custom: {module: dagster_project.storage, class: BatchSqliteStorage, config: {base_dir: {env: DAGSTER_HOME}}}
run_coordinator: {module: dagster_project.coordinator, class: DeferCoordinator, config: {max_concurrent_runs: 1}}
"""

ROOTS = Path(__file__).parents[1] / "fixtures" / "roots"
RELEASED = sorted(path.name.removesuffix(".tar.xz") for path in ROOTS.glob("*.tar.xz"))

FOLDERS = {spec.kind: spec.folder for spec in embedding_specs()}
PATHS = {
    "sources": lambda root, row: root.approved / row[1],
    "captions": lambda root, row: root.approved / f"{row[0]}.txt",
    "files": lambda root, row: root.derived / FOLDERS[row[0]] / f"{row[1]}.npy",
    "problems": lambda root, row: root.approved / f"{row[0]}.jpg",
}
_FIRST_OF_TRIPLE = {"sources": 2, "captions": 1, "files": 2, "problems": 6}


def unpacked(folder, name):
    """Unpack a data root of an earlier schema, and update its ledger to the inodes of the unpacked files."""
    with tarfile.open(ROOTS / f"{name}.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    root = DataRoot(folder / "data")
    with closing(sqlite3.connect(root.ledger)) as db, db:
        for table, path_of in PATHS.items():
            for row in db.execute(f"SELECT * FROM {table} WHERE inode IS NOT NULL").fetchall():
                path = path_of(root, row)
                if path.exists():
                    stat = path.stat()
                    db.execute(
                        f"UPDATE {table} SET size = ?, mtime_ns = ?, inode = ? WHERE inode = ? AND mtime_ns = ?",
                        (stat.st_size, stat.st_mtime_ns, stat.st_ino, _inode_of(table, row), _mtime_of(table, row)),
                    )
    return root


def _inode_of(table, row):
    return row[_FIRST_OF_TRIPLE[table] + 2]


def _mtime_of(table, row):
    return row[_FIRST_OF_TRIPLE[table] + 1]
