"""Samples into tars, bucket by bucket, a whole set at a time.

A set is written beside its place and changes places with the old one in a single step, so a reader sees the complete old set
or the complete new one. Appending does the same: the tars that stay come along by hardlink.

Belongs here: order, grouping, limits, conflicts, publication.
Belongs elsewhere: what a set is on disk (shard_sets.py), what appending changes (append.py), the bytes of a tar
(formats/tar.py), what may be packed (readiness.py).
Source: seed 001; CONTRACTS section 2.
"""

import functools
import itertools
import os
import random
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import msgspec
import numpy as np

from imagemill.atomic import is_orphan, sync_folder, temporaries, temporary_path
from imagemill.buckets import BUCKETS
from imagemill.embedding_specs import embedding_specs
from imagemill.errors import ShardExists, WrongUsage, disk_full_told
from imagemill.files import RunningFingerprint
from imagemill.formats.energon import META, SQLITE, is_energon, write_energon
from imagemill.formats.jsonl import write_jsonl
from imagemill.formats.manifest import write_json
from imagemill.formats.tar import IndexEntry, KnownFile, Sample, write_shard
from imagemill.ids import member_key
from imagemill.pipeline.append import Overlay, lay_over
from imagemill.pipeline.readiness import ReadySample
from imagemill.pipeline.shard_sets import (
    FORMAT,
    INDEX,
    MANIFEST,
    TOMBSTONES,
    IndexLine,
    ShardParameters,
    agrees,
    bucket_folder,
    read_index,
    read_manifest,
    read_tombstones,
    recorded_parameters,
    sample_digest,
    set_digest,
    shard_name,
)
from imagemill.pipeline.shard_statistics import measures_of, statistics_of
from imagemill.provenance import UNKNOWN, ModelIdentity
from imagemill.swap import replace_folder

JSON_MEMBER = "json"
MASK_MEMBER = "t5m.npy"

# What to do about shards that are there: refuse them; replace them; bring sets of ours up to date, whole (`update`, and
# `repack`, which also folds in what was appended) or by new tars and tombstones (`append`, and `withdraw`, which does nothing
# but withdrawals).
Existing = Literal["refuse", "replace", "update", "repack", "append", "withdraw"]
OVERLAYS = {"append", "withdraw"}

# What a set has besides its tars.
OURS = {INDEX, TOMBSTONES, MANIFEST}


@dataclass(frozen=True, slots=True)
class BucketPlan:
    """One bucket's set: its samples shard by shard, a digest that says whether one changed, what it was planned with.

    `overlay`: where the set stays, what changes; `shards` are then the new ones.
    """

    bucket: str
    shards: tuple[tuple[ReadySample, ...], ...]
    digest: str
    parameters: ShardParameters
    overlay: Overlay | None = None

    @property
    def samples(self) -> int:
        """Samples that this plan writes."""
        return sum(map(len, self.shards))

    @property
    def live(self) -> int:
        """Samples that count afterwards."""
        return self.samples + (len(self.overlay.live) if self.overlay else 0)


@dataclass(slots=True)
class BucketResult:
    """What became of one bucket. `samples`, `shards`, `bytes`: of its whole set; `new_samples`, `new_shards`: written now."""

    bucket: str
    status: Literal["written", "unchanged", "removed", "empty"]
    new_samples: int = 0
    new_shards: int = 0
    tombstones: int = 0
    samples: int = 0
    shards: int = 0
    bytes: int = 0


@dataclass(slots=True)
class ShardSet:
    """All chosen buckets of one run, planned. `workers`: tars written at a time."""

    output: Path
    plans: list[BucketPlan] = field(default_factory=list)
    existing: Existing = "refuse"
    workers: int = 1


def check_buckets(buckets: Iterable[str]) -> list[str]:
    """The chosen buckets in the seed's order; another name is refused before anything touches a path."""
    chosen = set(buckets)
    if unknown := sorted(chosen - set(BUCKETS)):
        raise WrongUsage(f"unknown bucket {unknown[0]!r}", do=f"choose from {', '.join(BUCKETS)}")
    return [bucket for bucket in BUCKETS if bucket in chosen]


