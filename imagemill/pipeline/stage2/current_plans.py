"""The plans of all kinds for the images of `approved/`, kept for the images that do not change. Plans are made in plan.py."""

from collections.abc import Iterator, Sequence, Set
from typing import NamedTuple

from imagemill.domain.embedding_specs import EmbeddingSpec, embedding_specs
from imagemill.pipeline.stage2.inventory import Inventory
from imagemill.pipeline.stage2.plan import EmbeddingPlan, Job, complete_images, plans_for
from imagemill.pipeline.stage2.record_index import state_of
from imagemill.store.ledger import Ledger

# A job takes about 500 bytes for each kind.
PLANNED_AT_ONCE = 16_384


class KeptPlans(NamedTuple):
    """Plans of all kinds for the images of `approved/`.

    Attributes:
        plans: the plans.
        awaited: images that are captioned first.
        state: of everything else that they were made from, but the listing and the ledger's rows of images.
        seen: the ledger's last row change before these rows were read.
    """

    plans: dict[EmbeddingSpec, EmbeddingPlan]
    awaited: Set[str]
    state: object
    seen: int


class JobsPart(NamedTuple):
    """The jobs of some images by kind. `last`: the part ends with this image, in order of all ids; None in the last part."""

    jobs: dict[EmbeddingSpec, list[Job]]
    last: str | None


def current_plans(
    inventory: Inventory, ledger: Ledger, awaited: Set[str], complete: Set[str] | None = None
) -> dict[EmbeddingSpec, EmbeddingPlan]:
    """Return the plans of the images of `approved/`: those made before, with new ones for the images that have changed since.

    `complete`: see `plans_for`.
    """
    seen, kept, sources = ledger.last_row_change(), inventory.kept, inventory.scan.sources
    # Records count only for images that are gone, and for vectors inside them.
    records = state_of(inventory.root.stage2_jsonl) if inventory.recorded.vectors else None
    state = ledger.path, sorted(ledger.settings().items()), records
    changed = ledger.row_changes_after(kept.seen) if isinstance(kept, KeptPlans) and kept.state == state else None
    if kept is None or changed is None:
        plans = plans_for(embedding_specs(), list(sources), inventory, ledger, awaited, complete)
    else:
        changed |= inventory.worked_on | (awaited ^ kept.awaited)
        plans = _renewed(kept.plans, sorted(changed & sources.keys()), inventory, ledger, awaited)
    inventory.kept = KeptPlans(plans, awaited, state, seen)
    return plans


def _renewed(
    plans: dict[EmbeddingSpec, EmbeddingPlan],
    ids: Sequence[str],
    inventory: Inventory,
    ledger: Ledger,
    awaited: Set[str],
) -> dict[EmbeddingSpec, EmbeddingPlan]:
    """Return the plans, with new ones for these images."""
    if not ids:
        return plans
    new, others = plans_for(plans, ids, inventory, ledger, awaited), set(ids)
    return {spec: plan.without(others) + new[spec] for spec, plan in plans.items()}


def all_jobs(
    specs: Sequence[EmbeddingSpec],
    inventory: Inventory,
    ledger: Ledger,
    awaited: Set[str] = frozenset(),
    complete: Set[str] | None = None,
) -> dict[EmbeddingSpec, list[Job]]:
    """Return, per kind, jobs for missing, invalid and stale files; for images that are gone too, if they have records.

    `complete`: see `plans_for`.
    """
    sources = inventory.scan.sources
    others = [image_id for image_id in inventory.recorded.lines if image_id not in sources]
    if set(specs) == set(embedding_specs()):
        plans = current_plans(inventory, ledger, awaited, complete)
    else:
        plans = plans_for(specs, list(sources), inventory, ledger, awaited, complete)
    if others:
        of_others = plans_for(specs, others, inventory, ledger, awaited)
        plans = {spec: plan + of_others[spec] for spec, plan in plans.items()}
    return _in_force(plans, inventory)


def jobs_in_parts(
    specs: Sequence[EmbeddingSpec], inventory: Inventory, ledger: Ledger, awaited: Set[str] = frozenset()
) -> Iterator[JobsPart]:
    """Yield the jobs of `all_jobs`, those of `PLANNED_AT_ONCE` images at a time, in order of their ids.

    The plans of few images are kept for `current_plans`.
    """
    complete = complete_images(specs, inventory, ledger, awaited)
    inventory.compared = {spec.kind: complete for spec in specs}
    rest = sorted({*inventory.scan.sources, *inventory.recorded.lines} - complete)
    if len(rest) <= PLANNED_AT_ONCE:
        yield JobsPart(all_jobs(specs, inventory, ledger, awaited, complete), None)
        return
    for begin in range(0, len(rest), PLANNED_AT_ONCE):
        ids, is_last = rest[begin : begin + PLANNED_AT_ONCE], begin + PLANNED_AT_ONCE >= len(rest)
        plans = plans_for(specs, ids, inventory, ledger, awaited, frozenset())
        yield JobsPart(_in_force(plans, inventory), None if is_last else ids[-1])


def _in_force(plans: dict[EmbeddingSpec, EmbeddingPlan], inventory: Inventory) -> dict[EmbeddingSpec, list[Job]]:
    """Return the jobs of plans by the kinds in force, those that failed earlier last."""
    return {inventory.in_force(spec): sorted(plan.jobs, key=lambda job: job.failed) for spec, plan in plans.items()}
