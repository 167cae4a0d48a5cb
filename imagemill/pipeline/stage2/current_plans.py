"""The plans of all kinds for the images of `approved/`, kept until something changes. Plans themselves are made in plan.py."""

from collections.abc import Sequence, Set
from typing import NamedTuple

from imagemill.domain.embedding_specs import EmbeddingSpec, embedding_specs
from imagemill.pipeline.stage2.inventory import Inventory
from imagemill.pipeline.stage2.plan import EmbeddingPlan, Job, plans_for
from imagemill.pipeline.stage2.record_index import state_of
from imagemill.store.ledger import Ledger

# Tables of the ledger that plans are made from.
_PLANNED_FROM = ("sources", "captions", "captioned", "files", "problems", "settings")


class KeptPlans(NamedTuple):
    """Plans of all kinds for the images of `approved/`. `state`: of everything that they were made from."""

    plans: dict[EmbeddingSpec, EmbeddingPlan]
    state: object


def current_plans(inventory: Inventory, ledger: Ledger, awaited: Set[str]) -> dict[EmbeddingSpec, EmbeddingPlan]:
    """Return the plans of the images of `approved/`: those made before, unless something has changed since."""
    state = id(ledger), ledger.state_of_tables(*_PLANNED_FROM), state_of(inventory.root.stage2_jsonl), awaited
    kept: KeptPlans | None = inventory.kept
    if kept is None or kept.state != state:
        plans = plans_for(embedding_specs(), list(inventory.scan.sources), inventory, ledger, awaited)
        inventory.kept = kept = KeptPlans(plans, state)
    return kept.plans


def all_jobs(
    specs: Sequence[EmbeddingSpec], inventory: Inventory, ledger: Ledger, awaited: Set[str] = frozenset()
) -> dict[EmbeddingSpec, list[Job]]:
    """Return, per kind, jobs for missing, invalid and stale files; for images that are gone too, if they have records."""
    sources = inventory.scan.sources
    others = [image_id for image_id in inventory.recorded.lines if image_id not in sources]
    if set(specs) == set(embedding_specs()):
        plans = current_plans(inventory, ledger, awaited)
    else:
        plans = plans_for(specs, list(sources), inventory, ledger, awaited)
    if others:
        of_others = plans_for(specs, others, inventory, ledger, awaited)
        plans = {spec: plan + of_others[spec] for spec, plan in plans.items()}
    return {inventory.in_force(spec): sorted(plans[spec].jobs, key=lambda job: job.failed) for spec in specs}