def plan_shards(
    ready: Sequence[ReadySample],
    buckets: Sequence[str],
    output: Path,
    parameters: ShardParameters,
    existing: Existing = "refuse",
    *,
    as_recorded: bool = False,
    withdrawn: Set[str] = frozenset(),
) -> ShardSet:
    """Choose buckets, shuffle, limit, group, cut: in this order (seed 001, "Limit applies after shuffle").

    Args:
        as_recorded: a bucket that has a set of ours keeps the parameters of its manifest: bringing a shuffled or limited
            set up to date must not undo that. Buckets of equal parameters were, and are, shuffled and limited together.
        withdrawn: ids that somebody took out; they are not among the ready ones.

    Raises:
        WrongUsage: an unknown `existing`.
    """
    if existing not in get_args(Existing):
        raise WrongUsage(f"unknown existing={existing!r}", do=f"choose from {', '.join(get_args(Existing))}")
    groups: dict[ShardParameters, list[str]] = {}
    for bucket in buckets:
        recorded = recorded_parameters(bucket_folder(output, bucket)) if as_recorded else None
        groups.setdefault(recorded or parameters, []).append(bucket)
    plans = [plan for given, group in groups.items() for plan in _plan_group(ready, group, given)]
    if existing in OVERLAYS:
        plans = [_laid_over(plan, bucket_folder(output, plan.bucket), existing, withdrawn) for plan in plans]
    return ShardSet(output, sorted(plans, key=lambda plan: list(buckets).index(plan.bucket)), existing)


def _laid_over(plan: BucketPlan, folder: Path, existing: Existing, withdrawn: Set[str]) -> BucketPlan:
    """The plan as a change of the set that is there; without one, the plan itself, or nothing where only withdrawals count."""
    if read_manifest(folder) is None:
        return plan if existing == "append" else BucketPlan(plan.bucket, (), "", plan.parameters)
    by_id = {sample.image_id: sample for shard in plan.shards for sample in shard}
    overlay = lay_over(
        read_index(folder), read_tombstones(folder), {i: digest_of(sample) for i, sample in by_id.items()}, withdrawn,
        withdrawals_only=existing == "withdraw",
    )  # fmt: skip
    new = [by_id[image_id] for image_id in overlay.missing]
    digest = set_digest([*overlay.live, *map(digest_of, new)])
    return BucketPlan(plan.bucket, _cut(new, plan.parameters.shard_size), digest, plan.parameters, overlay)


def _cut(samples: Sequence[ReadySample], size: int) -> tuple[tuple[ReadySample, ...], ...]:
    return tuple(tuple(samples[i : i + size]) for i in range(0, len(samples), size))


def _plan_group(
    ready: Sequence[ReadySample], buckets: Sequence[str], parameters: ShardParameters
) -> Iterator[BucketPlan]:
    members = set(buckets)
    chosen = [sample for sample in ready if sample.bucket in members]
    if parameters.shuffle:
        random.Random(parameters.seed).shuffle(chosen)
    chosen = chosen[: parameters.limit]
    for bucket in buckets:
        samples = [sample for sample in chosen if sample.bucket == bucket]
        shards = _cut(samples, parameters.shard_size)
        yield BucketPlan(bucket, shards, set_digest(map(digest_of, samples)), parameters)


def digest_of(sample: ReadySample) -> str:
    return sample_digest(sample.record, ((file.kind, file.content) for file in sample.files))


# ---- conflicts


def conflicts(shard_set: ShardSet) -> list[str]:
    """Why these buckets may not be written, looked for in every one before a byte is."""
    return [problem for plan in shard_set.plans if (problem := _conflict(shard_set, plan))]


def _conflict(shard_set: ShardSet, plan: BucketPlan) -> str | None:
    folder = bucket_folder(shard_set.output, plan.bucket)
    tars = sorted(folder.glob("*.tar")) if folder.is_dir() else []
    if not tars or shard_set.existing == "replace":
        return None
    if shard_set.existing == "refuse":
        return f"{folder.name}/{tars[0].name} exists"
    manifest = read_manifest(folder)
    if manifest is None:
        return f"{folder.name} holds shards without our manifest"
    return None if agrees(folder, manifest) else f"{folder.name}: the tars are not those of its manifest"


def refuse_conflicts(shard_set: ShardSet) -> None:
    """Raises ShardExists listing every conflict."""
    if found := conflicts(shard_set):
        raise ShardExists(
            f"shards are already there: {found[0]}"
            + (f" (and {len(found) - 1} more buckets)" if len(found) > 1 else ""),
            where=shard_set.output,
            why="existing shards are never replaced unless asked",
            do="`imagemill shards --overwrite` replaces each chosen bucket's whole set",
        )


# ---- writing


