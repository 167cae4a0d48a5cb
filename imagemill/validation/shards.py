"""Validation of one bucket's shards: checksums, order of members, agreement with the index and with the npy files on disk.

The set's documents are compared in shard_documents.py, Energon's files in energon_files.py. Tars are read in
formats/tar.py; the documents of a set are described in pipeline/shards/shard_sets.py.

Spec: docs/spec/shards.md#updating-a-set, docs/spec/validation.md#checks
"""

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from imagemill.domain.embedding_specs import EmbeddingSpec, embedding_specs, mask_length
from imagemill.domain.ids import id_of_member_key
from imagemill.domain.stage2_records import violations
from imagemill.errors import ImagemillError, InvalidNpy, MissingInput
from imagemill.formats.energon import Shard, members_of
from imagemill.formats.jsonl import parse_object
from imagemill.formats.npy import NpyStore, join_npy, parse_npy, split_npy
from imagemill.formats.tar import read_sample, read_shard
from imagemill.fs.fingerprints import fingerprint, fingerprint_file
from imagemill.pipeline.shards.shard_manifest import Manifest, ShardEntry, specs_of_set
from imagemill.pipeline.shards.shard_sets import (
    INDEX,
    JSON_MEMBER,
    MASK_MEMBER,
    IndexLine,
    sample_digest,
)
from imagemill.pipeline.shards.shard_statistics import measures_of, repeats_in
from imagemill.validation.catalogue import RULES, finding
from imagemill.validation.contents import RecordedContents
from imagemill.validation.energon_files import energon_files
from imagemill.validation.findings import Finding
from imagemill.validation.lines import Findings
from imagemill.validation.shard_documents import Index, checked_manifest, documents


@dataclass(frozen=True, slots=True)
class _Compared:
    """The npy members to compare with the files below `derived`; `first`: number of samples of each tar, None: all.

    `contents`: the ledger's rows of the files, to distinguish a damaged file from an outdated tar.
    """

    derived: Path | None
    first: int | None
    contents: RecordedContents | None

    def findings(self, nth: int, members: Mapping[str, bytes], at: dict[str, Any]) -> Iterator[Finding]:
        """Compare the nth sample of a tar; a damaged file is reported itself, because the tar may contain the last good copy."""
        if self.derived is None or (self.first is not None and nth > self.first):
            return
        for spec in embedding_specs():
            if spec.members[0] not in members:  # a kind that was added to the data root since
                continue
            if self.contents and spec.kind in self.contents.regenerating:
                continue
            store = NpyStore(self.derived / spec.folder, spec)
            path = store.path(at["item"])
            if path.is_file() and not _holds(members, path, spec):
                damage = self.contents.find_damage(store, at["item"]) if self.contents else None
                yield damage or finding("verbatim", "not the bytes of the file on disk", field=spec.member, **at)


def _holds(members: Mapping[str, bytes], path: Path, spec: EmbeddingSpec) -> bool:
    """Return whether the members of a kind are those of its file."""
    try:
        expected = split_npy(path.read_bytes(), spec)
    except InvalidNpy:
        return False
    return all(members.get(member) == data for member, data in expected)


@dataclass(frozen=True, slots=True)
class ElsewhereTars:
    """The tars of a set whose folder has only its documents.

    Attributes:
        fetch: copies the tar with a name to a file. Raises MissingInput.
        names: path of each tar as Energon's files give it, by its name in the manifest.
    """

    fetch: Callable[[str, Path], None]
    names: Mapping[str, str]

    @contextmanager
    def fetched(self, path: Path) -> Iterator[bool]:
        """Put a tar into place while the block runs; yield whether it exists."""
        try:
            with suppress(MissingInput):
                self.fetch(path.name, path)
            yield path.is_file()
        finally:
            path.unlink(missing_ok=True)


_T = TypeVar("_T")

# After any of these findings, the expected Energon files cannot be determined.
_GROUND = {"index", "tombstones", "missing_shard", "checksum", "unreadable"}


