"""What one packing run was asked for, and what it would do: the same plan for the real run and for a dry one.

Belongs here: from a request to a plan, whoever asks (run configuration or command line).
Belongs elsewhere: what may be packed (readiness.py), order and cut (shard_plan.py), claims and rows of the ledger (assets/).
Spec: docs/spec/shards.md#dry-run
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from imagemill.config import Config
from imagemill.domain.layout import DataRoot
from imagemill.errors import ImagemillError
from imagemill.pipeline.curation.near_duplicates import excluded_images
from imagemill.pipeline.shards.conflicts import conflicts, stays
from imagemill.pipeline.shards.readiness import Readiness, find_ready, progress_lines
from imagemill.pipeline.shards.shard_plan import Existing, PackPlan, plan_shards
from imagemill.pipeline.shards.shard_sets import ShardParameters
from imagemill.pipeline.stage2.inventory import Inventory
from imagemill.pipeline.stage2.regenerate import refuse_regenerating
from imagemill.store.ledger import Ledger

# What these write is said by the request alone; the others keep what a set of ours was written with.
_ANEW = {"refuse", "replace"}
# Modes of `imagemill shards`. `imagemill run` has migrated what it could, and reports the rest.
_COMMANDED = {*_ANEW, "append", "repack"}


@dataclass(frozen=True, slots=True)
class Packing:
    """A request. `asked`: the fields of ShardParameters that somebody named; `progress_every`: ready records per line.

    `allow_preview`: samples whose caption a preview model made are packed too.
    """

    buckets: Sequence[str]
    output: Path
    existing: Existing
    asked: Mapping[str, Any] = field(default_factory=dict)
    progress_every: int = 500
    allow_preview: bool = False


@dataclass(frozen=True, slots=True)
class DryRun:
    """The counters of the real run, and why it would refuse to write."""

    counts: dict[str, int]
    conflicts: list[str]


def plan_packing(inventory: Inventory, config: Config, ledger: Ledger, packing: Packing) -> tuple[Readiness, PackPlan]:
    """Match records with files, then order, limit, group and cut. Writes nothing.

    Raises:
        MissingInput: no records. WrongUsage: an unknown `existing`. ImagemillError: a kind is being regenerated, or no record
            is of version 2.
    """
    if packing.existing != "withdraw":  # which packs nothing, and must not wait
        refuse_regenerating(ledger)
    root = inventory.root
    excluded = excluded_images(root.derived, ledger, config.near_duplicates)
    say = progress_lines(packing.progress_every)
    found = find_ready(
        root.stage2_jsonl, root.derived, ledger, buckets=packing.buckets, excluded=excluded,
        allow_preview=packing.allow_preview, on_ready=say, listed=inventory.listed,
    )  # fmt: skip
    if packing.existing in _COMMANDED:
        _refuse_stage1(root, found)
    parameters = ShardParameters(**{"shard_size": config.shard_size, **packing.asked})
    shard_set = plan_shards(
        found.ready, packing.buckets, packing.output, parameters, packing.existing,
        asked=None if packing.existing in _ANEW else packing.asked, withdrawn=ledger.ids("withdrawn"),
    )  # fmt: skip
    return found, shard_set


def _refuse_stage1(root: DataRoot, found: Readiness) -> None:
    """Raises ImagemillError if every record is of Stage 1: nothing can be packed before they are migrated."""
    waiting = sum(problem.reason == "stage1" for problem in found.problems)
    if waiting and waiting == found.total_records:
        raise ImagemillError(
            f"no record is of version 2: {waiting} of Stage 1",
            where=root.stage2_jsonl,
            why="Stage 1 records hold their vector and have no latents",
            do="run `imagemill run`, which migrates them and packs the shards",
        )


def scanned(found: Readiness) -> dict[str, int]:
    """The counters of the scan."""
    return {
        "total_records": found.total_records,
        "ready_records": len(found.ready),
        "skipped_incomplete": found.skipped_incomplete,
        "filtered": found.filtered,
    }


def dry_run(inventory: Inventory, config: Config, ledger: Ledger, packing: Packing) -> DryRun:
    """What a run would count and meet. The disk stays as it is: a data root without a ledger gets none."""
    found, shard_set = plan_packing(inventory, config, ledger, packing)
    written = [plan for plan in shard_set.plans if not stays(shard_set, plan)]
    counts = {
        **scanned(found),
        "written_samples": sum(plan.samples for plan in written),
        "written_shards": sum(len(plan.shards) for plan in written),
    }
    return DryRun(counts, conflicts(shard_set))