def write_bucket(
    shard_set: ShardSet,
    plan: BucketPlan,
    derived: Path,
    identities: Mapping[str, ModelIdentity],
    *,
    on_sample: Callable[[int], None] = lambda size: None,
) -> BucketResult:
    """Write one bucket's set beside its place, then put it there at once. Call `refuse_conflicts` first.

    Args:
        derived: folder of the npy folders. identities: recorded maker of each kind. on_sample: called with each sample's bytes,
            on several threads.

    Raises:
        DiskFull: the old set is where it was.
    """
    folder = bucket_folder(shard_set.output, plan.bucket)
    sweep_sets(shard_set.output)
    manifest = read_manifest(folder)
    if manifest and _stays(shard_set.existing, folder, manifest, plan):
        return _result(plan, "unchanged", manifest)
    if not plan.live:
        return _remove(folder, plan)
    if manifest is None and shard_set.existing == "withdraw":
        return BucketResult(plan.bucket, "empty")
    staging = temporary_path(shard_set.output)
    try:
        with disk_full_told(folder):
            staging.mkdir(parents=True)
            _carry_foreign(folder, staging)
            manifest = _write_set(staging, folder, plan, derived, identities, on_sample, shard_set.workers)
            replace_folder(staging, folder)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return _result(plan, "written", manifest)


def _stays(existing: Existing, folder: Path, manifest: Mapping[str, Any], plan: BucketPlan) -> bool:
    """Whether a set is what the plan wants already."""
    if not (agrees(folder, manifest) and (folder / INDEX).is_file() and (folder / META / SQLITE).is_file()):
        return False
    if plan.overlay:
        return not plan.shards and list(plan.overlay.tombstones) == read_tombstones(folder)
    same = (manifest["digest"], manifest["parameters"]) == (plan.digest, msgspec.to_builtins(plan.parameters))
    folded = not (manifest["appended"] or manifest["tombstones"])
    return same and (existing == "update" or (existing == "repack" and folded))


def _result(plan: BucketPlan, status: Literal["written", "unchanged"], manifest: Mapping[str, Any]) -> BucketResult:
    shards = manifest["shards"]
    new = (plan.samples, len(plan.shards)) if status == "written" else (0, 0)
    total = sum(shard["bytes"] for shard in shards)
    return BucketResult(plan.bucket, status, *new, manifest["tombstones"], manifest["samples"], len(shards), total)


def sweep_sets(output: Path) -> None:
    """Remove sets that dead runs left beside their place."""
    for path in temporaries(output):
        if is_orphan(path):
            shutil.rmtree(path, ignore_errors=True)


def _remove(folder: Path, plan: BucketPlan) -> BucketResult:
    """A bucket without samples ends with no set: it leaves its place in one step too."""
    if not folder.is_dir():
        return BucketResult(plan.bucket, "empty")
    staging = temporary_path(folder.parent)
    staging.mkdir()
    _carry_foreign(folder, staging)
    if any(staging.iterdir()):
        replace_folder(staging, folder)
    else:
        staging.rmdir()
        folder.rename(staging)
        sync_folder(folder.parent)
    shutil.rmtree(staging, ignore_errors=True)
    return BucketResult(plan.bucket, "removed")


def _carry_foreign(folder: Path, staging: Path) -> None:
    """What is not part of a set is not ours to delete: it comes along. Tars that are not the set's do not."""
    for path in folder.iterdir() if folder.is_dir() else ():
        if path.name in OURS or path.suffix == ".tar" or is_energon(path.name):
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.copytree(path, staging / path.name, symlinks=True, copy_function=_link)
        else:
            _link(path, staging / path.name)


def _link(source: str | Path, target: str | Path) -> None:
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:  # a file system without links
        shutil.copy2(source, target, follow_symlinks=False)


