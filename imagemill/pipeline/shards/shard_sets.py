"""One bucket's set of shards on disk: its documents, and which of its samples are live.

    shards/bucket_1024x1024/
    ├─ shard-000000.tar …
    ├─ index.jsonl         {"image_id", "key", "shard", "offset", "size", "digest", "width", "height", "tokens"} per sample
    ├─ tombstones.jsonl    {"image_id", "shard", "offset", "why"} per sample that is not live; absent if all are
    ├─ manifest.json       counts, checksums, parameters, provenance, statistics, a digest of the live samples
    └─ .nv-meta/  *.tar.idx    the same for Megatron-Energon (formats/energon.py)

A sample is *live* if the index contains it and no tombstone does. At most one sample of an id is live.

Sets are planned in shard_plan.py and written in shard_writer.py; tars are in formats/tar.py, reading samples is in
reading/.

Spec: docs/spec/shards.md#incremental-updates
"""

import hashlib
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import msgspec

from imagemill.domain.buckets import BUCKETS
from imagemill.domain.embedding_specs import embedding_specs
from imagemill.domain.geometry import MAX_SIDE
from imagemill.domain.ids import id_problem
from imagemill.domain.inputs import MAX_REPEATS
from imagemill.errors import ImagemillError, MissingInput
from imagemill.formats.jsonl import parse_line, read_blocks, read_typed
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


def set_members() -> list[str]:
    """Return the members of each sample of a new set, in order: the kinds in use determine them."""
    return [JSON_MEMBER, *(member for spec in embedding_specs() for member in spec.members), MASK_MEMBER]


_RESTORE = "restore the file, or write the set again: `imagemill shards --overwrite`"

_Measure = Annotated[int, msgspec.Meta(ge=0, le=MAX_SIDE)]
_Repeats = Annotated[int, msgspec.Meta(ge=1, le=MAX_REPEATS)]


