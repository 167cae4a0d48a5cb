"""Changes of an existing set of shards: new samples in new tars, tombstones for samples that no longer count.

    index of the set ──┐                        live, as they are
                       ├──> per sample ──────>  tombstone: withdrawn, changed, not ready, beyond the limit
    the plan's samples ┘                        new: into tars behind the last one

Afterwards the live samples are those of the plan, as after `--overwrite`, but no existing tar is rewritten.

Writing the change is in shard_writer.py; which samples may be packed is decided in readiness.py.

Spec: docs/spec/conventions.md#missing-sources, docs/spec/shards.md#appending
"""

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass

from imagemill.pipeline.shards.shard_sets import IndexLine, Tombstone


@dataclass(frozen=True, slots=True)
class Overlay:
    """The change of a set.

    `live`: digests of the existing samples that still count afterwards. `missing`: ids of planned samples that are not
    live.
    """

    tombstones: tuple[Tombstone, ...]
    live: tuple[str, ...]
    missing: tuple[str, ...]


def plan_append(
    index: Iterable[IndexLine],
    tombstones: Iterable[Tombstone],
    planned: Mapping[str, str],
    withdrawn: Set[str],
    *,
    ready: Set[str] = frozenset(),
    withdrawals_only: bool = False,
) -> Overlay:
    """Compare the samples of a set with a plan.

    Args:
        index: all samples of the set.
        tombstones: the set's present tombstones.
        planned: id → digest of the samples that are to be live.
        withdrawn: ids that the user withdrew.
        ready: ids that could be packed; those that are ready but not planned get the tombstone `beyond_limit`.
        withdrawals_only: apply only withdrawals and restorations; changed samples stay live until the next append.
    """
    before = {tombstone.place: tombstone.why for tombstone in tombstones}
    dead: list[Tombstone] = []
    live: dict[str, str] = {}
    # Samples are visited from the last to the first, because the last sample of an id is the newest.
    for line in sorted(index, key=lambda line: line.place, reverse=True):
        earlier = before.get(line.place)
        if line.image_id in withdrawn:
            why = earlier or "withdrawn"  # a restored sample keeps its earlier tombstone
        elif withdrawals_only:
            why = None if earlier == "withdrawn" else earlier
        else:
            why = _why_dead(line, planned, ready)
        if why is None and line.image_id in live:
            why = "changed"
        if why is None:
            live[line.image_id] = line.digest
        else:
            dead.append(Tombstone(line.image_id, line.shard, line.offset, why))
    missing = () if withdrawals_only else tuple(image_id for image_id in planned if image_id not in live)
    return Overlay(tuple(sorted(dead, key=lambda tombstone: tombstone.place)), tuple(live.values()), missing)


def _why_dead(line: IndexLine, planned: Mapping[str, str], ready: Set[str]) -> str | None:
    if planned.get(line.image_id) == line.digest:
        return None  # this includes a restored sample: its bytes are still current
    if line.image_id in planned:
        return "changed"
    return "beyond_limit" if line.image_id in ready else "not_ready"