def _write_set(
    folder: Path,
    old: Path,
    plan: BucketPlan,
    derived: Path,
    identities: Mapping[str, ModelIdentity],
    on_sample: Callable[[int], None],
    threads: int,
) -> dict[str, Any]:
    """Everything of a set: tars that stay, new tars, index, tombstones, and the manifest last."""
    before = read_manifest(old) if plan.overlay else None
    kept: list[dict[str, Any]] = before["shards"] if before else []
    for shard in kept:
        _link(old / shard["name"], folder / shard["name"])
    first = 1 + max((int(shard["name"][len("shard-") : -len(".tar")]) for shard in kept), default=-1)
    write = functools.partial(_write_one, folder, derived=derived, on_sample=on_sample)
    with ThreadPoolExecutor(threads, "pack") as pool:
        written = list(pool.map(write, itertools.count(first), plan.shards))
    earlier = read_index(old) if before else []
    index = [*earlier, *(line for shard in written for line in shard.lines)]
    write_jsonl(folder / INDEX, index)
    tombstones = plan.overlay.tombstones if plan.overlay else ()
    if tombstones:
        write_jsonl(folder / TOMBSTONES, tombstones)
    dead = {tombstone.place for tombstone in tombstones}
    shards = [*_entries_of(kept, earlier), *((shard.told["name"], shard.entries) for shard in written)]
    write_energon(folder, shards, bucket=plan.bucket, dead=dead, earlier=old if before else None)
    manifest = {
        "format": FORMAT,
        "bucket": plan.bucket,
        "digest": plan.digest,
        "samples": plan.live,
        "tombstones": len(tombstones),
        "appended": before is not None,
        "members": [JSON_MEMBER, *(spec.member for spec in embedding_specs()), MASK_MEMBER],
        "shards": [*kept, *(shard.told for shard in written)],
        "statistics": statistics_of(line for line in index if line.place not in dead),
        "parameters": msgspec.to_builtins(plan.parameters),
        "provenance": {
            spec.kind: _provenance(spec.kind, n, plan, identities, before) for n, spec in enumerate(embedding_specs())
        },
    }
    write_json(folder / MANIFEST, manifest)
    return manifest


def _entries_of(shards: Sequence[Mapping[str, Any]], lines: Sequence[IndexLine]) -> list[tuple[str, list[IndexEntry]]]:
    entries: dict[str, list[IndexEntry]] = {shard["name"]: [] for shard in shards}
    for line in lines:
        entries[line.shard].append(IndexEntry(line.key, line.offset, line.size))
    return list(entries.items())


class _Written(NamedTuple):
    """One new tar: `told` is its entry in the manifest."""

    entries: list[IndexEntry]
    lines: list[IndexLine]
    told: dict[str, Any]


def _write_one(
    folder: Path,
    number: int,
    samples: Sequence[ReadySample],
    *,
    derived: Path,
    on_sample: Callable[[int], None],
) -> _Written:
    path, checksum = folder / shard_name(number), RunningFingerprint()
    entries = write_shard(path, _members(samples, derived, on_sample), checksum=checksum)
    lines = [
        IndexLine(
            sample.image_id, entry.key, path.name, entry.offset, entry.size, digest_of(sample),
            *measures_of(sample.record, sample.mask),
        )
        for sample, entry in zip(samples, entries, strict=True)
    ]  # fmt: skip
    size = path.stat().st_size
    told = {"name": path.name, "samples": len(samples), "bytes": size, "checksum": str(checksum)}
    return _Written(entries, lines, told)


def _members(samples: Sequence[ReadySample], derived: Path, on_sample: Callable[[int], None]) -> Iterator[Sample]:
    kinds = [(spec.member, f"{derived / spec.folder}{os.sep}") for spec in embedding_specs()]
    for sample in samples:
        name = f"{sample.image_id}.npy"
        files = [
            (suffix, KnownFile(folder + name, file.stat))
            for (suffix, folder), file in zip(kinds, sample.files, strict=True)
        ]
        members = [(JSON_MEMBER, sample.record), *files, (MASK_MEMBER, mask_npy(sample.mask))]
        yield member_key(sample.image_id), members
        on_sample(sample_bytes(sample))


def sample_bytes(sample: ReadySample) -> int:
    """What a sample brings to a tar, headers aside."""
    return sum([file.stat.size for file in sample.files]) + len(sample.record)


@functools.lru_cache(maxsize=1024)
def mask_npy(mask: tuple[int, ...]) -> bytes:
    """The mask as an npy of uint8, shape (77,). Source: seed 001, "T5 attention mask is saved as .npy"."""
    buffer = BytesIO()
    np.save(buffer, np.asarray(mask, np.uint8))
    return buffer.getvalue()


def _provenance(
    kind: str,
    position: int,
    plan: BucketPlan,
    identities: Mapping[str, ModelIdentity],
    before: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """`unknown_maker` counts samples in the tars whose file of this kind was adopted, those of earlier tars too."""
    makers = [sample.files[position].maker for shard in plan.shards for sample in shard]
    earlier = before["provenance"].get(kind, {}).get("unknown_maker", 0) if before else 0
    identity = identities.get(kind)
    return {
        "model": identity.model if identity else None,
        "revision": identity.revision if identity else None,
        "key": identity.key if identity else None,
        "preview": identity.preview if identity else None,
        "facts": identity.facts if identity else None,
        "unknown_maker": earlier + makers.count(UNKNOWN),
    }
