"""A bucket's set of shards as it lies on disk: what is in it, what of it counts.

    shards/bucket_1024x1024/
    ├─ shard-000000.tar …
    ├─ index.jsonl         {"image_id", "key", "shard", "offset", "size", "digest", "width", "height", "tokens"} per sample
    ├─ tombstones.jsonl    {"image_id", "shard", "offset", "why"} per sample that counts no more; absent where all do
    ├─ manifest.json       counts, checksums, parameters, provenance, statistics, a digest of the samples that count
    └─ .nv-meta/  *.tar.idx    the same for Megatron-Energon (formats/energon.py)

A sample is *live* where the index has it and no tombstone does. Of one id at most one sample is live.

Belongs here: reading a set's documents; what makes two sets equal.
Belongs elsewhere: planning and writing sets (shards.py, shard_writer.py), tars (formats/tar.py), reading samples (reading/).
Spec: docs/spec/shards.md#appending
"""

import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec

from imagemill.domain.buckets import BUCKETS
from imagemill.domain.geometry import MAX_SIDE
from imagemill.domain.ids import id_problem
from imagemill.errors import ImagemillError, MissingInput
from imagemill.formats.jsonl import read_jsonl
from imagemill.formats.manifest import read_json
from imagemill.formats.tar import IndexEntry
from imagemill.pipeline.shards.shard_manifest import (
    SEAL,
    Manifest,
    ShardEntry,
    ShardName,
    ShardParameters,
    decode_manifest,
    seal_is_broken,
)

INDEX = "index.jsonl"
TOMBSTONES = "tombstones.jsonl"
MANIFEST = "manifest.json"

# Members of a sample besides its npy files.
JSON_MEMBER = "json"
MASK_MEMBER = "t5m.npy"

_RESTORE = "restore the file, or write the set again: `imagemill shards --overwrite`"

_Measure = Annotated[int, msgspec.Meta(ge=0, le=MAX_SIDE)]


class IndexLine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One sample in a tar: bytes from the tar's beginning. Decoding refuses ids and tar names that are no file names.

    `digest`: of its record and files, see `sample_digest`. `width`, `height`: of its image in pixels; `tokens` of its caption;
    0 in sets of earlier versions.
    """

    image_id: str
    key: str
    shard: ShardName
    offset: int
    size: int
    digest: str
    width: _Measure = 0
    height: _Measure = 0
    tokens: _Measure = 0

    def __post_init__(self) -> None:
        _refuse_no_id(self.image_id)

    @property
    def place(self) -> tuple[str, int]:
        return self.shard, self.offset

    @property
    def entry(self) -> IndexEntry:
        return IndexEntry(self.key, self.offset, self.size)


class Tombstone(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A sample that counts no more. `why`: `withdrawn`, `changed`, `not_ready`, or `beyond_limit`."""

    image_id: str
    shard: ShardName
    offset: int
    why: str

    def __post_init__(self) -> None:
        _refuse_no_id(self.image_id)

    @property
    def place(self) -> tuple[str, int]:
        return self.shard, self.offset


def _refuse_no_id(image_id: str) -> None:
    """Raises ValueError, which msgspec reports as a ValidationError."""
    if problem := id_problem(image_id):
        raise ValueError(f"image_id {problem}")


def bucket_folder(output: Path, bucket: str) -> Path:
    return output / f"bucket_{bucket}"


def refuse_no_sets(output: Path) -> None:
    """Raises ImagemillError where something else than a folder has the place of the shards or of a bucket's set.

    A link to a folder is one. Nothing is written in place of a link to nothing: its disk may not be mounted.
    """
    for folder in (output, *(bucket_folder(output, bucket) for bucket in BUCKETS)):
        if os.path.lexists(folder) and not folder.is_dir():
            raise ImagemillError(
                f"{folder.name} is no folder",
                where=folder,
                why="a link to nothing" if folder.is_symlink() else "a file is in its place",
                do="move it away; of a link, bring back what it points to",
            )


def shard_name(number: int) -> str:
    return f"shard-{number:06d}.tar"