def shard_set(
    folder: Path,
    *,
    derived: Path | None = None,
    sample: int | None = None,
    contents: RecordedContents | None = None,
    elsewhere: ElsewhereTars | None = None,
) -> Findings:
    """Check one bucket's set.

    Every tar is read in full. With `derived`, npy members are also compared with the files on disk.

    Args:
        folder: the set.
        derived: parent of the npy folders.
        sample: number of samples of each tar to compare, from its start; None or less than 1: all.
        contents: the ledger's rows of the files below `derived`.
        elsewhere: the tars, if they are not in the folder. One at a time is fetched into it.
    """
    folder = folder.absolute()  # `.` has no name
    manifest = yield from checked_manifest(folder)
    if manifest is None:
        return
    broken: set[str] = set()
    index = yield from _noting(broken, documents(folder, manifest))
    shards = index.shards(manifest)
    compared = _Compared(derived, sample if sample and sample > 0 else None, contents)
    yield from _noting(broken, _tars(folder, index, manifest, compared, shards, elsewhere))
    if not broken & _GROUND:
        names = elsewhere.names if elsewhere else None
        yield from energon_files(folder, folder.name.removeprefix("bucket_"), shards, index.dead, names)


def _noting(broken: set[str], findings: Generator[Finding | int, None, _T]) -> Generator[Finding | int, None, _T]:
    """Pass findings through and collect their rules in `broken`."""
    try:
        while True:
            found = next(findings)
            if isinstance(found, Finding):
                broken.add(found.rule)
            yield found
    except StopIteration as end:
        return end.value


def _tars(
    folder: Path,
    index: Index,
    manifest: Manifest,
    compared: _Compared,
    shards: list[Shard],
    elsewhere: ElsewhereTars | None,
) -> Generator[Finding | int, None, None]:
    """Check every tar. With `elsewhere`, the entries of `shards` get their members, because the tars do not stay."""
    for n, shard in enumerate(manifest.shards):
        path = folder / shard.name
        with elsewhere.fetched(path) if elsewhere else nullcontext(path.is_file()) as is_there:
            if not is_there:
                yield finding("missing_shard", "named by the manifest, but missing", file=f"{folder.name}/{path.name}")
                continue
            yield from _shard(path, shard, index, manifest, compared)
            if elsewhere:
                with suppress(ImagemillError):  # its sample is not where the index says, which is a finding
                    shards[n] = (shard.name, [each.with_members(members_of(path, each)) for each in shards[n][1]])
    extra = {tar.name for tar in folder.glob("*.tar")} - {shard.name for shard in manifest.shards}
    for name in sorted(extra):
        yield finding("foreign_shard", "not named by the manifest", file=f"{folder.name}/{name}")
    if index.places:
        item, message = index.places[min(index.places)].image_id, f"{len(index.places)} entries without a sample"
        yield finding("index", message, file=f"{folder.name}/{INDEX}", item=item)


def _is_at(path: Path, place: IndexLine, key: str, members: Mapping[str, bytes]) -> bool:
    try:
        return place.key == key and read_sample(path, place.entry) == members
    except ImagemillError:
        return False


def _shard(path: Path, shard: ShardEntry, index: Index, manifest: Manifest, compared: _Compared) -> Findings:
    name = f"{path.parent.name}/{path.name}"
    expected = {place.key: place for place in index.places.values() if place.shard == path.name}
    if fingerprint_file(path) != shard.checksum:
        yield finding("checksum", "bytes differ from the manifest's checksum", file=name)
    samples, seen, specs = 0, set[str](), specs_of_set(manifest)
    try:
        for key, members in read_shard(path):
            yield 1
            samples += 1
            at: dict[str, Any] = {"file": name, "item": id_of_member_key(key)}
            place = expected.pop(key, None)
            if place is None or not _is_at(path, place, key, members):
                message = "a second sample of this id in the tar" if key in seen else "not at the position in the index"
                yield finding("index", message, **at)
            seen.add(key)
            counts = place is None or index.places.pop(place.place).place not in index.dead
            if list(members) != manifest.members:
                yield finding("members", ", ".join(members), **at)
                continue
            yield from _sample(members, place, at, specs)
            if counts:
                yield from compared.findings(samples, members, at)
    except ImagemillError as error:
        yield finding("unreadable", error.what, file=name, remedy=RULES["checksum"].remedy)
    for what, count, expected_count in (
        ("samples", samples, shard.samples), ("bytes", path.stat().st_size, shard.bytes),
    ):  # fmt: skip
        if count != expected_count:
            yield finding("count", f"{count} {what}, the manifest records {expected_count}", file=name)


