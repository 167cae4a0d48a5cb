"""Shards of one bucket: manifest, checksums, member order, index agreement; npy members against the files on disk.

Belongs here: one bucket's folder.
Belongs elsewhere: reading tars (formats/tar.py), what is known of a set (pipeline/shards/shard_sets.py).
Source: seed 001; CONTRACTS sections 2 and 4.
"""

from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from imagemill.embedding_specs import EmbeddingSpec, embedding_specs
from imagemill.errors import ImagemillError, InvalidNpy
from imagemill.files import fingerprint_file
from imagemill.formats.jsonl import parse_object, read_jsonl
from imagemill.formats.npy import parse_npy
from imagemill.formats.tar import IndexEntry, read_sample, read_shard
from imagemill.ids import id_of_member_key
from imagemill.pipeline.shards.shard_sets import (
    INDEX,
    JSON_MEMBER,
    MANIFEST,
    MASK_MEMBER,
    TOMBSTONES,
    IndexLine,
    read_manifest,
    read_tombstones,
    set_digest,
)
from imagemill.records import record_problems
from imagemill.validation.catalogue import RULES, finding
from imagemill.validation.findings import Finding
from imagemill.validation.lines import Findings


@dataclass(slots=True)
class _Index:
    """The samples of a set by place; `dead`: places of those that count no more."""

    places: dict[tuple[str, int], IndexLine] = field(default_factory=dict)
    dead: set[tuple[str, int]] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class _Compared:
    """Which npy members to hold against the files below `derived`; `first`: how many samples of each tar, None: all."""

    derived: Path | None
    first: int | None

    def folder(self, nth: int) -> Path | None:
        return self.derived if self.first is None or nth <= self.first else None


def shard_set(folder: Path, *, derived: Path | None = None, sample: int | None = None) -> Findings:
    """One bucket's set. Every tar is read whole; with `derived`, npy members are compared with the files there too.

    Args:
        sample: of each tar, compare this many samples, the first ones; None or less than 1: all.
    """
    manifest = read_manifest(folder)
    if manifest is None:
        yield finding("manifest", "no manifest of ours", file=folder.name)
        return
    index = yield from _index(folder, manifest)
    compared = _Compared(derived, sample if sample and sample > 0 else None)
    for shard in manifest["shards"]:
        path = folder / shard["name"]
        if path.is_file():
            yield from _shard(path, shard, index, manifest, compared)
        else:
            yield finding("missing_shard", "named by the manifest, not there", file=f"{folder.name}/{path.name}")
    extra = {tar.name for tar in folder.glob("*.tar")} - {shard["name"] for shard in manifest["shards"]}
    for name in sorted(extra):
        yield finding("foreign_shard", "not named by the manifest", file=f"{folder.name}/{name}")
    if index.places:
        item, message = index.places[min(index.places)].image_id, f"{len(index.places)} entries without a sample"
        yield finding("index", message, file=f"{folder.name}/{INDEX}", item=item)


def _index(folder: Path, manifest: Mapping[str, Any]) -> Generator[Finding, None, _Index]:
    """The index by place; its lines that are none are findings, and so is a manifest that counts otherwise."""
    file = f"{folder.name}/{INDEX}"
    if not (folder / INDEX).is_file():
        yield finding("index", "no index", file=file)
        return _Index()
    index = _Index(dead=(yield from _tombstones(folder)))
    live: dict[str, IndexLine] = {}
    for line in read_jsonl(folder / INDEX):
        try:
            entry = msgspec.convert(line.value, IndexLine)
        except msgspec.ValidationError as error:
            yield finding("index", line.problem or str(error), file=file, line=line.number)
            continue
        counts = entry.place not in index.dead
        twice = entry.place in index.places or (counts and entry.image_id in live)
        if twice or entry.image_id != id_of_member_key(entry.key):
            message = "a sample twice, or of another id"
            yield finding("index", message, file=file, line=line.number, item=entry.image_id)
        index.places[entry.place] = entry
        if counts:
            live[entry.image_id] = entry
    for shard, offset in sorted(index.dead - index.places.keys()):
        message = f"one for {shard} at {offset}, where no sample is"
        yield finding("tombstones", message, file=f"{folder.name}/{TOMBSTONES}")
    if (manifest["samples"], manifest["digest"]) != (len(live), set_digest(entry.digest for entry in live.values())):
        message = f"says {manifest['samples']} samples, {len(live)} count or others do"
        yield finding("live_samples", message, file=f"{folder.name}/{MANIFEST}")
    return index


