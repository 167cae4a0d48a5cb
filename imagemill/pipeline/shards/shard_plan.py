"""Assignment of samples to shards: order, limit and grouping.

Plans are compared with the disk in conflicts.py and written in shard_writer.py. The set on disk is described in
shard_sets.py, incremental changes in update.py, and the choice of packable samples in readiness.py.

Spec: docs/spec/shards.md#updating-a-set
"""

import random
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, get_args

import msgspec

from imagemill.config import REPACK_SHARE
from imagemill.domain.buckets import BUCKETS
from imagemill.domain.embedding_specs import embedding_specs
from imagemill.domain.inputs import IGNORE, SRGB, ColorSetting
from imagemill.errors import ImagemillError, WrongUsage
from imagemill.pipeline.colours import ColourCounts, sum_colours
from imagemill.pipeline.shards.readiness import ReadySample, load_samples
from imagemill.pipeline.shards.shard_manifest import Manifest
from imagemill.pipeline.shards.shard_sets import (
    INDEX,
    IndexLine,
    ShardParameters,
    agrees,
    bucket_folder,
    list_tars,
    live_lines,
    read_index,
    read_manifest,
    read_tombstones,
    recorded_parameters,
    set_digest,
    set_members,
)
from imagemill.pipeline.shards.update import PlannedSample, SetChange, TarPlan, cut, digest_of, is_thin, plan_update
from imagemill.store.ledger import Ledger, PackedSets
from imagemill.text.close_names import name_hint

# Treatment of existing shards:
# `refuse` them, or `replace` them;
# `update` sets of ours incrementally; `append` is the same on request, and also folds in tombstones;
# `repack` updated sets from scratch;
# `withdraw` only takes out withdrawn samples, and packs those that are in no set.
WriteMode = Literal["refuse", "replace", "update", "repack", "append", "withdraw"]
INCREMENTAL = {"update", "append", "withdraw"}

# Reasons for packing a present set from scratch instead of updating it, with their words.
SCRATCH = {
    "parameters": "its parameters changed",
    "shuffled": "a shuffled or limited set has no place for new samples",
    "kinds": "the embedding kinds changed",
    "thin": "too many tars would have been less than half full (repack_share)",
    "index": "its index cannot be used",
}


@dataclass(frozen=True, slots=True)
class BucketPlan:
    """The planned set of one bucket.

    Attributes:
        bucket: the bucket.
        change: its tars, and the difference from the present set.
        digest: of the samples.
        parameters: of the set.
        ready: all samples of the set, from which it can be packed from scratch; None if only withdrawals are applied, which
            needs no files.
        scratch: key of `SCRATCH` if the present set is packed from scratch for that reason.
        updates: whether the plan changes a present set.
    """

    bucket: str
    change: SetChange
    digest: str
    parameters: ShardParameters
    ready: tuple[ReadySample, ...] | None = None
    scratch: str = ""
    updates: bool = False

    @property
    def shards(self) -> list[tuple[PlannedSample, ...]]:
        """The samples of each tar that is written."""
        return [tar.samples for tar in self.change.tars if not tar.kept]

    @property
    def samples(self) -> int:
        """Number of samples in the tars that are written."""
        return sum(map(len, self.shards))

    @property
    def packed(self) -> list[ReadySample]:
        """The samples that are packed from their files."""
        return [sample for samples in self.shards for sample in samples if isinstance(sample, ReadySample)]

    @property
    def total(self) -> int:
        """Number of samples of the set."""
        return sum(len(tar.samples) for tar in self.change.tars)

    @property
    def is_from_scratch(self) -> bool:
        """Whether every tar contains the samples that it would contain if the set were packed from scratch."""
        if self.ready is None:
            return False
        tars = cut(self.ready, self.parameters.shard_size)
        return [_ids(tar) for tar in self.change.tars] == [_ids(tar) for tar in tars]

    def from_files(self, tar: str) -> "BucketPlan":
        """Return the plan that packs the samples of this present tar from their files instead of copying them."""
        ready = {sample.image_id: sample for sample in self.ready or ()}

        def source(sample: PlannedSample) -> PlannedSample:
            return ready[sample.image_id] if isinstance(sample, IndexLine) and sample.shard == tar else sample

        tars = (each if each.kept else TarPlan(tuple(map(source, each.samples))) for each in self.change.tars)
        return replace(self, change=replace(self.change, tars=tuple(tars)))

    def without(self, lost: Set[str]) -> "BucketPlan":
        """Return the plan without the samples of these images that would be packed from files."""

        def is_lost(sample: PlannedSample) -> bool:
            return isinstance(sample, ReadySample) and sample.image_id in lost

        rest = (TarPlan(tuple(s for s in tar.samples if not is_lost(s)), tar.kept) for tar in self.change.tars)
        tars = tuple(tar for tar in rest if tar.samples)
        digest = set_digest(digest_of(sample) for tar in tars for sample in tar.samples)
        ready = None if self.ready is None else tuple(sample for sample in self.ready if sample.image_id not in lost)
        return replace(self, change=replace(self.change, tars=tars), digest=digest, ready=ready)


