"""What became of each image since the last merge: one counter per image, the first that fits.

    failed · skipped · migrated_new · extracted · enriched        their sum is the total

Source: seed 002, decision 8; CONTRACTS section 1, "counters".
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Set

from imagemill.embedding_specs import DINOV3, T5, embedding_specs
from imagemill.formats.npy import NpyStore
from imagemill.pipeline.stage2.merge import ADDED, ASSET, MIGRATED, Merge
from imagemill.pipeline.stage2.plan import plan_for
from imagemill.pipeline.stage2.recorded import read_recorded
from imagemill.pipeline.stage2.scan import SIDECARS, SOURCE_ASSET, is_image
from imagemill.pipeline.story import current_problems
from imagemill.store.ledger import Ledger

COUNTERS = ("failed", "skipped", "migrated_new", "extracted", "enriched")
EXTRACTED = (DINOV3.kind, "extracted")
_NEW = {(ASSET, ADDED), (ASSET, MIGRATED)}


def newly_version_2(changes: Mapping[str, Set[tuple[str, str]]]) -> list[str]:
    """Images whose record became version 2: of them it matters whether their files are all valid."""
    return [image_id for image_id, made in changes.items() if made & _NEW]


def count_images(
    items: Iterable[str],
    changes: Mapping[str, Set[tuple[str, str]]],
    failed: Collection[str],
    complete: Collection[str],
) -> dict[str, int]:
    """Count each item once.

    Args:
        items: every image there is, also those refused by their names and those that only a record knows.
        changes: what was made of which image. failed: images that were refused or failed, for the passes asked.
        complete: of the images with a new record those whose files are all valid.
    """
    counts = Counter(_counter(item, changes.get(item, frozenset()), failed, complete) for item in items)
    return {name: counts[name] for name in COUNTERS} | {"total": counts.total()}


def _counter(item: str, made: Set[tuple[str, str]], failed: Collection[str], complete: Collection[str]) -> str:
    if item in failed:
        return "failed"
    if not made:
        return "skipped"
    if made & _NEW and item in complete:
        return "migrated_new"
    return "extracted" if made == {EXTRACTED} else "enriched"


def count_merge(merge: Merge, ledger: Ledger) -> dict[str, int]:
    """`count_images` for everything that was done since the last merge; call it once the records are written."""
    scan, changes = merge.scan, ledger.changes()
    named = [p.item for p in scan.problems if is_image(p.item)]
    gone = [image_id for image_id in read_recorded(merge.root.stage2_jsonl).lines if image_id not in scan.sources]
    return count_images(
        [*scan.sources, *named, *gone], changes, _failed(merge, ledger), _complete(merge, ledger, changes)
    )


def _failed(merge: Merge, ledger: Ledger) -> set[str]:
    asked = {*merge.kinds, SOURCE_ASSET, *([ASSET] if merge.migrate else [])}
    problems = current_problems(merge.scan, ledger)
    failed = {p.item for p in problems if p.asset in asked}
    if asked & {T5.kind, ASSET}:  # an unusable sidecar is the only row of an image without another caption
        failed |= {p.item for p in problems if p.asset == SIDECARS} - ledger.captions().keys()
    return failed


def _complete(merge: Merge, ledger: Ledger, changes: Mapping[str, Set[tuple[str, str]]]) -> set[str]:
    """Of the images with a new record those whose files are all there and valid."""
    ids = newly_version_2(changes)
    recorded = read_recorded(merge.root.stage2_jsonl)
    for spec in embedding_specs() if ids else ():
        listing = NpyStore(merge.root.derived / spec.folder, spec).listing()
        ids = [row.image_id for row in plan_for(spec, ids, merge.scan, ledger, listing, recorded).done]
    return set(ids)


def progress_line(counts: Mapping[str, int], seconds: float) -> str:
    """The line that seed 002 shows, with the rate of images that were worked on."""
    made = counts["migrated_new"] + counts["enriched"] + counts["extracted"]
    rate = made / seconds if seconds else 0.0
    return (
        f"progress: {counts['migrated_new']} migrated, {counts['enriched']} enriched, {counts['extracted']} extracted, "
        f"{counts['skipped']} skipped (total: {counts['total']}) rate={rate:.1f}/s failed={counts['failed']}"
    )