def load_manifest(folder: Path) -> Manifest:
    """Read the manifest of a bucket's set.

    Raises:
        MissingInput: the file is missing. ImagemillError: it is not one of ours, or was changed after it was written.
    """
    path = folder / MANIFEST
    document = read_manifest_document(folder)
    try:
        manifest = decode_manifest(document)
    except msgspec.ValidationError as error:
        what = f"{folder.name}/{MANIFEST} is not one of ours"
        raise ImagemillError(what, where=path, why=str(error), do=_RESTORE) from error
    if seal_is_broken(document):
        raise ImagemillError(
            f"{folder.name}/{MANIFEST} was changed after it was written",
            where=path,
            why=f"its {SEAL} belongs to other content",
            do=_RESTORE,
        )
    return manifest


def read_manifest_document(folder: Path) -> Any:
    """Return the parsed JSON of a set's manifest, unchecked. Raises as `load_manifest`."""
    try:
        return read_json(folder / MANIFEST)
    except MissingInput:
        raise MissingInput(f"{folder.name} has no {MANIFEST}", where=folder, do=_RESTORE) from None
    except OSError as error:
        what, do = f"cannot read {folder.name}/{MANIFEST}", "make it a readable file; else " + _RESTORE
        raise ImagemillError(what, where=folder, why=str(error), do=do) from error
    except ImagemillError as error:
        what = f"{folder.name}/{MANIFEST} is not one of ours"
        raise ImagemillError(what, where=folder / MANIFEST, why=error.why, do=_RESTORE) from error


def read_manifest(folder: Path) -> Manifest | None:
    """Return the manifest of a bucket's set, None if it is absent, foreign or damaged."""
    try:
        return load_manifest(folder)
    except ImagemillError:
        return None


def recorded_parameters(folder: Path) -> ShardParameters | None:
    """The parameters a set was written with."""
    manifest = read_manifest(folder)
    return manifest.parameters if manifest else None


def list_tars(folder: Path) -> dict[str, int]:
    """Return the names and sizes in bytes of the tars in a folder."""
    return {tar.name: tar.stat().st_size for tar in folder.glob("*.tar")}


def agrees(tars: Mapping[str, int], manifest: Manifest) -> bool:
    """Whether the tars of a folder are those of its manifest, by name and size."""
    return {shard.name: shard.bytes for shard in manifest.shards} == tars


def read_index(folder: Path) -> list[IndexLine]:
    """Every sample in the tars, in order. Raises ImagemillError where the index is not ours or damaged."""
    return list(_lines(folder / INDEX, IndexLine))


def read_tombstones(folder: Path) -> list[Tombstone]:
    path = folder / TOMBSTONES
    return list(_lines(path, Tombstone)) if path.is_file() else []


def live_lines(folder: Path) -> list[IndexLine]:
    """The samples that count, in order."""
    dead = {tombstone.place for tombstone in read_tombstones(folder)}
    return [line for line in read_index(folder) if line.place not in dead]


def entries_by_shard(shards: Iterable[ShardEntry], lines: Iterable[IndexLine]) -> list[tuple[str, list[IndexEntry]]]:
    """Return the name of every tar with its samples, in the order of the lines."""
    entries: dict[str, list[IndexEntry]] = {shard.name: [] for shard in shards}
    for line in lines:
        entries.setdefault(line.shard, []).append(line.entry)
    return list(entries.items())


def _lines(path: Path, kind: type) -> Iterator[Any]:
    try:
        for line in read_jsonl(path):
            yield msgspec.convert(line.value, kind)
    except (OSError, msgspec.ValidationError) as error:
        raise ImagemillError(
            f"{path.name} cannot be read", where=path, why=str(error), do="run `imagemill shards --overwrite`"
        ) from error


def sample_digest(record: bytes, contents: Iterable[tuple[str, str]]) -> str:
    """Of one sample: its json member and the content fingerprint of its file of each kind; 32 hex digits."""
    files = "".join(f"{kind} {content}\n" for kind, content in contents)
    return hashlib.sha256(record + files.encode()).hexdigest()[:32]


def set_digest(digests: Iterable[str]) -> str:
    """Of the samples whatever their order: a new image in one bucket moves others' places in a common shuffle, no more."""
    return hashlib.sha256("\n".join(sorted(digests)).encode()).hexdigest()