@dataclass(slots=True)
class PackPlan:
    """The plans of all chosen buckets of one run.

    `workers`: number of tars written concurrently. `empty_captions`: folder of states of the empty caption. `color`: how pixels
    are read. `images`: URL of the photographs, if they are in object storage. `records`, `ledger`: what samples are loaded from.
    The ledger also has the colours of the images, for the manifests; None states nothing.
    `state`: what the run has seen, for `record_packed`; None if the next run is not to continue from it.
    """

    output: Path
    plans: list[BucketPlan] = field(default_factory=list)
    existing: WriteMode = "refuse"
    workers: int = 1
    empty_captions: Path | None = None
    color: ColorSetting = SRGB
    images: str | None = None
    records: Path | None = None
    ledger: Ledger | None = None
    state: PackedSets | None = None
    _tars: dict[str, dict[str, int]] = field(default_factory=dict)
    _loading: threading.Lock = field(default_factory=threading.Lock)

    def loaded(self, samples: Sequence[PlannedSample], derived: Path) -> list[PlannedSample]:
        """Return the samples; those that are packed from their files are loaded. Raises as `load_samples`."""
        if self.records is None or self.ledger is None:
            return list(samples)
        ready = [sample for sample in samples if isinstance(sample, ReadySample)]
        with self._loading:  # tars are written concurrently
            loaded = iter(load_samples(ready, self.records, derived, self.ledger))
        return [next(loaded) if isinstance(sample, ReadySample) else sample for sample in samples]

    def colours_of(self, ids: Collection[str]) -> ColourCounts | None:
        """Return the colours of the images of a set."""
        if self.ledger is None:
            return None
        known = self.ledger.colour_counts(ids)
        unknown = len(ids) - sum(number for _, _, number in known)
        return sum_colours([*known, (None, "", unknown)], self.color)

    def is_same(self, manifest: Manifest, plan: BucketPlan) -> bool:
        """Return whether a set has the samples and parameters of a plan, and states how pixels are read now.

        A manifest that states nothing is of the time of `ignore`.
        """
        stated = self.ledger is None or (manifest.pixels.color if manifest.pixels else IGNORE) == self.color
        return stated and (manifest.digest, manifest.parameters) == (plan.digest, plan.parameters)

    def tars(self, bucket: str) -> dict[str, int]:
        """Return the tars (name → size in bytes) in the bucket's folder before this run writes to it."""
        if bucket not in self._tars:
            self._tars[bucket] = list_tars(bucket_folder(self.output, bucket))
        return self._tars[bucket]


