"""Index files of NVIDIA Megatron-Energon beside a set of shards, so that its loaders mount the folder without preparation.

    bucket_1024x1024/
    ├─ shard-000000.tar.idx   uint64, little-endian: offset of each sample, then the end of the last one
    └─ .nv-meta/
       ├─ .info.json          samples per tar; `.info.yaml`: the same for releases before 7
       ├─ split.yaml          every tar is in `train`; dead samples are excluded
       ├─ dataset.yaml        the loader: members under their own names (`CrudeWebdataset`)
       ├─ index.sqlite        live samples by key, and their members: random access and joins
       └─ index.uuid          changes whenever the samples or their positions change

Energon addresses samples by position. Tars and `.idx` therefore count every sample, and energon skips the excluded ones when
it reads them. Equal sets give equal bytes, except that index.sqlite also depends on SQLite's version. The YAML is JSON, which
every YAML reader reads.

The samples of a set, and which of them are live, are determined in pipeline/shards/shard_sets.py.
Reference: megatron-energon 7.4.1, flavors/webdataset/{prepare,indexing,itar,metadata,structs,itar_reader}.py and
metadataset/metadataset_v2.py.
"""

import hashlib
import itertools
import os
import sqlite3
import tarfile
import uuid
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from imagemill.errors import ImagemillError
from imagemill.formats.manifest import read_json
from imagemill.formats.tar import IndexEntry
from imagemill.fs.atomic import sync_folder
from imagemill.fs.durable import flush_files

META = ".nv-meta"
TAR_INDEX_SUFFIX = ".idx"
SQLITE = "index.sqlite"
METADATASET = "metadataset.yaml"

# A tar, and its samples in order.
Shard = tuple[str, Sequence[IndexEntry]]
# (suffix, offset, size) of each member's values.
Members = tuple[tuple[str, int, int], ...]
# A tar's name and a sample's offset in it.
Place = tuple[str, int]


class Earlier(NamedTuple):
    """The set that a set continues: its folder, and the name there of each tar that both have."""

    folder: Path
    names: Mapping[str, str]


_LOADER = {"__module__": "megatron.energon", "__class__": "CrudeWebdataset"}

_PRAGMAS = "PRAGMA page_size = 4096; PRAGMA journal_mode = OFF; PRAGMA synchronous = OFF;"

# The tables of energon's `SqliteIndexWriter`. The indices are created after the rows, which is faster.
_TABLES = """
CREATE TABLE samples (
    tar_file_id INTEGER NOT NULL, sample_key TEXT NOT NULL UNIQUE, sample_index INTEGER NOT NULL,
    byte_offset INTEGER, byte_size INTEGER
);
CREATE TABLE sample_parts (
    tar_file_id INTEGER, sample_index INTEGER, part_name TEXT, content_byte_offset INTEGER, content_byte_size INTEGER
);
"""
_INDICES = """
CREATE INDEX idx_samples_by_tar_and_idx ON samples(tar_file_id, sample_index);
CREATE INDEX idx_sample_parts_seq ON sample_parts(tar_file_id, sample_index, content_byte_offset);
CREATE INDEX idx_sample_parts_full
    ON sample_parts(tar_file_id, sample_index, part_name, content_byte_offset, content_byte_size);
"""
_RECORDED = """
SELECT tar_file_id, byte_offset, part_name, content_byte_offset, content_byte_size
FROM samples JOIN sample_parts USING (tar_file_id, sample_index)
ORDER BY tar_file_id, sample_index, content_byte_offset
"""


def is_energon(name: str) -> bool:
    """Return whether a name in a bucket's folder is one of the files written here."""
    return name == META or name.endswith(f".tar{TAR_INDEX_SUFFIX}")


def write_energon(
    folder: Path, shards: Sequence[Shard], *, bucket: str, dead: Collection[Place] = (), earlier: Earlier | None = None
) -> None:
    """Write and flush energon's files beside the tars, in a folder that has none of them yet.

    Args:
        folder: folder of the set.
        shards: every tar of the set with every sample in it. Members of entries without `members` are taken from the index of
            `earlier`, else read from their tar.
        bucket: bucket name such as `1024x1024`; energon passes it to training code as the subflavor `bucket`.
        dead: samples that no longer count, which sets of earlier releases have.
        earlier: the set that this one continues; None if all tars are new.

    Raises:
        ImagemillError: if a sample is not at the position of its entry.
    """
    meta = folder / META
    meta.mkdir()
    indices = {}
    for name, entries in shards:
        ends = [entries[-1].offset + entries[-1].size] if entries else [0]
        offsets = np.asarray([*(entry.offset for entry in entries), *ends], "<u8").tobytes()
        if earlier is None or not _is_linked(earlier, name, folder, offsets):
            indices[folder / f"{name}{TAR_INDEX_SUFFIX}"] = offsets
    counts = _json({"shard_counts": {name: len(entries) for name, entries in shards}})
    documents = {
        meta / ".info.json": counts,
        meta / ".info.yaml": counts,
        meta / "split.yaml": _json(_split(shards, dead)),
        meta / "dataset.yaml": _json({**_LOADER, "subflavors": {"bucket": bucket}}),
        meta / "index.uuid": _uuid(shards, dead).encode(),
    }
    for path, content in {**indices, **documents}.items():
        path.write_bytes(content)
    _write_sqlite(meta / SQLITE, folder, shards, frozenset(dead), _recorded_members(earlier))
    # `flush_files` takes the files of one folder.
    for paths in (list(indices), [*documents, meta / SQLITE]):
        for error in flush_files(paths).values():
            raise error
    sync_folder(meta)


