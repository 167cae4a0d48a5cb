"""Samples into tars, bucket by bucket, a whole set at a time.

    shards/bucket_1024x1024/
    ├─ shard-000000.tar …    WebDataset samples: json, one npy per kind, t5m.npy
    ├─ index.jsonl           {"image_id", "key", "shard", "offset", "size"} per sample
    └─ manifest.json         counts, checksums, parameters, provenance, and a digest of the samples

A set is written beside its place and changes places with the old one in a single step, so a reader sees the complete old set
or the complete new one.

Belongs here: order, grouping, limits, conflicts, publication.
Belongs elsewhere: the bytes of a tar (formats/tar.py), what may be packed (pipeline/readiness.py).
Source: seed 001; CONTRACTS section 2.
"""

import hashlib
import random
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec
import numpy as np

from imagemill.atomic import is_orphan, sync_folder, temporaries, temporary_path
from imagemill.buckets import BUCKETS
from imagemill.embedding_specs import embedding_specs
from imagemill.errors import ImagemillError, ShardExists, WrongUsage, disk_full_told
from imagemill.files import StatTriple, stat_triple
from imagemill.formats.jsonl import write_jsonl
from imagemill.formats.manifest import read_json, sha256_file, write_json
from imagemill.formats.tar import IndexEntry, Sample, write_shard
from imagemill.ids import member_key
from imagemill.pipeline.readiness import ReadySample
from imagemill.provenance import UNKNOWN, ModelIdentity
from imagemill.swap import replace_folder

FORMAT = "imagemill-shards/1"
INDEX = "index.jsonl"
MANIFEST = "manifest.json"
JSON_MEMBER = "json"
MASK_MEMBER = "t5m.npy"

# What to do about shards that are there: refuse them, replace them, or bring up to date those that are ours.
Existing = Literal["refuse", "replace", "update"]


@dataclass(frozen=True, slots=True)
class ShardParameters:
    """What a set of shards depends on besides its samples."""

    shard_size: int = 1000
    shuffle: bool = False
    seed: int = 1337
    limit: int | None = None


@dataclass(frozen=True, slots=True)
class BucketPlan:
    """One bucket's set: its samples shard by shard, a digest that says whether one changed, what it was planned with."""

    bucket: str
    shards: tuple[tuple[ReadySample, ...], ...]
    digest: str
    parameters: ShardParameters

    @property
    def samples(self) -> int:
        return sum(map(len, self.shards))


@dataclass(slots=True)
class BucketResult:
    """What became of one bucket."""

    bucket: str
    status: Literal["written", "unchanged", "removed", "empty"]
    samples: int = 0
    shards: int = 0
    bytes: int = 0


@dataclass(slots=True)
class ShardSet:
    """All chosen buckets of one run, planned."""

    output: Path
    plans: list[BucketPlan] = field(default_factory=list)
    existing: Existing = "refuse"


def check_buckets(buckets: Iterable[str]) -> list[str]:
    """The chosen buckets in the seed's order; another name is refused before anything touches a path."""
    chosen = set(buckets)
    if unknown := sorted(chosen - set(BUCKETS)):
        raise WrongUsage(f"unknown bucket {unknown[0]!r}", do=f"choose from {', '.join(BUCKETS)}")
    return [bucket for bucket in BUCKETS if bucket in chosen]


def bucket_folder(output: Path, bucket: str) -> Path:
    return output / f"bucket_{bucket}"


def shard_name(number: int) -> str:
    return f"shard-{number:06d}.tar"


def plan_shards(
    ready: Sequence[ReadySample],
    buckets: Sequence[str],
    output: Path,
    parameters: ShardParameters,
    existing: Existing = "refuse",
    *,
    as_recorded: bool = False,
) -> ShardSet:
    """Choose buckets, shuffle, limit, group, cut: in this order (seed 001, "Limit applies after shuffle").

    Args:
        as_recorded: a bucket that has a set of ours keeps the parameters of its manifest: bringing a shuffled or limited
            set up to date must not undo that. Buckets of equal parameters were, and are, shuffled and limited together.

    Raises:
        WrongUsage: an unknown `existing`.
    """
    if existing not in get_args(Existing):
        raise WrongUsage(f"unknown existing={existing!r}", do=f"choose from {', '.join(get_args(Existing))}")
    groups: dict[ShardParameters, list[str]] = {}
    for bucket in buckets:
        recorded = _recorded(bucket_folder(output, bucket)) if as_recorded else None
        groups.setdefault(recorded or parameters, []).append(bucket)
    plans = [plan for given, group in groups.items() for plan in _plan_group(ready, group, given)]
    return ShardSet(output, sorted(plans, key=lambda plan: list(buckets).index(plan.bucket)), existing)


