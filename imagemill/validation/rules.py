"""The rules, one function per kind of file: lines or members in, findings out.

Each yields `1` per item it has checked and a Finding per broken rule; `findings.collect` adds them up.
Adding a rule: yield it from the function of its kind, and give it a passing and a failing test.
Source: CONTRACTS section 4.
"""

from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from imagemill.buckets import assign_bucket, is_unusual_ratio
from imagemill.embedding_specs import EmbeddingSpec, embedding_specs
from imagemill.errors import ImagemillError, InvalidNpy
from imagemill.formats.jsonl import parse_object, read_jsonl
from imagemill.formats.manifest import sha256_file
from imagemill.formats.npy import NpyStore, parse_npy
from imagemill.formats.tar import IndexEntry, read_sample, read_shard
from imagemill.ids import id_of_member_key
from imagemill.pipeline.recorded import record_id
from imagemill.pipeline.shard_sets import (
    INDEX,
    MANIFEST,
    TOMBSTONES,
    IndexLine,
    read_manifest,
    read_tombstones,
    set_digest,
)
from imagemill.pipeline.shards import JSON_MEMBER, MASK_MEMBER
from imagemill.records import is_stage1, record_problems
from imagemill.validation.findings import Finding

Findings = Iterator[Finding | int]


def stage2_records(jsonl: Path, *, derived: Path | None = None, migrating: bool = False) -> Findings:
    """Every line of a Stage 2 JSONL; with `derived`, every npy is read whole too.

    Args:
        migrating: a record of Stage 1 is no more than a warning: it waits for a pass, a caption or its image.
    """
    seen: dict[str, int] = {}
    stores = [NpyStore(derived / spec.folder, spec) for spec in embedding_specs()] if derived else []
    for line in read_jsonl(jsonl):
        yield 1
        at: dict[str, Any] = {"file": jsonl.name, "line": line.number}
        if line.value is None:
            yield Finding(
                rule="strict_json", message=line.problem or "not a record", remedy="repair or remove the line", **at
            )
            continue
        record = line.value
        if migrating and is_stage1(record):
            message, remedy = (
                "a record of Stage 1, which nothing packs",
                "run imagemill stage2; explain says what it lacks",
            )
            item = record_id(record) or ""
            yield Finding(rule="stage1", item=item, message=message, remedy=remedy, severity="warning", **at)
            continue
        problems = record_problems(record)
        item = str(record.get("image_id", ""))
        for problem in problems:
            yield Finding(
                rule=problem.rule, field=problem.field, message=problem.message, remedy=problem.remedy, item=item, **at
            )
        if isinstance(record.get("image_id"), str):
            if item in seen:
                message = f"also in line {seen[item]}"
                yield Finding(rule="duplicate_id", item=item, message=message, remedy="keep one of them", **at)
            seen[item] = line.number
        if problems:
            continue
        yield from _aspect(record, item, at)
        for store in stores:
            yield from _npy(store, record, at)


def _aspect(record: Mapping[str, Any], item: str, at: dict[str, Any]) -> Findings:
    width, height = record["width"], record["height"]
    if is_unusual_ratio(width, height):
        yield Finding(
            rule="unusual_ratio",
            item=item,
            message=f"{width}x{height}",
            remedy="check the image",
            severity="warning",
            **at,
        )
    nearest = assign_bucket(width, height)
    if nearest != record["aspect_bucket"]:
        yield Finding(
            rule="not_nearest_bucket", item=item, field="aspect_bucket", severity="warning",
            message=f"{record['aspect_bucket']}, nearest is {nearest}", remedy="run imagemill stage2", **at,
        )  # fmt: skip


def _npy(store: NpyStore, record: Mapping[str, Any], at: dict[str, Any]) -> Findings:
    try:
        store.check(record["image_id"], record["height"], record["width"])
    except FileNotFoundError:
        yield Finding(
            rule="missing_file",
            item=record["image_id"],
            field=store.spec.folder,
            message="no npy file",
            remedy="run imagemill stage2, or put the image back if it is gone",
            **at,
        )
    except InvalidNpy as invalid:
        yield Finding(
            rule=invalid.reason,
            item=record["image_id"],
            field=store.spec.folder,
            message=invalid.what,
            remedy=invalid.do or "",
            **at,
        )

    except OSError as error:
        yield Finding(
            rule="read_error",
            item=record["image_id"],
            field=store.spec.folder,
            message=str(error),
            remedy="make the file readable",
            **at,
        )


@dataclass(slots=True)
class _Index:
    """The samples of a set by place; `dead`: places of those that count no more."""

    places: dict[tuple[str, int], IndexLine] = field(default_factory=dict)
    dead: set[tuple[str, int]] = field(default_factory=set)


def shard_set(folder: Path, *, derived: Path | None = None) -> Findings:
    """One bucket's set: manifest, checksums, member order, index agreement; with `derived`, npy members equal to the files."""
    manifest = read_manifest(folder)
    if manifest is None:
        yield Finding(
            file=folder.name, rule="manifest", message="no manifest of ours", remedy="run imagemill shards --overwrite"
        )
        return
    index = yield from _index(folder, manifest)
    for shard in manifest["shards"]:
        path = folder / shard["name"]
        if not path.is_file():
            yield Finding(
                file=f"{folder.name}/{path.name}",
                rule="missing_shard",
                message="named by the manifest, not there",
                remedy=_REPACK,
            )
            continue
        yield from _shard(path, shard, index, manifest, derived)
    extra = {tar.name for tar in folder.glob("*.tar")} - {shard["name"] for shard in manifest["shards"]}
    for name in sorted(extra):
        yield Finding(
            file=f"{folder.name}/{name}",
            rule="foreign_shard",
            message="not named by the manifest",
            remedy="move it away",
        )
    if index.places:
        yield Finding(
            file=f"{folder.name}/{INDEX}",
            rule="index",
            item=index.places[min(index.places)].image_id,
            message=f"{len(index.places)} entries without a sample",
            remedy=_REPACK,
        )