def _tombstones(folder: Path) -> Generator[Finding, None, set[tuple[str, int]]]:
    try:
        return {tombstone.place for tombstone in read_tombstones(folder)}
    except ImagemillError as error:
        yield finding("tombstones", str(error.why), file=f"{folder.name}/{TOMBSTONES}")
        return set()


def _is_at(path: Path, place: IndexLine, key: str, members: Mapping[str, bytes]) -> bool:
    if place.key != key or place.offset + place.size > path.stat().st_size:
        return False
    try:
        return read_sample(path, IndexEntry(key, place.offset, place.size)) == members
    except ImagemillError:
        return False


def _shard(
    path: Path, shard: Mapping[str, Any], index: _Index, manifest: Mapping[str, Any], compared: _Compared
) -> Findings:
    name = f"{path.parent.name}/{path.name}"
    expected = {place.key: place for place in index.places.values() if place.shard == path.name}
    if fingerprint_file(path) != shard["checksum"]:
        yield finding("checksum", "bytes differ from the manifest's checksum", file=name)
    samples = 0
    try:
        for key, members in read_shard(path):
            yield 1
            samples += 1
            at: dict[str, Any] = {"file": name, "item": id_of_member_key(key)}
            place = expected.get(key)
            if place is None or not _is_at(path, place, key, members):
                yield finding("index", "not where the index says", **at)
            counts = place is None or index.places.pop(place.place).place not in index.dead
            if list(members) != manifest["members"]:
                yield finding("members", ", ".join(members), **at)
                continue
            yield from _members(members, compared.folder(samples) if counts else None, at)
    except ImagemillError as error:
        yield finding("unreadable", error.what, file=name, remedy=RULES["checksum"].remedy)
    if samples != shard["samples"]:
        yield finding("count", f"{samples} samples, manifest says {shard['samples']}", file=name)


def _members(members: Mapping[str, bytes], derived: Path | None, at: dict[str, Any]) -> Findings:
    record = parse_object(members[JSON_MEMBER])
    if record is None or record_problems(record) or record["image_id"] != at["item"]:
        yield finding("record", "not a valid Stage 2 record of this sample", field=JSON_MEMBER, **at)
        return
    if problem := _mask_problem(members[MASK_MEMBER], record["t5_attention_mask"]):
        yield finding("mask", problem, field=MASK_MEMBER, remedy=RULES["record"].remedy, **at)
    for spec in embedding_specs():
        if problem := _npy_problem(members[spec.member], spec, record):
            yield finding("npy", problem, field=spec.member, **at)
        if derived and _differs(derived / spec.folder / f"{at['item']}.npy", members[spec.member]):
            yield finding("verbatim", "not the bytes of the file on disk", field=spec.member, **at)


def _differs(path: Path, data: bytes) -> bool:
    return path.is_file() and path.read_bytes() != data


def _mask_problem(data: bytes, mask: list[int]) -> str | None:
    try:
        array = parse_npy(data)
    except InvalidNpy as invalid:
        return invalid.what
    return None if array.dtype == np.uint8 and array.tolist() == mask else "not the record's mask"


def _npy_problem(data: bytes, spec: EmbeddingSpec, record: Mapping[str, Any]) -> str | None:
    try:
        array = parse_npy(data)
    except InvalidNpy as invalid:
        return invalid.what
    shape = spec.shape(record["height"], record["width"])
    if array.shape != shape or array.dtype != np.dtype(spec.dtype):
        return f"{array.dtype.str} {array.shape}, expected {spec.dtype} {shape}"
    return None if np.isfinite(array).all() else "NaN or infinity among the values"