def _recorded(folder: Path) -> ShardParameters | None:
    manifest = read_manifest(folder)
    return ShardParameters(**manifest["parameters"]) if manifest else None


def _plan_group(
    ready: Sequence[ReadySample], buckets: Sequence[str], parameters: ShardParameters
) -> Iterator[BucketPlan]:
    members = set(buckets)
    chosen = [sample for sample in ready if sample.bucket in members]
    if parameters.shuffle:
        random.Random(parameters.seed).shuffle(chosen)
    chosen = chosen[: parameters.limit]
    size = parameters.shard_size
    for bucket in buckets:
        samples = [sample for sample in chosen if sample.bucket == bucket]
        shards = tuple(tuple(samples[i : i + size]) for i in range(0, len(samples), size))
        yield BucketPlan(bucket, shards, _digest(samples), parameters)


def _digest(samples: Iterable[ReadySample]) -> str:
    """Of the samples whatever their order: a new image in one bucket moves others' places in a common shuffle, no more."""
    one_by_one = sorted(_sample_digest(sample) for sample in samples)
    return hashlib.sha256(b"".join(one_by_one)).hexdigest()


def _sample_digest(sample: ReadySample) -> bytes:
    files = "".join(f"{file.kind} {file.content}\n" for file in sample.files)
    return hashlib.sha256(sample.record + files.encode()).digest()


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
    return None if _agrees(folder, manifest) else f"{folder.name}: the tars are not those of its manifest"


def _agrees(folder: Path, manifest: Mapping[str, Any]) -> bool:
    """Whether the tars in a folder are those of its manifest, by name and size."""
    recorded = {shard["name"]: shard["bytes"] for shard in manifest["shards"]}
    return recorded == {tar.name: tar.stat().st_size for tar in folder.glob("*.tar")}


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


class _ManifestShard(msgspec.Struct):
    name: str
    samples: int
    bytes: int
    sha256: str


