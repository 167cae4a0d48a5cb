"""Incremental change of a bucket's set: which tars stay as they are, and the samples of those that are written.

    present tars, with their live samples ──┐           unchanged: linked into the new set
                                            ├── tar ──> a sample changed or gone: written again without it, or with the new one
    planned samples, id → digest ───────────┘           the last tar is filled up with new samples; further tars follow

Samples keep their order. A tar without samples is left out, so the numbers of the tars have no gaps.

Plans are made in shard_plan.py and written by shard_writer.py.

Spec: docs/spec/shards.md#updating-a-set
"""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

from imagemill.pipeline.shards.readiness import ReadySample, digest_of_files
from imagemill.pipeline.shards.shard_sets import IndexLine

# A sample of the present set, which is copied, or one that is packed from its files.
PlannedSample = IndexLine | ReadySample

# A set with fewer tars is never packed from scratch because its tars are thin.
LEAST_TARS = 5


@dataclass(frozen=True, slots=True)
class TarPlan:
    """One tar of a planned set.

    Attributes:
        samples: in order.
        kept: name of the present tar that becomes this one without a change; empty for a tar that is written.
    """

    samples: tuple[PlannedSample, ...]
    kept: str = ""


@dataclass(frozen=True, slots=True)
class SetChange:
    """A planned change of a set: its tars afterwards, and the numbers of samples that are added, changed and removed."""

    tars: tuple[TarPlan, ...] = ()
    added: int = 0
    changed: int = 0
    removed: int = 0


def plan_update(
    present: Sequence[tuple[str, Sequence[IndexLine]]],
    dead: Set[tuple[str, int]],
    planned: Mapping[str, PlannedSample],
    size: int,
) -> SetChange:
    """Compare a set with the samples that it is to contain.

    Args:
        present: name and samples of each tar, in order.
        dead: places of samples with a tombstone, which sets of earlier releases have.
        planned: image id → sample, in the order of new samples.
        size: most samples of a tar.
    """
    tars: list[TarPlan] = []
    placed: set[str] = set()
    changed = removed = 0
    for name, lines in present:
        samples: list[PlannedSample] = []
        for line in lines:
            if line.place in dead or line.image_id not in planned or line.image_id in placed:
                removed += line.place not in dead
                continue
            placed.add(line.image_id)
            sample = planned[line.image_id]
            same = digest_of(sample) == line.digest
            samples.append(line if same else sample)
            changed += not same
        if samples:
            tars.append(TarPlan(tuple(samples), name if samples == list(lines) else ""))
    new = [sample for image_id, sample in planned.items() if image_id not in placed]
    added = len(new)
    if tars and new and (room := size - len(tars[-1].samples)) > 0:
        tars[-1] = TarPlan((*tars[-1].samples, *new[:room]))
        new = new[room:]
    return SetChange((*tars, *cut(new, size)), added, changed, removed)


def cut(samples: Sequence[PlannedSample], size: int) -> tuple[TarPlan, ...]:
    """Return tars that are packed from scratch: `size` samples each, and the rest in the last one."""
    return tuple(TarPlan(tuple(samples[i : i + size])) for i in range(0, len(samples), size))


def is_thin(tars: Sequence[TarPlan], size: int, share: float) -> bool:
    """Return whether more than this share of the tars, the last one not counted, are less than half full."""
    thin = sum(2 * len(tar.samples) < size for tar in tars[:-1])
    return len(tars) >= LEAST_TARS and thin > share * (len(tars) - 1)


def digest_of(sample: PlannedSample) -> str:
    """Return the digest of a sample, see `sample_digest`."""
    if isinstance(sample, IndexLine):
        return sample.digest
    return sample.digest or digest_of_files(sample)