def metadataset(folders: Iterable[str]) -> bytes:
    """Return a document that mounts bucket folders together, each sample once an epoch. Paths are relative to the file."""
    blend = [{"path": f"./{name}", "repetitions": 1} for name in folders]
    splits = {"train": {"blend_epochized": blend}}
    return _json({"__module__": "megatron.energon", "__class__": "MetadatasetV2", "splits": splits})


def _is_linked(earlier: Earlier, name: str, folder: Path, content: bytes) -> bool:
    """Link the index of a tar that both sets have into the new folder; return False if it is missing or differs."""
    try:
        index = earlier.folder / f"{earlier.names[name]}{TAR_INDEX_SUFFIX}"
        if index.read_bytes() != content:
            return False
        os.link(index, folder / f"{name}{TAR_INDEX_SUFFIX}")
    except (KeyError, OSError):
        return False
    return True


# ---- documents


def _json(document: object) -> bytes:
    """Return a JSON document with unsorted keys, because energon numbers the tars by their order."""
    return msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n"


def _split(shards: Sequence[Shard], dead: Collection[Place]) -> dict[str, object]:
    gone = frozenset(dead)
    exclude = [f"{name}/{entry.key}" for name, entries in shards for entry in entries if (name, entry.offset) in gone]
    # Energon expands `{a,b}` in these names as a shell does.
    exclude = [name.replace("{", "\\{").replace("}", "\\}") for name in exclude]
    return {"split_parts": {"train": [name for name, _ in shards], "val": [], "test": []}, "exclude": exclude}


def _uuid(shards: Sequence[Shard], dead: Collection[Place]) -> str:
    """Return an id of the samples and their positions. Energon considers a join's index outdated when it changes."""
    digest = hashlib.sha256()
    for name, entries in shards:
        for entry in entries:
            digest.update(f"{name}/{entry.offset}/{entry.size}/{entry.key}\n".encode())
    for name, offset in sorted(dead):
        digest.update(f"-{name}/{offset}\n".encode())
    return str(uuid.UUID(bytes=digest.digest()[:16], version=4))


# ---- index.sqlite


def _write_sqlite(
    path: Path, folder: Path, shards: Sequence[Shard], dead: Collection[Place], recorded: Mapping[Place, Members]
) -> None:
    """Write the live samples only. The key column is unique, and of the samples with one key at most one is live."""
    with closing(sqlite3.connect(path)) as database:
        # No journal is needed: no reader opens the file before it is complete and flushed.
        database.executescript(_PRAGMAS + _TABLES)
        for tar, (name, entries) in enumerate(shards):
            for number, entry in enumerate(entries):
                if (name, entry.offset) not in dead:
                    sample = tar, entry.key, number, entry.offset, entry.size
                    database.execute("INSERT INTO samples VALUES (?, ?, ?, ?, ?)", sample)
                    members = entry.members or recorded.get((name, entry.offset)) or _walk(folder / name, entry)
                    parts = ((tar, number, *member) for member in members)
                    database.executemany("INSERT INTO sample_parts VALUES (?, ?, ?, ?, ?)", parts)
        database.executescript(_INDICES)  # commits the rows first


def _recorded_members(earlier: Earlier | None) -> dict[Place, Members]:
    """Return members by the position of their sample, from the index of an earlier set; empty if it has no readable index."""
    if earlier is None or not (earlier.folder / META / SQLITE).is_file():
        return {}
    location = (earlier.folder / META / SQLITE).resolve().as_uri()
    now = {before: name for name, before in earlier.names.items()}
    try:
        names = list(read_json(earlier.folder / META / ".info.json")["shard_counts"])
        with closing(sqlite3.connect(f"{location}?mode=ro&immutable=1", uri=True)) as database:
            rows = (row for row in database.execute(_RECORDED) if names[row[0]] in now)
            places = itertools.groupby(rows, key=lambda row: (now[names[row[0]]], row[1]))
            return {place: tuple(row[2:] for row in members) for place, members in places}
    except (sqlite3.Error, ImagemillError, LookupError, TypeError):
        return {}


def _walk(path: Path, entry: IndexEntry) -> Members:
    """Return the members of a sample from its tar headers."""
    members = []
    try:
        with open(path, "rb") as file:
            file.seek(entry.offset)
            with tarfile.open(fileobj=file, mode="r:", encoding="utf-8") as tar:
                for info in tar:
                    key, _, suffix = info.name.partition(".")
                    if key != entry.key:
                        break
                    members.append((suffix, info.offset_data, info.size))
    except tarfile.TarError as error:
        raise _missing_sample(path, entry) from error
    if not members:
        raise _missing_sample(path, entry)
    return tuple(members)


def _missing_sample(path: Path, entry: IndexEntry) -> ImagemillError:
    return ImagemillError(
        f"no sample {entry.key!r} at byte {entry.offset}",
        where=path,
        why="the index is of another shard",
        do="run `imagemill shards --overwrite`",
    )