class _Manifest(msgspec.Struct):
    """What readers of a manifest rely on."""

    format: str
    digest: str
    samples: int
    members: list[str]
    shards: list[_ManifestShard]
    parameters: ShardParameters


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """A bucket's manifest if it is there, ours and whole, else None."""
    try:
        manifest = read_json(folder / MANIFEST)
        ours = msgspec.convert(manifest, _Manifest).format == FORMAT
    except (ImagemillError, msgspec.ValidationError):
        return None
    return manifest if ours else None


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
        derived: folder of the npy folders. identities: recorded maker of each kind. on_sample: called with each sample's bytes.

    Raises:
        DiskFull: the old set is where it was.
    """
    folder = bucket_folder(shard_set.output, plan.bucket)
    sweep_sets(shard_set.output)
    manifest = read_manifest(folder)
    if shard_set.existing == "update" and manifest and _is_current(folder, manifest, plan):
        return BucketResult(plan.bucket, "unchanged", plan.samples, len(plan.shards), _total_bytes(manifest))
    if not plan.shards:
        return _remove(folder, plan)
    staging = temporary_path(shard_set.output)
    try:
        with disk_full_told(folder):
            staging.mkdir(parents=True)
            manifest = _write_set(staging, plan, derived, identities, on_sample)
            replace_folder(staging, folder)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return BucketResult(plan.bucket, "written", plan.samples, len(plan.shards), _total_bytes(manifest))


def _is_current(folder: Path, manifest: Mapping[str, Any], plan: BucketPlan) -> bool:
    same = (manifest["digest"], manifest["parameters"]) == (plan.digest, asdict(plan.parameters))
    return same and _agrees(folder, manifest) and (folder / INDEX).is_file()


def sweep_sets(output: Path) -> None:
    """Remove sets that dead runs left beside their place."""
    for path in temporaries(output):
        if is_orphan(path):
            shutil.rmtree(path, ignore_errors=True)


def _remove(folder: Path, plan: BucketPlan) -> BucketResult:
    """A bucket without samples ends with no set: it leaves its place in one step too."""
    if not folder.is_dir():
        return BucketResult(plan.bucket, "empty")
    gone = temporary_path(folder.parent)
    folder.rename(gone)
    sync_folder(folder.parent)
    shutil.rmtree(gone)
    return BucketResult(plan.bucket, "removed")


def _total_bytes(manifest: Mapping[str, Any]) -> int:
    return sum(shard["bytes"] for shard in manifest["shards"])


def _write_set(
    folder: Path,
    plan: BucketPlan,
    derived: Path,
    identities: Mapping[str, ModelIdentity],
    on_sample: Callable[[int], None],
) -> dict[str, Any]:
    ids = {member_key(sample.image_id): sample.image_id for shard in plan.shards for sample in shard}
    shards, index = [], []
    for number, samples in enumerate(plan.shards):
        path = folder / shard_name(number)
        entries = write_shard(path, _members(samples, derived, on_sample))
        index += [_index_line(ids[entry.key], path.name, entry) for entry in entries]
        shards.append(
            {"name": path.name, "samples": len(samples), "bytes": path.stat().st_size, "sha256": sha256_file(path)}
        )
    write_jsonl(folder / INDEX, index)
    manifest = {
        "format": FORMAT,
        "bucket": plan.bucket,
        "digest": plan.digest,
        "samples": plan.samples,
        "members": [JSON_MEMBER, *(spec.member for spec in embedding_specs()), MASK_MEMBER],
        "shards": shards,
        "parameters": asdict(plan.parameters),
        "provenance": {
            spec.kind: _provenance(spec.kind, n, plan, identities) for n, spec in enumerate(embedding_specs())
        },
    }
    write_json(folder / MANIFEST, manifest)
    return manifest


def _members(samples: Sequence[ReadySample], derived: Path, on_sample: Callable[[int], None]) -> Iterator[Sample]:
    specs = embedding_specs()
    for sample in samples:
        files = [(spec.member, derived / spec.folder / f"{sample.image_id}.npy") for spec in specs]
        for (_, path), file in zip(files, sample.files, strict=True):
            if _stat_of(path) != file.stat:
                raise ImagemillError(
                    "a file changed while it was being packed",
                    where=path,
                    why="the plan vouched for other bytes",
                    do="run the command again",
                )
        yield (
            member_key(sample.image_id),
            [(JSON_MEMBER, sample.record), *files, (MASK_MEMBER, mask_npy(sample.mask))],
        )
        on_sample(sum(file.stat.size for file in sample.files) + len(sample.record))


def _stat_of(path: Path) -> StatTriple | None:
    try:
        return stat_triple(path)
    except FileNotFoundError:
        return None


def mask_npy(mask: Sequence[int]) -> bytes:
    """The mask as an npy of uint8, shape (77,). Source: seed 001, "T5 attention mask is saved as .npy"."""
    buffer = BytesIO()
    np.save(buffer, np.asarray(mask, np.uint8))
    return buffer.getvalue()


def _index_line(image_id: str, shard: str, entry: IndexEntry) -> dict[str, Any]:
    return {"image_id": image_id, "key": entry.key, "shard": shard, "offset": entry.offset, "size": entry.size}


def _provenance(kind: str, position: int, plan: BucketPlan, identities: Mapping[str, ModelIdentity]) -> dict[str, Any]:
    makers = [sample.files[position].maker for shard in plan.shards for sample in shard]
    identity = identities.get(kind)
    return {
        "model": identity.model if identity else None,
        "revision": identity.revision if identity else None,
        "key": identity.key if identity else None,
        "preview": identity.preview if identity else None,
        "facts": identity.facts if identity else None,
        "unknown_maker": makers.count(UNKNOWN),
    }
