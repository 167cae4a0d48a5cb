"""What is laid over a set of shards that stays: new samples in new tars, tombstones for what counts no more.

    index of the set ──┐                        live, as they are
                       ├──> per sample ──────>  tombstone: withdrawn, changed, not ready, beyond the limit
    the plan's samples ┘                        new: into tars behind the last one

The samples that count afterwards are those of the plan: what `--overwrite` would pack, without touching a tar.

Belongs here: the decision, as values. Belongs elsewhere: writing it (shard_writer.py), what may be packed (readiness.py).
Spec: docs/spec/conventions.md#missing-sources, docs/spec/shards.md#appending
"""

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass

from imagemill.pipeline.shards.shard_sets import IndexLine, Tombstone


@dataclass(frozen=True, slots=True)
class Overlay:
    """How a set changes. `live`: digests of its samples that count afterwards; `missing`: planned ids that no live sample has."""

    tombstones: tuple[Tombstone, ...]
    live: tuple[str, ...]
    missing: tuple[str, ...]


def lay_over(
    index: Iterable[IndexLine],
    tombstones: Iterable[Tombstone],
    planned: Mapping[str, str],
    withdrawn: Set[str],
    *,
    ready: Set[str] = frozenset(),
    withdrawals_only: bool = False,
) -> Overlay:
    """Match a set with a plan.

    Args:
        planned: id → digest of the samples that are to count. withdrawn: ids that somebody took out.
        ready: ids that could be packed; those of them that are not planned are beyond the limit.
        withdrawals_only: nothing but withdrawals and their undoing: changed samples count as they are until the next append.
    """
    before = {tombstone.place: tombstone.why for tombstone in tombstones}
    dead: list[Tombstone] = []
    live: dict[str, str] = {}
    # The last sample of an id goes first: it is the newest.
    for line in sorted(index, key=lambda line: line.place, reverse=True):
        earlier = before.get(line.place)
        if line.image_id in withdrawn:
            why = earlier or "withdrawn"  # restoring must not wake a sample that was dead before
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
        return None  # a restored sample too: its bytes are still the right ones
    if line.image_id in planned:
        return "changed"
    return "beyond_limit" if line.image_id in ready else "not_ready"