def check_buckets(buckets: Iterable[str]) -> list[str]:
    """Return the chosen buckets in the order of BUCKETS; raise WrongUsage for an unknown name before any path is touched."""
    chosen = set(buckets)
    if unknown := sorted(chosen - set(BUCKETS)):
        hint = name_hint(unknown[0], BUCKETS)
        raise WrongUsage(f"unknown bucket {unknown[0]!r}", why=hint, do=f"choose from {', '.join(BUCKETS)}")
    return [bucket for bucket in BUCKETS if bucket in chosen]


def plan_shards(
    ready: Sequence[ReadySample],
    buckets: Sequence[str],
    output: Path,
    parameters: ShardParameters,
    existing: WriteMode = "refuse",
    *,
    requested: Mapping[str, Any] | None = None,
    withdrawn: Set[str] = frozenset(),
    repack_share: float = REPACK_SHARE,
    color: ColorSetting = SRGB,
    ledger: Ledger | None = None,
    indices: Mapping[str, Sequence[IndexLine]] = MappingProxyType({}),
) -> PackPlan:
    """Choose buckets, shuffle, limit, group, cut: in this order.

    Args:
        ready: samples that may be packed.
        buckets: the chosen buckets.
        output: parent of the bucket folders.
        parameters: used for buckets without recorded parameters.
        existing: how existing shards are treated.
        requested: if given, a bucket with a set of ours keeps the parameters of its manifest except for these, so that
            updating or repacking a shuffled or limited set does not undo that. Buckets with equal parameters are
            shuffled and limited together, as they were before.
        withdrawn: ids that the user withdrew; they are not in `ready`.
        repack_share: an incremental update packs a set from scratch if more than this share of its tars would be thin.
        color: as for PackPlan.
        ledger: as for PackPlan.
        indices: index of each present set that has been read already, by bucket.

    Raises:
        WrongUsage: if `existing` is unknown.
    """
    if existing not in get_args(WriteMode):
        raise WrongUsage(f"unknown existing={existing!r}", do=f"choose from {', '.join(get_args(WriteMode))}")
    groups: dict[ShardParameters, list[str]] = {}
    for bucket in buckets:
        recorded = None if requested is None else recorded_parameters(bucket_folder(output, bucket))
        given = msgspec.structs.replace(recorded, **(requested or {})) if recorded else parameters
        groups.setdefault(given, []).append(bucket)
    plans: list[BucketPlan] = []
    for given, group in groups.items():
        of_buckets: dict[str, list[ReadySample]] = {bucket: [] for bucket in group}
        chosen = [sample for sample in ready if sample.bucket in of_buckets]
        if given.shuffle:
            random.Random(given.seed).shuffle(chosen)
        for sample in chosen[: given.limit]:
            of_buckets[sample.bucket].append(sample)
        for bucket, samples in of_buckets.items():
            digest = set_digest(map(digest_of, samples))
            plans.append(BucketPlan(bucket, SetChange(cut(samples, given.shard_size)), digest, given, tuple(samples)))
    plans.sort(key=lambda plan: list(buckets).index(plan.bucket))
    if existing == "withdraw":
        plans = _withdrawals(plans, output, withdrawn)
    shard_set = PackPlan(output, plans, existing, color=color, ledger=ledger)
    if existing in INCREMENTAL and existing != "withdraw":
        shard_set.plans = [_as_update(shard_set, plan, repack_share, indices.get(plan.bucket)) for plan in plans]
    return shard_set


def _as_update(
    shard_set: PackPlan,
    plan: BucketPlan,
    repack_share: float,
    index: Sequence[IndexLine] | None,
) -> BucketPlan:
    """Return the plan as a change of the present set, or from scratch if no set is there or it cannot be continued.

    `index`: that of the present set; None if it has not been read.
    """
    folder, existing = bucket_folder(shard_set.output, plan.bucket), shard_set.existing
    manifest = read_manifest(folder)
    if manifest is None or not agrees(shard_set.tars(plan.bucket), manifest):
        return replace(plan, change=replace(plan.change, added=plan.total))
    same = shard_set.is_same(manifest, plan)
    if same and (existing == "update" or not manifest.tombstones):
        return plan
    assert plan.ready is not None
    planned = {sample.image_id: sample for sample in plan.ready}
    try:
        present = _present(folder, manifest, index)
        change = plan_update(*present, planned, plan.parameters.shard_size)
    except ImagemillError:
        return replace(plan, scratch="index", updates=True)
    if why := _why_from_scratch(plan, manifest, change, repack_share):
        return replace(plan, change=replace(change, tars=plan.change.tars), scratch=why, updates=True)
    return replace(plan, change=change, updates=True)


