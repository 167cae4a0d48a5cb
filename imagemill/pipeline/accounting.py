"""Accounting: the outcome of every image of a data root.

    seen = embedded + up to date + refused + failed + waiting

An image counts once, by the worst of its kinds: refused > failed > waiting > embedded > up to date. Run summary, `status`,
UI metadata and JSON show these figures; the counters of a merge (`progress: …`) come from the same outcomes.

The list of inputs that did not reach the output is in problem_list.py, the whole status in status.py.

Spec: docs/spec/conventions.md#refused-and-failed, docs/spec/stage2.md#counters
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from imagemill.domain.embedding_specs import DINOV3, T5, EmbeddingSpec, embedding_specs
from imagemill.inputs.scan import Scan
from imagemill.inputs.sidecars import SIDECARS
from imagemill.inputs.survey import with_unread_captions
from imagemill.models import CAPTIONER
from imagemill.pipeline.stage2.current_plans import current_plans
from imagemill.pipeline.stage2.inventory import Inventory
from imagemill.pipeline.stage2.merge import ADDED, ASSET, MIGRATED, Merge
from imagemill.pipeline.stage2.plan import EmbeddingPlan, plans_for
from imagemill.store.ledger import FROM_METADATA, Ledger, Problem
from imagemill.store.ledger.overview import UP_TO_DATE, Listed
from imagemill.text.units import counted

Outcome = Literal["refused", "failed", "waiting", "embedded", "up_to_date"]

COUNTERS = ("refused", "failed", "waiting", "skipped", "migrated_new", "extracted", "enriched")
EXTRACTED = (DINOV3.kind, "extracted")
_DONE = ("up_to_date", "embedded")
_NEW = {(ASSET, ADDED), (ASSET, MIGRATED)}


class ImageCounts(msgspec.Struct, frozen=True):
    """Images by outcome; `seen` is the sum of the others."""

    seen: int = 0
    embedded: int = 0
    up_to_date: int = 0
    refused: int = 0
    failed: int = 0
    waiting: int = 0

    @classmethod
    def of(cls, outcomes: Iterable[Outcome], refused_names: int = 0) -> "ImageCounts":
        """Count outcomes, and image files that were refused by their names."""
        counts = Counter(outcomes)
        counts["refused"] += refused_names
        return cls(seen=counts.total(), **counts)

    def __str__(self) -> str:
        """`38 images seen: 23 embedded, 15 refused`; outcomes without images are left out."""
        parts = [
            f"{count:,} {name.replace('_', ' ')}"
            for name in ("embedded", "up_to_date", "refused", "failed", "waiting")
            if (count := getattr(self, name))
        ]
        return f"{counted(self.seen, 'image')} seen" + (f": {', '.join(parts)}" if parts else "")


@dataclass(slots=True)
class Standing:
    """State of the images of a data root, per embedding kind.

    `plans`: current plan of each kind. `problems`: those of the ledger that still hold. `left`: images whose record is
    still of Stage 1.
    """

    scan: Scan
    plans: dict[EmbeddingSpec, EmbeddingPlan]
    problems: list[Problem]
    left: Set[str] = field(default_factory=frozenset)

    @classmethod
    def read(
        cls,
        inventory: Inventory,
        ledger: Ledger,
        problems: Sequence[Problem],
        *,
        captioned: bool = False,
        records_only: bool = False,
    ) -> "Standing":
        """Plan every kind; no image and no npy is opened.

        Args:
            inventory: contents of the folders.
            ledger: rows of images, captions, files and problems.
            problems: those of the ledger that still hold.
            captioned: whether a captioner is configured: images without a caption wait for it.
            records_only: include images that exist only in records.
        """
        sources = inventory.scan.sources
        awaited = _awaiting_captions(inventory.scan, ledger) if captioned else frozenset[str]()
        if not inventory.surveyed:
            awaited |= _unread_captions(inventory.scan, ledger)
        plans = current_plans(inventory, ledger, awaited)
        if records_only:
            others = [image_id for image_id in inventory.recorded.lines if image_id not in sources]
            of_others = plans_for(embedding_specs(), others, inventory, ledger, awaited) if others else {}
            plans = {spec: plan + of_others[spec] if others else plan for spec, plan in plans.items()}
        return cls(inventory.scan, plans, _still_hold(problems, plans, awaited), frozenset(inventory.recorded.stage1))

    def outcomes(
        self, kinds: Collection[str], embedded: Set[str] = frozenset(), *, migrate: bool
    ) -> dict[str, Outcome]:
        """Return the outcome of each planned image, for these kinds.

        Args:
            kinds: requested embedding kinds.
            embedded: images for which a file was made.
            migrate: whether images whose record is still of Stage 1 count as waiting.
        """
        plans = [plan for spec, plan in self.plans.items() if spec.kind in kinds]
        found: dict[str, Outcome] = dict.fromkeys(_planned(self.plans.values()), "up_to_date")
        assets = {*kinds, *([ASSET] if migrate else []), *([CAPTIONER] if T5.kind in kinds else [])}
        problems = [p for p in self.problems if p.asset in assets]
        # A record needs a caption, even if T5 was not requested.
        refusing = [*plans, *([self.plans[T5]] if migrate and T5 in self.plans else [])]
        steps: list[tuple[Set[str], Outcome]] = [
            (embedded, "embedded"),
            ({job.image_id for plan in plans for job in plan.jobs} | (self.left if migrate else set()), "waiting"),
            ({p.item for p in problems if p.outcome == "failed"}, "failed"),
            ({p.item for p in problems if p.outcome == "refused"}, "refused"),
            ({p.item for plan in refusing for p in plan.refused}, "refused"),
        ]
        for ids, outcome in steps:  # the worst last
            found.update((image_id, outcome) for image_id in ids if image_id in found)
        return found

    def counts(self, outcomes: Mapping[str, Outcome]) -> ImageCounts:
        """Count the images of `approved/` by their outcomes."""
        seen: list[Outcome] = [outcomes[image_id] for image_id in outcomes if image_id in self.scan.sources]
        return ImageCounts.of(seen, len(self.scan.refused_images))

    def differing(
        self, outcomes: Mapping[str, Outcome], ledger: Ledger, recorded: Iterable[str]
    ) -> dict[str, Listed | None]:
        """Return the items of which the rows of the ledger alone do not tell file and outcome, see `Additions`.

        Args:
            outcomes: of all kinds. Embedded images count as up to date.
            ledger: rows of images.
            recorded: ids of records.
        """
        sources, files = self.scan.sources, dict(ledger.source_files())
        refused = {problem.item: Listed(problem.item, "refused") for problem in self.scan.refused_images}
        found: dict[str, Listed | None] = {
            **dict.fromkeys(files.keys() - sources.keys()),
            **dict.fromkeys(image_id for image_id in recorded if image_id not in files),
            **refused,
        }
        for image_id, source in sources.items():
            is_done = outcomes[image_id] in _DONE
            if not is_done or files.get(image_id) != source.file_name:
                found[image_id] = Listed(source.file_name, UP_TO_DATE if is_done else outcomes[image_id])
        return found


def _planned(plans: Iterable[EmbeddingPlan]) -> Iterator[str]:
    for plan in plans:
        yield from (job.image_id for job in plan.jobs)
        yield from plan.done
        yield from (problem.item for problem in plan.refused)
        yield from plan.absent


def _still_hold(
    problems: Collection[Problem], plans: Mapping[EmbeddingSpec, EmbeddingPlan], awaited: Set[str]
) -> list[Problem]:
    """Drop the problems of kinds that have a valid, current file, and missing captions that the captioner will write."""
    items = {p.item for p in problems}
    done = {spec.kind: items.intersection(plan.done) for spec, plan in plans.items()} if items else {}
    rest = (p for p in problems if p.item not in done.get(p.asset, ()))
    return [p for p in rest if p.reason != "missing_caption" or p.item not in awaited]


def _awaiting_captions(scan: Scan, ledger: Ledger) -> set[str]:
    """Return the images without a caption that wait for the captioner: it has neither refused nor failed them."""
    refused = {p.item for p in ledger.problems() if p.asset == CAPTIONER}
    return scan.sources.keys() - ledger.captioned_ids() - refused


def _unread_captions(scan: Scan, ledger: Ledger) -> set[str]:
    """Return the images with a caption file that no run has read, or that has changed since.

    A run that has read one without a text has recorded a problem of the file or of the image.
    """
    sources = scan.sources
    unread = {source.image_id for part in with_unread_captions(scan, ledger) for source in part}
    read = {
        p.item
        for p in ledger.problems(sorted(unread))
        if (p.asset == SIDECARS and p.stat == sources[p.item].caption)
        or (p.reason == "missing_caption" and p.stat == sources[p.item].stat)
    }
    # Whether such a file has been read is not recorded.
    of_rows = {row.image_id for row in ledger.captions(sorted(unread)).values() if row.origin == FROM_METADATA}
    return unread - read - of_rows


def embedded_images(changes: Mapping[str, Set[tuple[str, str]]]) -> set[str]:
    """Return the images for which an embedding file was made, according to the ledger's changes."""
    kinds = {spec.kind for spec in embedding_specs()}
    return {image_id for image_id, made in changes.items() if any(asset in kinds for asset, _ in made)}


