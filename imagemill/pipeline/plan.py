"""Which images an embedding pass has to look at. Values in, values out; folders are listed, no file is opened.

An image is *done* where the ledger vouches for its file (by stat triple) and for its source, and both belong together.
It is *refused* where the ledger says so of these very bytes. Everything else is a job: the worker opens what it needs and
either keeps, adopts or makes the file.

Source: CONTRACTS section 0, "Completion is validity", "Refused and failed", "Staleness".
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from imagemill.embedding_specs import EmbeddingSpec
from imagemill.files import StatTriple
from imagemill.formats.npy import NpyStore
from imagemill.ledger import CaptionRow, FileRow, Ledger, Problem, SourceRow
from imagemill.pipeline.scan import Scan, SourceFile

# Refusals of the image itself, which hold for every kind made from it.
IMAGE_REASONS = frozenset({"undecodable", "too_small", "too_large"})


@dataclass(frozen=True, slots=True)
class Job:
    """One image for one kind, with what is known of it beforehand.

    `facts`: the source as last read, only if it still has that stat triple; `present`: the stat triple of a file already
    there; `known`: the ledger's rows of this image's files, that one's and earlier ones'.
    """

    image_id: str
    file_name: str
    stat: StatTriple
    facts: SourceRow | None
    caption: str | None
    caption_fingerprint: str | None
    present: StatTriple | None
    known: tuple[FileRow, ...] = ()


@dataclass(slots=True)
class EmbeddingPlan:
    """What one pass does with the images it was given; every id is in exactly one list."""

    jobs: list[Job] = field(default_factory=list)
    done: list[FileRow] = field(default_factory=list)
    refused: list[Problem] = field(default_factory=list)
    absent: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Known:
    """The ledger's rows for some images, read once for a plan."""

    sources: Mapping[str, SourceRow]
    captions: Mapping[str, CaptionRow]
    refusals: Mapping[str, Sequence[Problem]]

    @classmethod
    def read(cls, ledger: Ledger, ids: Sequence[str] | None = None) -> "Known":
        refusals: dict[str, list[Problem]] = {}
        for problem in ledger.problems(ids):
            if problem.outcome == "refused":
                refusals.setdefault(problem.item, []).append(problem)
        return cls(ledger.sources(ids), ledger.captions(ids), refusals)

    def facts(self, source: SourceFile) -> SourceRow | None:
        """The source as last read, if it has not changed since."""
        row = self.sources.get(source.image_id)
        return row if row and row.stat == source.stat else None


def plan_embedding(
    spec: EmbeddingSpec,
    ids: Iterable[str],
    scan: Scan,
    known: Known,
    files: Mapping[tuple[str, StatTriple], FileRow],
    listing: Mapping[str, StatTriple],
) -> EmbeddingPlan:
    """Sort images into done, refused, absent and jobs.

    Args:
        files: the ledger's rows of this kind. listing: the files of this kind on disk, by image id.
    """
    plan = EmbeddingPlan()
    rows: dict[str, list[FileRow]] = defaultdict(list)
    for row in files.values():
        rows[row.image_id].append(row)
    for image_id in ids:
        source = scan.sources.get(image_id)
        if source is None:
            plan.absent.append(image_id)
            continue
        caption = known.captions.get(image_id)
        if refusal := _refusal(spec, source, caption, known):
            plan.refused.append(refusal)
            continue
        facts = known.facts(source)
        present = listing.get(image_id)
        row = files.get((image_id, present)) if present else None
        if row and facts and row.source == _wanted(spec, facts, caption):
            plan.done.append(row)
            continue
        plan.jobs.append(
            Job(
                image_id,
                source.file_name,
                source.stat,
                facts,
                caption.text if caption else None,
                caption.fingerprint if caption else None,
                present,
                tuple(rows.get(image_id, ())),
            )
        )
    return plan


def _wanted(spec: EmbeddingSpec, facts: SourceRow, caption: CaptionRow | None) -> str | None:
    """Fingerprint of what a current file of this kind is made from."""
    return facts.fingerprint if spec.source == "pixels" else (caption.fingerprint if caption else None)


def row_of_bytes(rows: Iterable[FileRow], content: str, stat: StatTriple, wanted: str | None) -> FileRow | None:
    """The row of a file that has been read whole, by its bytes: copied to another place it keeps its maker and its source.

    Args:
        rows: of one image and kind. wanted: the source to prefer, where equal bytes came of several.
    """
    same = [row for row in rows if row.content == content and row.source is not None]
    found = next((row for row in same if row.source == wanted), same[0] if same else None)
    return found and msgspec.structs.replace(found, stat=stat)


def _refusal(spec: EmbeddingSpec, source: SourceFile, caption: CaptionRow | None, known: Known) -> Problem | None:
    for problem in known.refusals.get(source.image_id, ()):
        if problem.stat == source.stat and problem.reason in IMAGE_REASONS:
            return problem
    if spec.source == "caption" and caption is None:
        return missing_caption(spec.kind, source)
    return None


def missing_caption(asset: str, source: SourceFile) -> Problem:
    return Problem(
        source.image_id,
        asset,
        "refused",
        "missing_caption",
        f"no caption for {source.file_name}" if source.caption is None else f"{source.image_id}.txt is blank",
        f"write one line of text to {source.image_id}.txt beside the image",
        source.stat,
    )


def plan_for(
    spec: EmbeddingSpec, ids: Sequence[str], scan: Scan, ledger: Ledger, listing: Mapping[str, StatTriple]
) -> EmbeddingPlan:
    """`plan_embedding` with the ledger's rows for these images."""
    return plan_embedding(spec, ids, scan, Known.read(ledger, ids), ledger.files(spec.kind, ids), listing)


def images_with_work(specs: Sequence[EmbeddingSpec], derived: Path, scan: Scan, ledger: Ledger) -> list[str]:
    """Images that lack a file of any of these kinds, or have an invalid or stale one, in name order."""
    wanted: set[str] = set()
    for spec in specs:
        plan = plan_for(spec, list(scan.sources), scan, ledger, NpyStore(derived / spec.folder, spec).listing())
        wanted.update(job.image_id for job in plan.jobs)
    return sorted(wanted)