def _why_from_scratch(plan: BucketPlan, manifest: Manifest, change: SetChange, repack_share: float) -> str | None:
    given = plan.parameters
    reasons = {
        "parameters": manifest.parameters != given,
        "shuffled": given.shuffle or given.limit is not None,
        "kinds": manifest.members != set_members(),
        "thin": is_thin(change.tars, given.shard_size, repack_share),
    }
    return next((why for why, holds in reasons.items() if holds), None)


def _withdrawals(plans: Sequence[BucketPlan], output: Path, withdrawn: Set[str]) -> list[BucketPlan]:
    """Return the present sets without the withdrawn samples, and with ready samples that are in no set.

    A sample that was made by another model than the set's waits for the next update, as do changed samples.
    """
    sets = {bucket: manifest for bucket in BUCKETS if (manifest := read_manifest(bucket_folder(output, bucket)))}
    live = {bucket: live_lines(bucket_folder(output, bucket)) for bucket in sets}
    present = {line.image_id for lines in live.values() for line in lines}
    changed = []
    for plan in plans:
        manifest = sets.get(plan.bucket)
        if manifest is None:
            changed.append(replace(plan, change=SetChange(), ready=None))
            continue
        planned: dict[str, PlannedSample] = {
            line.image_id: line for line in live[plan.bucket] if line.image_id not in withdrawn
        }
        joining = _of_the_models(plan.ready or (), manifest)
        planned |= {sample.image_id: sample for sample in joining if sample.image_id not in present}
        change = plan_update(
            *_present(bucket_folder(output, plan.bucket), manifest), planned, manifest.parameters.shard_size
        )
        digest = set_digest(map(digest_of, planned.values()))
        changed.append(BucketPlan(plan.bucket, change, digest, manifest.parameters, updates=True))
    return changed


def _of_the_models(samples: Iterable[ReadySample], manifest: Manifest) -> Iterator[ReadySample]:
    """Yield the samples that may join a set without another change: its models made them, and it has no limit."""
    recorded = {kind: entry.key for kind, entry in manifest.provenance.items()}
    kinds = [spec.kind for spec in embedding_specs()]
    if manifest.parameters.limit is None:
        for sample in samples:
            if dict(zip(kinds, sample.model_keys, strict=True)) == recorded:
                yield sample


def _present(
    folder: Path, manifest: Manifest, index: Sequence[IndexLine] | None = None
) -> tuple[list[tuple[str, list[IndexLine]]], set[tuple[str, int]]]:
    """Return the tars of a set with their samples, and the places of those with a tombstone. `index`: None reads it.

    Raises:
        ImagemillError: if the index cannot be read, or is not that of the manifest's tars.
    """
    lines: dict[str, list[IndexLine]] = {shard.name: [] for shard in manifest.shards}
    for line in read_index(folder) if index is None else index:
        lines.setdefault(line.shard, []).append(line)
    if [(shard.name, shard.samples) for shard in manifest.shards] != [
        (tar, len(found)) for tar, found in lines.items()
    ]:
        raise ImagemillError(
            f"{INDEX} does not list the samples of the manifest's tars",
            where=folder / INDEX,
            do="run `imagemill shards --overwrite`",
        )
    return list(lines.items()), {tombstone.place for tombstone in read_tombstones(folder)}


def _ids(tar: TarPlan) -> list[str]:
    return [sample.image_id for sample in tar.samples]