_REPACK = "run imagemill shards --overwrite"


def _index(folder: Path, manifest: Mapping[str, Any]) -> Generator[Finding, None, _Index]:
    """The index by place; its lines that are none are findings, and so is a manifest that counts otherwise."""
    at: dict[str, Any] = {"file": f"{folder.name}/{INDEX}", "rule": "index", "remedy": _REPACK}
    if not (folder / INDEX).is_file():
        yield Finding(message="no index", **at)
        return _Index()
    index = _Index(dead=(yield from _tombstones(folder)))
    live: dict[str, IndexLine] = {}
    for line in read_jsonl(folder / INDEX):
        try:
            entry = msgspec.convert(line.value, IndexLine)
        except msgspec.ValidationError as error:
            yield Finding(line=line.number, message=line.problem or str(error), **at)
            continue
        counts = entry.place not in index.dead
        twice = entry.place in index.places or (counts and entry.image_id in live)
        if twice or entry.image_id != id_of_member_key(entry.key):
            yield Finding(line=line.number, item=entry.image_id, message="a sample twice, or of another id", **at)
        index.places[entry.place] = entry
        if counts:
            live[entry.image_id] = entry
    for shard, offset in sorted(index.dead - index.places.keys()):
        yield Finding(message=f"a tombstone for {shard} at {offset}, where no sample is", **at)
    if (manifest["samples"], manifest["digest"]) != (len(live), set_digest(entry.digest for entry in live.values())):
        at = {**at, "file": f"{folder.name}/{MANIFEST}", "rule": "live_samples"}
        yield Finding(message=f"says {manifest['samples']} samples, {len(live)} count or others do", **at)
    return index


def _tombstones(folder: Path) -> Generator[Finding, None, set[tuple[str, int]]]:
    try:
        return {tombstone.place for tombstone in read_tombstones(folder)}
    except ImagemillError as error:
        yield Finding(file=f"{folder.name}/{TOMBSTONES}", rule="tombstones", message=str(error.why), remedy=_REPACK)
        return set()


def _is_at(path: Path, place: IndexLine, key: str, members: Mapping[str, bytes]) -> bool:
    if place.key != key or place.offset + place.size > path.stat().st_size:
        return False
    try:
        return read_sample(path, IndexEntry(key, place.offset, place.size)) == members
    except ImagemillError:
        return False


def _shard(
    path: Path, shard: Mapping[str, Any], index: _Index, manifest: Mapping[str, Any], derived: Path | None
) -> Findings:
    name = f"{path.parent.name}/{path.name}"
    expected = {place.key: place for place in index.places.values() if place.shard == path.name}
    if sha256_file(path) != shard["sha256"]:
        yield Finding(file=name, rule="checksum", message="bytes differ from the manifest's sha256", remedy=_REPACK)
    samples = 0
    try:
        for key, members in read_shard(path):
            yield 1
            samples += 1
            at: dict[str, Any] = {"file": name, "item": id_of_member_key(key)}
            place = expected.get(key)
            if place is None or not _is_at(path, place, key, members):
                yield Finding(rule="index", message="not where the index says", remedy=_REPACK, **at)
            counts = place is None or index.places.pop(place.place).place not in index.dead
            if list(members) != manifest["members"]:
                yield Finding(rule="members", message=f"{', '.join(members)}", remedy=_REPACK, **at)
                continue
            yield from _members(members, derived if counts else None, at)
    except ImagemillError as error:
        yield Finding(file=name, rule="unreadable", message=error.what, remedy=_REPACK)
    if samples != shard["samples"]:
        yield Finding(
            file=name, rule="count", message=f"{samples} samples, manifest says {shard['samples']}", remedy=_REPACK
        )


def _members(members: Mapping[str, bytes], derived: Path | None, at: dict[str, Any]) -> Findings:
    record = parse_object(members[JSON_MEMBER])
    if record is None or record_problems(record) or record["image_id"] != at["item"]:
        message = "not a valid Stage 2 record of this sample"
        yield Finding(rule="record", field=JSON_MEMBER, message=message, remedy=_REPACK, **at)
        return
    if problem := _mask_problem(members[MASK_MEMBER], record["t5_attention_mask"]):
        yield Finding(rule="mask", field=MASK_MEMBER, message=problem, remedy=_REPACK, **at)
    for spec in embedding_specs():
        if problem := _npy_problem(members[spec.member], spec, record):
            yield Finding(rule="npy", field=spec.member, message=problem, remedy=_REPACK, **at)
        if derived and _differs(derived / spec.folder / f"{at['item']}.npy", members[spec.member]):
            yield Finding(
                rule="verbatim", field=spec.member, message="not the bytes of the file on disk", remedy=_REPACK, **at
            )


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
