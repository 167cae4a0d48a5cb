"""Comparison of a set's Energon files with those that the writer produces for the set's index.

The files are written in formats/energon.py; the index itself is checked in shards.py.
"""

import itertools
import sqlite3
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path

from imagemill.errors import ImagemillError
from imagemill.formats.energon import META, SQLITE, Place, Shard, documents_elsewhere, write_energon
from imagemill.pipeline.shards.shard_sets import INDEX
from imagemill.validation.catalogue import finding
from imagemill.validation.findings import Finding

_TABLES = {
    "samples": "tar_file_id, sample_key, sample_index, byte_offset, byte_size",
    "sample_parts": "tar_file_id, sample_index, content_byte_offset, part_name, content_byte_size",
}


def energon_files(
    folder: Path,
    bucket: str,
    shards: Sequence[Shard],
    dead: Collection[Place],
    names: Mapping[str, str] | None = None,
) -> Iterator[Finding]:
    """Yield a finding for every Energon file that is missing or differs.

    The index must be correct, because only headers are read from the tars; none where all entries have their members.

    Args:
        folder: the set.
        bucket: of the set.
        shards: as for `write_energon`.
        dead: as for `write_energon`.
        names: as for `documents_elsewhere`, for a set whose tars are not in its folder.
    """
    with tempfile.TemporaryDirectory(prefix="imagemill-") as name:
        expected_folder = Path(name)
        for tar, _ in shards:
            (expected_folder / tar).symlink_to((folder / tar).absolute())
        try:
            write_energon(expected_folder, shards, bucket=bucket, dead=dead)
        except ImagemillError as error:
            yield finding("index", error.what, file=f"{folder.name}/{INDEX}")
            return
        for document, data in list(documents_elsewhere(expected_folder, names)) if names else ():
            (expected_folder / META / document).write_bytes(data)
        for path in sorted(path for path in expected_folder.rglob("*") if path.is_file() and not path.is_symlink()):
            file = path.relative_to(expected_folder)
            if problem := _problem(folder / file, path):
                yield finding("energon", problem, file=f"{folder.name}/{file.as_posix()}")


def _problem(found: Path, expected: Path) -> str | None:
    if not found.is_file():
        return "not there"
    if found.read_bytes() == expected.read_bytes():
        return None
    # The bytes of a SQLite file depend on SQLite's version, so rows are compared instead.
    same = expected.name == SQLITE and _same_rows(found, expected)
    return None if same else "not what the index asks for"


def _same_rows(one: Path, other: Path) -> bool:
    try:
        with closing(_opened(one)) as first, closing(_opened(other)) as second:
            return _is_whole(first) and all(
                mine == theirs
                for name, columns in _TABLES.items()
                for mine, theirs in itertools.zip_longest(_rows(first, name, columns), _rows(second, name, columns))
            )
    except sqlite3.Error:
        return False


def _is_whole(database: sqlite3.Connection) -> bool:
    """Return whether SQLite finds no damage; rows may still be readable in a truncated file."""
    return database.execute("PRAGMA integrity_check").fetchone() == ("ok",)


def _opened(path: Path) -> sqlite3.Connection:
    return sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro&immutable=1", uri=True)


def _rows(database: sqlite3.Connection, table: str, columns: str) -> sqlite3.Cursor:
    return database.execute(f"SELECT {columns} FROM {table} ORDER BY {columns}")
