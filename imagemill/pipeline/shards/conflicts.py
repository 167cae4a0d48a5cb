"""Comparison of a plan with the sets on disk: conflicts, and sets that are already up to date.

The comparison runs before anything is written, for real runs and for dry runs. The plan is made in shard_plan.py and
written by shard_writer.py.

Spec: docs/spec/shards.md#existing-shards
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress

from imagemill.domain.buckets import BUCKETS
from imagemill.errors import ImagemillError, MissingInput, ShardExists
from imagemill.formats.energon import META, SQLITE
from imagemill.pipeline.shards.shard_plan import BucketPlan, PackPlan
from imagemill.pipeline.shards.shard_sets import (
    INDEX,
    agrees,
    bucket_folder,
    live_lines,
    load_manifest,
    read_manifest,
)

# Modes besides `update` in which a set that is as planned stays.
_COMPARED = {"append", "withdraw", "repack"}


def stays(shard_set: PackPlan, plan: BucketPlan) -> bool:
    """Return whether the bucket's set already is as planned, so that nothing is written."""
    folder = bucket_folder(shard_set.output, plan.bucket)
    manifest = read_manifest(folder)
    indices = (folder / INDEX, folder / META / SQLITE)
    if not (manifest and agrees(shard_set.tars(plan.bucket), manifest) and all(path.is_file() for path in indices)):
        return False
    same = shard_set.is_same(manifest, plan)
    folded = not (manifest.tombstones or (manifest.appended and shard_set.existing == "repack"))
    return same and (shard_set.existing == "update" or (shard_set.existing in _COMPARED and folded))


def conflicts(shard_set: PackPlan) -> list[str]:
    """Return the reasons why these buckets may not be written; all buckets are checked before any is written."""
    return [*_existing_conflicts(shard_set), *_duplicates(shard_set)]


def refuse_conflicts(shard_set: PackPlan) -> None:
    """Raise ShardExists with the first conflict of one type and the number of the others."""
    if existing := _existing_conflicts(shard_set):
        raise ShardExists(
            f"shards already exist: {_summarize(existing, 'buckets')}",
            where=shard_set.output,
            why="existing shards are replaced only on request",
            do="`imagemill shards --overwrite` replaces each chosen bucket's whole set",
        )
    if duplicates := list(_duplicates(shard_set)):
        raise ShardExists(
            f"a sample would be in two buckets: {_summarize(duplicates, 'samples')}",
            where=shard_set.output,
            why="its old bucket is not among the chosen ones",
            do="pack the old bucket too, or first: the same command with that --bucket, or without any",
        )


def _summarize(found: Sequence[str], noun: str) -> str:
    return found[0] + (f" (and {len(found) - 1} more {noun})" if len(found) > 1 else "")


def _existing_conflicts(shard_set: PackPlan) -> list[str]:
    return [problem for plan in shard_set.plans if (problem := _conflict(shard_set, plan))]


def _conflict(shard_set: PackPlan, plan: BucketPlan) -> str | None:
    folder = bucket_folder(shard_set.output, plan.bucket)
    tars = shard_set.tars(plan.bucket)
    if not tars or shard_set.existing == "replace":
        return None
    if shard_set.existing == "refuse":
        return f"{folder.name}/{min(tars)} exists"
    try:
        manifest = load_manifest(folder)
    except MissingInput:
        return f"{folder.name} contains shards without a manifest of imagemill"
    except ImagemillError as error:
        return f"{folder.name} contains shards without a usable manifest: {error.what}"
    return None if agrees(tars, manifest) else f"{folder.name}: the tars are not those of its manifest"


def _duplicates(shard_set: PackPlan) -> Iterator[str]:
    """Yield samples that would be live in two buckets: the image changed its bucket, and the old bucket is not chosen."""
    new = {sample.image_id: plan.bucket for plan in shard_set.plans for sample in plan.packed}
    for bucket in set(BUCKETS) - {plan.bucket for plan in shard_set.plans} if new else ():
        folder = bucket_folder(shard_set.output, bucket)
        with suppress(ImagemillError):  # a damaged set: validators report it
            for line in live_lines(folder) if read_manifest(folder) else ():
                if line.image_id in new:
                    yield f"{line.image_id} belongs to {new[line.image_id]} now, and is still live in {folder.name}"