class IndexLine(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """One sample in a tar. `offset` and `size` are in bytes.

    Decoding refuses image ids and tar names that are not valid file names. `digest`: of its record and files, see
    `sample_digest`. `width`, `height`: of its image in pixels. `tokens`: of its caption. These three are 0 in sets of
    earlier releases. `repeats`: how often training draws the sample in an epoch, if not once.
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
    repeats: _Repeats | msgspec.UnsetType = msgspec.UNSET

    def __post_init__(self) -> None:
        _check_id(self.image_id)

    @property
    def place(self) -> tuple[str, int]:
        """Tar name and offset, which identify the sample within the set."""
        return self.shard, self.offset

    @property
    def entry(self) -> IndexEntry:
        """The sample's position as formats/tar.py takes it."""
        return IndexEntry(self.key, self.offset, self.size)


class Tombstone(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A sample that no longer counts. `why`: `withdrawn`, `changed`, `not_ready` or `beyond_limit`."""

    image_id: str
    shard: ShardName
    offset: int
    why: str

    def __post_init__(self) -> None:
        _check_id(self.image_id)

    @property
    def place(self) -> tuple[str, int]:
        """Tar name and offset, as in `IndexLine.place`."""
        return self.shard, self.offset


class SamplePlace(msgspec.Struct, frozen=True, gc=False):
    """The place of a sample: those fields of `IndexLine` that the viewer shows. Their values are not checked."""

    image_id: str
    shard: str
    offset: int


def _check_id(image_id: str) -> None:
    """Raise ValueError for an invalid id; msgspec reports it as a ValidationError."""
    if problem := id_problem(image_id):
        raise ValueError(f"image_id {problem}")


def bucket_folder(output: Path, bucket: str) -> Path:
    """Return the folder of a bucket's set."""
    return output / f"bucket_{bucket}"


def refuse_no_sets(output: Path) -> None:
    """Raise ImagemillError if the output folder or a bucket's folder exists but is not a folder.

    A link to a folder is accepted. A dangling link is refused, because its disk may not be mounted.
    """
    for folder in (output, *(bucket_folder(output, bucket) for bucket in BUCKETS)):
        if os.path.lexists(folder) and not folder.is_dir():
            raise ImagemillError(
                f"{folder.name} is not a folder",
                where=folder,
                why="a broken symlink" if folder.is_symlink() else "a file has its name",
                do="move it away; if it is a link, restore its target",
            )


def shard_name(number: int) -> str:
    """Return the file name of the tar with this number."""
    return f"shard-{number:06d}.tar"


def load_manifest(folder: Path) -> Manifest:
    """Read and check the manifest of a bucket's set.

    Raises:
        MissingInput: if the file is missing.
        ImagemillError: if it is not a valid manifest, or was changed after it was written.
    """
    path = folder / MANIFEST
    document = read_manifest_document(folder)
    try:
        manifest = decode_manifest(document)
    except msgspec.ValidationError as error:
        what = f"{folder.name}/{MANIFEST} was not written by imagemill"
        raise ImagemillError(what, where=path, why=str(error), do=_RESTORE) from error
    if seal_is_broken(document):
        raise ImagemillError(
            f"{folder.name}/{MANIFEST} was changed after it was written",
            where=path,
            why=f"its {SEAL} does not match its content",
            do=_RESTORE,
        )
    return manifest


def read_manifest_document(folder: Path) -> Any:
    """Return the parsed JSON of a set's manifest without checking its schema or digest; raise as `load_manifest`."""
    try:
        return read_json(folder / MANIFEST)
    except MissingInput:
        raise MissingInput(f"{folder.name} has no {MANIFEST}", where=folder, do=_RESTORE) from None
    except OSError as error:
        what, do = f"cannot read {folder.name}/{MANIFEST}", "make it a readable file; else " + _RESTORE
        raise ImagemillError(what, where=folder, why=str(error), do=do) from error
    except ImagemillError as error:
        what = f"{folder.name}/{MANIFEST} was not written by imagemill"
        raise ImagemillError(what, where=folder / MANIFEST, why=error.why, do=_RESTORE) from error


def read_manifest(folder: Path) -> Manifest | None:
    """Return the manifest of a bucket's set; None if it is absent, foreign or damaged."""
    try:
        return load_manifest(folder)
    except ImagemillError:
        return None


def recorded_parameters(folder: Path) -> ShardParameters | None:
    """Return the parameters that a set was written with; None without a readable manifest."""
    manifest = read_manifest(folder)
    return manifest.parameters if manifest else None


def list_tars(folder: Path) -> dict[str, int]:
    """Return the names and sizes in bytes of the tars in a folder."""
    return {tar.name: tar.stat().st_size for tar in folder.glob("*.tar")}


def agrees(tars: Mapping[str, int], manifest: Manifest) -> bool:
    """Return whether the tars of a folder match its manifest by name and size."""
    return {shard.name: shard.bytes for shard in manifest.shards} == tars


def read_index(folder: Path) -> list[IndexLine]:
    """Return all samples in the tars, in order; raise ImagemillError if the index is foreign or damaged."""
    values: dict[str | int, str | int] = {}
    return [sharing(line, values) for line in _lines(folder / INDEX, IndexLine)]


def sharing(line: IndexLine, values: dict[str | int, str | int]) -> IndexLine:
    """Let a line share its id with other tables, and names of tars and sizes with earlier lines: half its memory.

    `values`: those of earlier lines.
    """
    msgspec.structs.force_setattr(line, "image_id", sys.intern(line.image_id))
    for name in _SHARED:
        value = getattr(line, name)
        msgspec.structs.force_setattr(line, name, values.setdefault(value, value))
    if line.key == line.image_id:
        msgspec.structs.force_setattr(line, "key", line.image_id)
    return line


# Fields of which many lines have the same value.
_SHARED = ("shard", "size", "width", "height")


def read_tombstones(folder: Path) -> list[Tombstone]:
    """Return the tombstones of a set; an absent file means none."""
    path = folder / TOMBSTONES
    return list(_lines(path, Tombstone)) if path.is_file() else []


def live_lines(folder: Path) -> list[IndexLine]:
    """Return the live samples, in order."""
    dead = {tombstone.place for tombstone in read_tombstones(folder)}
    return [line for line in read_index(folder) if line.place not in dead]


def live_places(folder: Path) -> Iterator[SamplePlace]:
    """Yield the places of the live samples, in order: `live_lines` in a quarter of the time.

    Raises:
        ImagemillError: if the index is damaged.
    """
    dead, decoder = {tombstone.place for tombstone in read_tombstones(folder)}, msgspec.json.Decoder(SamplePlace)
    with _index_errors(folder / INDEX):
        for block in read_blocks(folder / INDEX):
            yield from (
                each for each in decoder.decode_lines(block) if not dead or (each.shard, each.offset) not in dead
            )


def entries_by_shard(shards: Iterable[ShardEntry], lines: Iterable[IndexLine]) -> list[tuple[str, list[IndexEntry]]]:
    """Return the name of every tar with its samples, in the order of the lines."""
    entries: dict[str, list[IndexEntry]] = {shard.name: [] for shard in shards}
    for line in lines:
        entries.setdefault(line.shard, []).append(line.entry)
    return list(entries.items())


def _lines(path: Path, kind: type) -> Iterator[Any]:
    with _index_errors(path):
        for number, found in enumerate(read_typed(path, msgspec.json.Decoder(kind)), start=1):
            yield found if isinstance(found, kind) else msgspec.convert(parse_line(number, found).value, kind)


@contextmanager
def _index_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, msgspec.DecodeError) as error:
        raise ImagemillError(
            f"{path.name} cannot be read", where=path, why=str(error), do="run `imagemill shards --overwrite`"
        ) from error


def sample_digest(record: bytes, contents: Iterable[tuple[str, str]]) -> str:
    """Return the digest of one sample, 32 hex digits: of its json member and its files' content fingerprints by kind."""
    files = "".join(f"{kind} {content}\n" for kind, content in contents)
    return hashlib.sha256(record + files.encode()).hexdigest()[:32]


def set_digest(digests: Iterable[str]) -> str:
    """Return a digest of the samples that does not depend on their order.

    In a common shuffle, a new image in one bucket moves the samples of other buckets, but does not change these sets.
    """
    return hashlib.sha256("\n".join(sorted(digests)).encode()).hexdigest()
