"""The plans of all kinds for the images of `approved/`, which a command makes once and then continues.

A run over a hundred new images leaves the plans of the others as they were. Plans themselves are made in plan.py.
"""

from collections.abc import Sequence, Set
from typing import NamedTuple

from imagemill.domain.embedding_specs import EmbeddingSpec, embedding_specs
from imagemill.pipeline.stage2.inventory import Inventory
from imagemill.pipeline.stage2.plan import EmbeddingPlan, Job, plans_for
from imagemill.pipeline.stage2.record_index import state_of
from imagemill.store.inputs import PixelRule
from imagemill.store.ledger import Ledger

# Tables of the ledger that plans are made from.
_PLANNED_FROM = ("sources", "captions", "captioned", "files", "problems", "settings")


class KeptPlans(NamedTuple):
    """Plans of all kinds for the images of `approved/`, and what they were made from.

    Attributes:
        plans: plan of each kind.
        state: of everything that plans depend on.
        awaited: images that are captioned first.
        version: `Ledger.version_seen`.
        pixels: the input that arrays of pixels must have.
    """

    plans: dict[EmbeddingSpec, EmbeddingPlan]
    state: object
    awaited: Set[str]
    version: int
    pixels: PixelRule


def current_plans(inventory: Inventory, ledger: Ledger, awaited: Set[str]) -> dict[EmbeddingSpec, EmbeddingPlan]:
    """Return the plans of the images of `approved/`: those made before, with new ones for the images that may have changed."""
    state = id(ledger), ledger.state_of_tables(*_PLANNED_FROM), state_of(inventory.root.stage2_jsonl), awaited
    kept: KeptPlans | None = inventory.kept
    if kept is None or kept.state != state:
        changed = None if kept is None else _changed(kept, inventory, ledger, awaited)
        ids = [image_id for image_id in inventory.scan.sources if changed is None or image_id in changed]
        plans = plans_for(embedding_specs(), ids, inventory, ledger, awaited)
        if kept and changed is not None:
            for spec, plan in plans.items():
                plan.done += (image_id for image_id in kept.plans[spec].done if image_id not in changed)
        version, pixels = ledger.version_seen(), PixelRule.read(ledger)
        inventory.kept = kept = KeptPlans(plans, state, awaited, version, pixels)
    return kept.plans


def _changed(kept: KeptPlans, inventory: Inventory, ledger: Ledger, awaited: Set[str]) -> set[str] | None:
    """Return the images whose plans may no longer be the kept ones; None if they are more than half, or unknown.

    An image that was done in every kind stays done unless a step of this command has worked on it, a problem names it, or a
    file is not the recorded one.
    """
    unknown = kept.version != ledger.version_seen() or kept.pixels != PixelRule.read(ledger)
    if unknown or ledger.regenerating() or inventory.recorded.vectors or kept.plans.keys() != set(embedding_specs()):
        return None
    sources = inventory.scan.sources.keys()
    done = set.intersection(*(set(plan.done) for plan in kept.plans.values()))
    changed = (sources - done) | inventory.worked_on | (awaited ^ kept.awaited)
    changed.update(problem.item for problem in ledger.problems())
    for spec in map(inventory.in_force, kept.plans):
        listing, recorded = inventory.files(spec), ledger.file_states(spec.kind)
        changed.update(image_id for image_id in done if (image_id, listing.get(image_id)) not in recorded)
    return changed if 2 * len(changed) <= len(sources) else None


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
