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
import os
import sqlite3
import struct
import tarfile
import uuid
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import msgspec

from imagemill.errors import ImagemillError
from imagemill.formats.manifest import read_json
from imagemill.formats.tar import IndexEntry
from imagemill.fs.atomic import sync_folder
from imagemill.fs.durable import flush_files

META = ".nv-meta"
TAR_INDEX_SUFFIX = ".idx"
SQLITE = "index.sqlite"
DOCUMENTS = (".info.json", ".info.yaml", "split.yaml", "dataset.yaml", "index.uuid", SQLITE)
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

# With a cache of 64 MiB the rows of 100,000 samples are sorted in memory, and their indices take a fifth less time.
_PRAGMAS = "PRAGMA page_size = 4096; PRAGMA journal_mode = OFF; PRAGMA synchronous = OFF; PRAGMA cache_size = -65536;"

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
_EARLIER_SAMPLES = """
SELECT sample_key, sample_index, byte_offset, byte_size FROM earlier.samples WHERE tar_file_id = ? ORDER BY sample_index
"""
_WITH_PARTS = "SELECT count(DISTINCT sample_index) FROM earlier.sample_parts WHERE tar_file_id = ?"
_COPY_SAMPLES = """
INSERT INTO samples SELECT ?, sample_key, sample_index, byte_offset, byte_size
FROM earlier.samples WHERE tar_file_id = ? ORDER BY sample_index
"""
_COPY_PARTS = """
INSERT INTO sample_parts SELECT ?, sample_index, part_name, content_byte_offset, content_byte_size
FROM earlier.sample_parts WHERE tar_file_id = ? ORDER BY sample_index, content_byte_offset
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
    gone, indices, numbers, exclude = frozenset(dead), {}, {}, []
    for name, entries in shards:
        ends = [entries[-1].offset + entries[-1].size] if entries else [0]
        offsets = [*(entry.offset for entry in entries), *ends]
        index = struct.pack(f"<{len(offsets)}Q", *offsets)
        if earlier is None or not _is_linked(earlier, name, folder, index):
            indices[folder / f"{name}{TAR_INDEX_SUFFIX}"] = index
        numbers[name] = len(entries)
        if gone:
            exclude += [f"{name}/{entry.key}" for entry in entries if (name, entry.offset) in gone]
    counts = _json({"shard_counts": numbers})
    documents = {
        meta / ".info.json": counts,
        meta / ".info.yaml": counts,
        meta / "split.yaml": _json(_split(list(numbers), exclude)),
        meta / "dataset.yaml": _json({**_LOADER, "subflavors": {"bucket": bucket}}),
        meta / "index.uuid": _uuid(shards, dead).encode(),
    }
    for path, content in {**indices, **documents}.items():
        path.write_bytes(content)
    _write_sqlite(meta / SQLITE, folder, shards, gone, earlier)
    # `flush_files` takes the files of one folder.
    for paths in (list(indices), [*documents, meta / SQLITE]):
        for error in flush_files(paths).values():
            raise error
    sync_folder(meta)


def documents_elsewhere(folder: Path, names: Mapping[str, str]) -> Iterator[tuple[str, bytes]]:
    """Yield name and bytes of each file of `.nv-meta/`, for a place from which the tars have other names.

    Args:
        folder: folder of the set.
        names: path of each tar, relative to the folder in which `.nv-meta/` will be, by its name in `folder`.
    """
    for path in sorted((folder / META).iterdir()):
        data = path.read_bytes()
        if path.name in {".info.json", ".info.yaml"}:
            counts = msgspec.json.decode(data)["shard_counts"]
            data = _json({"shard_counts": {names[name]: count for name, count in counts.items()}})
        elif path.name == "split.yaml":
            split = msgspec.json.decode(data)
            parts = {part: [names[name] for name in tars] for part, tars in split["split_parts"].items()}
            excluded = (each.partition("/") for each in split["exclude"])
            data = _json({"split_parts": parts, "exclude": [f"{names[name]}/{key}" for name, _, key in excluded]})
        yield path.name, data


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


def _split(tars: Sequence[str], exclude: Iterable[str]) -> dict[str, object]:
    # Energon expands `{a,b}` in these names as a shell does.
    escaped = [name.replace("{", "\\{").replace("}", "\\}") for name in exclude]
    return {"split_parts": {"train": tars, "val": [], "test": []}, "exclude": escaped}


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
    path: Path, folder: Path, shards: Sequence[Shard], dead: Collection[Place], earlier: Earlier | None
) -> None:
    """Write the live samples only. The key column is unique, and of the samples with one key at most one is live."""
    try:
        _write_rows(path, folder, shards, dead, earlier)
    except sqlite3.Error:
        if earlier is None:
            raise
        path.unlink(missing_ok=True)  # the index of the earlier set may be damaged
        _write_rows(path, folder, shards, dead, None)


def _write_rows(
    path: Path, folder: Path, shards: Sequence[Shard], dead: Collection[Place], earlier: Earlier | None
) -> None:
    with closing(sqlite3.connect(path.resolve().as_uri(), uri=True)) as database:
        # No journal is needed: no reader opens the file before it is complete and flushed.
        database.executescript(_PRAGMAS + _TABLES)
        attached = _attach(database, earlier)
        for tar, (name, entries) in enumerate(shards):
            # Equal sets give equal bytes only if the rows of both tables arrive in the same order.
            live = [(n, entry) for n, entry in enumerate(entries) if (name, entry.offset) not in dead]
            if name in attached and _has_rows(database, live, attached[name]):
                database.execute(_COPY_SAMPLES, (tar, attached[name]))
                database.execute(_COPY_PARTS, (tar, attached[name]))
                continue
            rows = ((tar, entry.key, n, entry.offset, entry.size) for n, entry in live)
            database.executemany("INSERT INTO samples VALUES (?, ?, ?, ?, ?)", rows)
            members = ((n, entry.members or members_of(folder / name, entry)) for n, entry in live)
            parts = ((tar, n, *member) for n, of_sample in members for member in of_sample)
            database.executemany("INSERT INTO sample_parts VALUES (?, ?, ?, ?, ?)", parts)
        database.executescript(_INDICES)  # commits the rows first


def _attach(database: sqlite3.Connection, earlier: Earlier | None) -> dict[str, int]:
    """Attach the index of an earlier set; return the numbers there of the tars that both sets have, none without an index."""
    if earlier is None or not (earlier.folder / META / SQLITE).is_file():
        return {}
    location = (earlier.folder / META / SQLITE).resolve().as_uri()
    try:
        numbers = {name: n for n, name in enumerate(read_json(earlier.folder / META / ".info.json")["shard_counts"])}
    except (ImagemillError, LookupError, TypeError):
        return {}
    database.execute("ATTACH ? AS earlier", (f"{location}?mode=ro&immutable=1",))
    return {name: numbers[before] for name, before in earlier.names.items() if before in numbers}


def _has_rows(database: sqlite3.Connection, live: Sequence[tuple[int, IndexEntry]], before: int) -> bool:
    """Return whether the rows of a tar in the attached index are those of its live samples.

    SQLite copies them in a fifth of the time that rows take through Python.
    """
    found = database.execute(_EARLIER_SAMPLES, (before,)).fetchall()
    (with_parts,) = database.execute(_WITH_PARTS, (before,)).fetchone()
    return with_parts == len(live) and found == [(entry.key, n, entry.offset, entry.size) for n, entry in live]


def members_of(path: Path, entry: IndexEntry) -> Members:
    """Return the members of a sample from its tar headers. Raises ImagemillError if it is not there."""
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