def _sample(
    members: Mapping[str, bytes], place: IndexLine | None, at: dict[str, Any], specs: Sequence[EmbeddingSpec]
) -> Findings:
    record = parse_object(members[JSON_MEMBER])
    if record is None or violations(record, mask_length(specs)) or record["image_id"] != at["item"]:
        yield finding("record", "not a valid Stage 2 record of this sample", field=JSON_MEMBER, **at)
        return
    if f"bucket_{record['aspect_bucket']}" != Path(at["file"]).parent.name:
        yield finding("set_bucket", f"of {record['aspect_bucket']}", field=JSON_MEMBER, **at)
    broken = list(_arrays(members, record, at, specs))
    yield from broken
    if not broken and place and (problem := _indexed_otherwise(place, members, record, specs)):
        yield finding("indexed", problem, **at)


def _arrays(
    members: Mapping[str, bytes], record: Mapping[str, Any], at: dict[str, Any], specs: Sequence[EmbeddingSpec]
) -> Iterator[Finding]:
    if problem := _mask_problem(members[MASK_MEMBER], record["t5_attention_mask"]):
        yield finding("mask", problem, field=MASK_MEMBER, remedy=RULES["record"].remedy, **at)
    for spec in specs:
        for member, shape in spec.shapes(record["height"], record["width"]).items():
            if problem := _npy_problem(members[member], shape, spec.dtype):
                yield finding("npy", problem, field=member, **at)


def _indexed_otherwise(
    place: IndexLine, members: Mapping[str, bytes], record: Mapping[str, Any], specs: Sequence[EmbeddingSpec]
) -> str | None:
    """Return a difference between index and sample; sets of earlier releases have no measures.

    The digest names the kinds, so it is not compared if a kind of the set is not installed.
    """
    recorded = (place.width, place.height, place.tokens)
    if recorded != (0, 0, 0) and recorded != measures_of(members[JSON_MEMBER], record["t5_attention_mask"]):
        return f"the index has width, height, tokens {recorded}"
    if (place.repeats or 1) != (repeats := repeats_in(members[JSON_MEMBER])):
        return f"the index has {place.repeats or 1} repeats, the record {repeats}"
    contents = ((spec.kind, fingerprint(join_npy(members, spec) or b"")) for spec in specs)
    if sum(len(spec.members) for spec in specs) + len((JSON_MEMBER, MASK_MEMBER)) < len(members):
        return None
    return None if place.digest == sample_digest(members[JSON_MEMBER], contents) else "the index has another digest"


def _mask_problem(data: bytes, mask: list[int]) -> str | None:
    try:
        array = parse_npy(data)
    except InvalidNpy as invalid:
        return invalid.what
    return None if array.dtype == np.uint8 and array.tolist() == mask else "not the record's mask"


def _npy_problem(data: bytes, shape: tuple[int, ...], dtype: str) -> str | None:
    try:
        array = parse_npy(data)
    except InvalidNpy as invalid:
        return invalid.what
    if array.shape != shape or array.dtype != np.dtype(dtype):
        return f"{array.dtype.str} {array.shape}, expected {dtype} {shape}"
    return None if np.isfinite(array).all() else "NaN or infinity among the values"
