"""Assignment of samples to shards: order, limit and grouping.

Plans are compared with the disk in conflicts.py and written in shard_writer.py. The set on disk is described in
shard_sets.py, appending in append.py, and the choice of packable samples in readiness.py.

Spec: docs/spec/shards.md#updating-a-set
"""

import random
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec

from imagemill.domain.buckets import BUCKETS
from imagemill.errors import WrongUsage
from imagemill.pipeline.shards.append import Overlay, plan_append
from imagemill.pipeline.shards.readiness import ReadySample
from imagemill.pipeline.shards.shard_sets import (
    ShardParameters,
    bucket_folder,
    list_tars,
    read_index,
    read_manifest,
    read_tombstones,
    recorded_parameters,
    sample_digest,
    set_digest,
)
from imagemill.text.close_names import name_hint

# Treatment of existing shards:
# `refuse` them, or `replace` them;
# `update` sets of ours by rewriting them, and `repack`, which also folds in appended tars;
# `append` new tars and tombstones, and `withdraw`, which applies only withdrawals.
WriteMode = Literal["refuse", "replace", "update", "repack", "append", "withdraw"]
OVERLAYS = {"append", "withdraw"}


@dataclass(frozen=True, slots=True)
class BucketPlan:
    """One bucket's set: its samples by shard, a digest of the samples, and its parameters.

    `overlay`: the change of an existing set, if it is kept; `shards` are then the new ones only.
    """

    bucket: str
    shards: tuple[tuple[ReadySample, ...], ...]
    digest: str
    parameters: ShardParameters
    overlay: Overlay | None = None

    @property
    def samples(self) -> int:
        """Number of samples that this plan writes."""
        return sum(map(len, self.shards))

    @property
    def live(self) -> int:
        """Number of live samples afterwards."""
        return self.samples + (len(self.overlay.live) if self.overlay else 0)


@dataclass(slots=True)
class PackPlan:
    """The plans of all chosen buckets of one run.

    `workers`: number of tars written concurrently. `empty_captions`: folder of states of the empty caption.
    """

    output: Path
    plans: list[BucketPlan] = field(default_factory=list)
    existing: WriteMode = "refuse"
    workers: int = 1
    empty_captions: Path | None = None
    _tars: dict[str, dict[str, int]] = field(default_factory=dict)

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
        chosen = [sample for sample in ready if sample.bucket in group]
        if given.shuffle:
            random.Random(given.seed).shuffle(chosen)
        chosen = chosen[: given.limit]
        for bucket in group:
            samples = [sample for sample in chosen if sample.bucket == bucket]
            plans.append(
                BucketPlan(bucket, _cut(samples, given.shard_size), set_digest(map(digest_of, samples)), given)
            )
    if existing in OVERLAYS:
        ids: dict[str, set[str]] = {bucket: set() for bucket in buckets}
        for sample in ready:
            ids[sample.bucket].add(sample.image_id)
        plans = [
            _as_overlay(plan, bucket_folder(output, plan.bucket), existing, withdrawn, ids[plan.bucket])
            for plan in plans
        ]
    return PackPlan(output, sorted(plans, key=lambda plan: list(buckets).index(plan.bucket)), existing)


def _as_overlay(
    plan: BucketPlan, folder: Path, existing: WriteMode, withdrawn: Set[str], ready: Set[str]
) -> BucketPlan:
    """Return the plan as a change of the existing set.

    Without an existing set, return the plan itself for `append`, and an empty plan for `withdraw`.
    """
    if read_manifest(folder) is None:
        return plan if existing == "append" else BucketPlan(plan.bucket, (), "", plan.parameters)
    by_id = {sample.image_id: sample for shard in plan.shards for sample in shard}
    overlay = plan_append(
        read_index(folder), read_tombstones(folder), {i: digest_of(sample) for i, sample in by_id.items()}, withdrawn,
        ready=ready, withdrawals_only=existing == "withdraw",
    )  # fmt: skip
    new = [by_id[image_id] for image_id in overlay.missing]
    digest = set_digest([*overlay.live, *map(digest_of, new)])
    return BucketPlan(plan.bucket, _cut(new, plan.parameters.shard_size), digest, plan.parameters, overlay)


def _cut(samples: Sequence[ReadySample], size: int) -> tuple[tuple[ReadySample, ...], ...]:
    return tuple(tuple(samples[i : i + size]) for i in range(0, len(samples), size))


def digest_of(sample: ReadySample) -> str:
    """Return the digest of a sample that is to be packed, see `sample_digest`."""
    return sample_digest(sample.record, ((file.kind, file.content) for file in sample.files))
