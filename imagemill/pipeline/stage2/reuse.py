"""Reuse of files by content: a missing array is linked from a file of the same kind, model and input.

    jobs ──inputs known, or sizes of images not opened yet──> ledger ──> files made from equal inputs, by input
                                                                              └──> the worker links one of them (embed.py)

Spec: docs/spec/stage2.md#reuse
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from imagemill.domain.embedding_specs import EmbeddingSpec
from imagemill.fs.fingerprints import signature_bytes
from imagemill.pipeline.stage2.damage import damaged_files
from imagemill.pipeline.stage2.plan import Job
from imagemill.store.inputs import PixelRule
from imagemill.store.ledger import SUPERSEDED, FileRow, Ledger, SourceRow
from imagemill.store.provenance import UNKNOWN, UNKNOWN_PREVIEW, RecordedModels, read_recorded_models

# Photographs of equal size in bytes are rare: a thousand random ones have a few such pairs.
MOST_OF_A_SIZE = 32

# Files that may be linked, by the fingerprint of their input; the preferred one first.
Donors = Mapping[str, tuple[FileRow, ...]]


def find_donors(spec: EmbeddingSpec, jobs: Sequence[Job], ledger: Ledger, *, preview: bool = False) -> Donors:
    """Return the recorded files that were made from the inputs of these jobs. No file is opened.

    The input of an image that has not been opened is not known. Any recorded image of the same size in bytes may be equal; if
    more than `MOST_OF_A_SIZE` have it, none is looked at, because the rows of all images would be read for every range.

    Args:
        spec: the kind.
        jobs: images of which a file is missing, invalid or stale.
        ledger: rows of images and files.
        preview: whether the configured model is a preview model, whose adopted files may be linked too.
    """
    if not jobs or spec.kind in ledger.regenerating():
        return {}
    pixels = PixelRule.read(ledger)
    inputs = {input_of(spec, job.facts, job.caption_fingerprint, pixels) for job in jobs}
    sizes = {signature_bytes(job.stat) for job in jobs if job.stat and job.facts is None}
    if spec.source == "pixels" and sizes:
        inputs.update(row.pixel_input(pixels.color) for row in ledger.sources_of_sizes(sizes, MOST_OF_A_SIZE))
    if not (known := sorted(each for each in inputs if each is not None)):
        return {}
    models = read_recorded_models(ledger, spec.kind)
    rows = list(ledger.files_of_inputs(spec.kind, known))
    damaged = damaged_files(ledger.problems([row.image_id for row in rows])) if rows else frozenset()
    # Names of one file share its bytes.
    unusable = {row.stat for row in rows if (spec.kind, row.image_id) in damaged}
    return _preferred(models, preview, (row for row in rows if row.stat not in unusable))


def _preferred(models: RecordedModels, preview: bool, rows: Iterable[FileRow]) -> Donors:
    """Sort the rows of usable models by input: files of a known model first, then by image id."""
    known = {models.recorded.key} if models.recorded else models.keys - {SUPERSEDED, UNKNOWN, UNKNOWN_PREVIEW}
    usable = known | {UNKNOWN} | ({UNKNOWN_PREVIEW} if preview else set())
    found: dict[str, list[FileRow]] = defaultdict(list)
    for row in rows:
        if row.model_key in usable and row.source is not None:
            found[row.source].append(row)
    return {
        source: tuple(sorted(each, key=lambda row: (row.model_key not in known, row.image_id)))
        for source, each in found.items()
    }


def input_of(
    spec: EmbeddingSpec, facts: SourceRow | None, caption_fingerprint: str | None, pixels: PixelRule
) -> str | None:
    """Return the fingerprint of the input that an image's file must have; None if it is not known."""
    if spec.source == "caption":
        return caption_fingerprint
    return facts.pixel_input(pixels.color) if facts else None


def mark_linkable(spec: EmbeddingSpec, jobs: Iterable[Job], donors: Donors, pixels: PixelRule) -> list[Job]:
    """Return the jobs; those with a file that is known to have their input are marked, as they need no model and no space."""

    def mark(job: Job) -> Job:
        known = input_of(spec, job.facts, job.caption_fingerprint, pixels)
        others = (row for row in donors.get(known or "", ()) if row.image_id != job.image_id)
        return replace(job, linkable=True) if next(others, None) else job

    return [mark(job) for job in jobs] if donors else list(jobs)