# ---- counters of a merge


def count_merge(merge: Merge, ledger: Ledger, problems: Sequence[Problem]) -> dict[str, int]:
    """Count what happened since the last merge: counters over every image, and the outcomes of images seen.

    Call it after the records are written.

    Args:
        merge: parameters of the merge.
        ledger: contains the changes since the last merge.
        problems: those of the ledger that still hold.
    """
    changes = ledger.changes()
    standing = Standing.read(merge.inventory, ledger, problems, captioned=merge.captioned, records_only=True)
    kinds = [spec.kind for spec in standing.plans]
    images = standing.counts(standing.outcomes(kinds, embedded_images(changes), migrate=True))
    # A Stage 1 record without a caption counts as failed.
    failed = {p.item for p in problems if p.reason == "missing_caption" and p.item in standing.left and merge.migrate}
    outcomes = standing.outcomes(merge.kinds, migrate=merge.migrate)
    outcomes.update((image_id, "failed") for image_id in failed)
    # Images whose record became version 2 and whose files are all valid.
    done = [plan.done for plan in standing.plans.values()]
    complete = {image_id for image_id, made in changes.items() if made & _NEW}.intersection(*done)
    counts = Counter(_counter(outcomes[i], changes.get(i, frozenset()), i in complete) for i in outcomes)
    counts["refused"] += len(standing.scan.refused_images)
    return {
        **{name: counts[name] for name in COUNTERS},
        "total": counts.total(),
        **{f"images_{name}": count for name, count in msgspec.structs.asdict(images).items()},
    }


def _counter(outcome: Outcome, made: Set[tuple[str, str]], complete: bool) -> str:
    if outcome in ("refused", "failed") or (outcome == "waiting" and not made):
        return outcome
    if not made:
        return "skipped"
    if made & _NEW and complete:
        return "migrated_new"
    return "extracted" if made == {EXTRACTED} else "enriched"


def progress_line(counts: Mapping[str, int], seconds: float) -> str:
    """Return the line of counters (docs/spec/stage2.md#counters), with the rate of processed images."""
    made = counts["migrated_new"] + counts["enriched"] + counts["extracted"]
    rate = made / seconds if seconds else 0.0
    line = (
        f"progress: {counts['migrated_new']} migrated, {counts['enriched']} enriched, {counts['extracted']} extracted, "
        f"{counts['skipped']} skipped (total: {counts['total']}) rate={rate:.1f}/s failed={counts['failed']}"
    )
    return line + "".join(f" {name}={counts[name]}" for name in ("refused", "waiting") if counts.get(name))
