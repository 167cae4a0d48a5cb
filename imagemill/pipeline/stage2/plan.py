"""Plan of an embedding pass: the images it has to process. Folders are listed; no file is opened.

An image is *done* if the ledger has a row with its file's signature, and the row's source is the current one. It is *refused* if
the ledger records a refusal of the same bytes. Everything else is a job: the worker opens what it needs and keeps, adopts or
makes the file. For an image that is gone, its record still provides the inputs that need no pixels: the vector inside a Stage 1
record, and the caption.
Spec: docs/spec/conventions.md#completion, docs/spec/conventions.md#staleness, docs/spec/conventions.md#refused-and-failed
"""

import functools
import sys
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import TypeVar

import msgspec

from imagemill.domain.embedding_specs import EmbeddingSpec
from imagemill.domain.ids import stem_of
from imagemill.domain.inputs import SRGB
from imagemill.formats.heif import heif_is_installed
from imagemill.formats.jsonl import Span
from imagemill.formats.npy import NpyStore
from imagemill.formats.tar import StoredSample
from imagemill.fs.fingerprints import FileSignature
from imagemill.inputs.scan import Scan
from imagemill.inputs.sidecars import SIDECARS
from imagemill.inputs.sources import SourceFile
from imagemill.parts import in_parts
from imagemill.pipeline.stage2.damage import damaged_files
from imagemill.pipeline.stage2.inventory import Inventory
from imagemill.pipeline.stage2.record_index import Recorded
from imagemill.store.inputs import PixelRule
from imagemill.store.ledger import SUPERSEDED, CaptionRow, FileRow, Ledger, Problem, SourceRow
from imagemill.store.provenance import model_key_of_adopted

T = TypeVar("T")

NOTHING_RECORDED = Recorded()

OUTDATED_CAPTION = "its caption was generated for an earlier image of this name"

# Failures of the model on one item.
MODEL_REASONS = frozenset({"model_error", "non_finite", "out_of_memory"})

# Refusals of the image itself, which hold for every kind made from it.
IMAGE_REASONS = frozenset({"undecodable", "too_small", "too_large", "hdr_transfer", "unsupported_type"})


@dataclass(frozen=True, slots=True)
class Job:
    """One image for one kind, with the data known before it is opened.

    `stat`: None, with an empty file name, if the image is gone; `facts`: the source as last read, only if its signature is still
    the same; `present`: the signature of an existing file; `known`: the ledger's rows of this image's files, current and earlier;
    `inline`: the Stage 1 record that contains this array; `failed`: whether the model failed on the same bytes in an earlier run;
    `suspect`: the file's bytes differ from the recorded ones (damage.py); `copies`: samples in shards that may contain those.
    `linkable`: whether a file of equal input exists (reuse.py). `size`: upright height and width in pixels by the image's header,
    if it has been read; of an image without `facts` only.
    """

    image_id: str
    file_name: str
    stat: FileSignature | None
    facts: SourceRow | None
    caption: str | None
    caption_fingerprint: str | None
    present: FileSignature | None
    known: tuple[FileRow, ...] = ()
    inline: Span | None = None
    failed: bool = False
    suspect: bool = False
    copies: tuple[StoredSample, ...] = ()
    linkable: bool = False
    size: tuple[int, int] | None = None

    @property
    def needs_model(self) -> bool:
        """Whether only a model can make this file: it does not exist, or it was made from an earlier source.

        A file without a row is read first and kept if valid; a damaged one may be restored from a tar.
        """
        if self.inline is not None or self.suspect or self.linkable:
            return False
        return self.present is None or any(row.stat == self.present for row in self.known)


@dataclass(slots=True)
class EmbeddingPlan:
    """Result of planning one pass; every id is in exactly one list."""

    jobs: list[Job] = field(default_factory=list)
    done: list[str] = field(default_factory=list)
    refused: list[Problem] = field(default_factory=list)
    absent: list[str] = field(default_factory=list)

    def __add__(self, other: "EmbeddingPlan") -> "EmbeddingPlan":
        """Return the plan of the images of both. It shares the lists that the other one adds nothing to."""
        return EmbeddingPlan(
            _together(self.jobs, other.jobs),
            _together(self.done, other.done),
            _together(self.refused, other.refused),
            _together(self.absent, other.absent),
        )

    def without(self, ids: Set[str]) -> "EmbeddingPlan":
        """Return the plan of the other images."""
        return EmbeddingPlan(
            [job for job in self.jobs if job.image_id not in ids],
            [image_id for image_id in self.done if image_id not in ids],
            [problem for problem in self.refused if problem.item not in ids],
            [image_id for image_id in self.absent if image_id not in ids],
        )


def _together(ours: list[T], theirs: list[T]) -> list[T]:
    return ours + theirs if theirs else ours


@dataclass(frozen=True, slots=True)
class LedgerSnapshot:
    """The ledger's rows for some images, read once for a plan.

    `outdated`: all images whose caption describes an earlier image; `failures`: kind, image and file signature on which a model
    failed. `damaged`: kind and image of files whose bytes differ from the recorded ones. `sidecars`: per image, why its sidecar
    is not used. `pixels`: the input that arrays of pixels must have. `moved`: by signature, rows of images of another name whose
    files have been moved: such a file is not read again.
    """

    sources: Mapping[str, SourceRow]
    captions: Mapping[str, CaptionRow]
    refusals: Mapping[str, Sequence[Problem]]
    outdated: Set[str] = frozenset()
    failures: Set[tuple[str, str, FileSignature | None]] = frozenset()
    damaged: Set[tuple[str, str]] = frozenset()
    sidecars: Mapping[str, Problem] = field(default_factory=dict)
    pixels: PixelRule = field(default_factory=PixelRule)
    moved: Mapping[FileSignature, SourceRow] = field(default_factory=dict)

    @classmethod
    def read(
        cls, ledger: Ledger, ids: Sequence[str] | None = None, listed: Iterable[SourceFile] = ()
    ) -> "LedgerSnapshot":
        """Read the rows of these images, or of all.

        Args:
            ledger: the ledger.
            ids: the images; None for all.
            listed: images to look for under another name if they have no row.
        """
        refusals: dict[str, list[Problem]] = {}
        failures = set()
        problems = ledger.problems(ids)
        for problem in problems:
            if problem.outcome == "refused":
                refusals.setdefault(problem.item, []).append(problem)
            elif problem.reason in MODEL_REASONS:
                failures.add((problem.asset, problem.item, problem.stat))
        sources = ledger.sources(ids)
        unknown = [source.stat for source in listed if source.image_id not in sources]
        return cls(
            sources,
            ledger.captions(ids),
            refusals,
            ledger.outdated_captions(),
            failures,
            damaged_files(problems),
            {problem.item: problem for problem in problems if problem.asset == SIDECARS},
            PixelRule.read(ledger),
            ledger.sources_at(unknown) if unknown else {},
        )

    def facts(self, source: SourceFile) -> SourceRow | None:
        """Return the source as last read, if it has not changed since and everything is known that planning needs."""
        row = self.sources.get(source.image_id)
        if row is None and (moved := self.moved.get(source.stat)):
            row = msgspec.structs.replace(moved, image_id=source.image_id, file_name=source.file_name)
        return row if source.is_known(row, self.pixels.color) else None


def plan_embedding(
    spec: EmbeddingSpec,
    ids: Iterable[str],
    scan: Scan,
    known: LedgerSnapshot,
    files: Mapping[tuple[str, FileSignature], FileRow],
    listing: Mapping[str, FileSignature],
    recorded: Recorded = NOTHING_RECORDED,
    awaited: Set[str] = frozenset(),
) -> EmbeddingPlan:
    """Sort images into done, refused, absent and jobs.

    Args:
        spec: the kind.
        ids: the images to sort.
        scan: contents of `approved/`.
        known: the ledger's rows of these images.
        files: the ledger's rows of this kind.
        listing: the files of this kind on disk, by image id.
        recorded: the existing records.
        awaited: images that are captioned first.
    """
    plan = EmbeddingPlan()
    vectors = recorded.vectors if spec.inline_field else {}
    of_caption = spec.source == "caption"
    for image_id in ids:
        source, caption = scan.sources.get(image_id), known.captions.get(image_id)
        inline, present = vectors.get(image_id), listing.get(image_id)
        suspect = present is not None and (spec.kind, image_id) in known.damaged
        if source is None:
            from_record = of_caption and caption is not None and image_id in recorded.lines
            if not (inline or suspect or from_record):
                plan.absent.append(image_id)
                continue
        waits = of_caption and image_id in awaited
        facts = known.facts(source) if source else None
        if source and not waits and (refusal := _refusal(spec, source, facts, caption, known)):
            plan.refused.append(refusal)
            continue
        row = files.get((image_id, present)) if present else None
        if (
            row
            and not waits
            and not suspect
            and row.model_key != SUPERSEDED
            and _is_current(row, spec, source, facts, caption, known.pixels)
        ):
            plan.done.append(image_id)
            continue
        plan.jobs.append(
            Job(
                image_id,
                source.file_name if source else "",
                source.stat if source else None,
                facts,
                caption.text if caption else None,
                caption.fingerprint if caption else None,
                present,
                inline=inline,
                failed=(spec.kind, image_id, source and source.stat) in known.failures,
                suspect=suspect,
            )
        )
    rows = _rows_of({job.image_id for job in plan.jobs}, files)
    plan.jobs = [replace(job, known=rows[job.image_id]) if job.image_id in rows else job for job in plan.jobs]
    # Earlier failures go last, so that a few such images do not stop the model before it reaches the others.
    plan.jobs.sort(key=lambda job: job.failed)
    return plan


def _rows_of(ids: Set[str], files: Mapping[tuple[str, FileSignature], FileRow]) -> Mapping[str, tuple[FileRow, ...]]:
    """Return the rows of files of these images by image."""
    rows: dict[str, tuple[FileRow, ...]] = {}
    for (image_id, _), row in files.items() if ids else ():
        if image_id in ids:
            rows[image_id] = (*rows.get(image_id, ()), row)
    return rows


def _is_current(
    row: FileRow,
    spec: EmbeddingSpec,
    source: SourceFile | None,
    facts: SourceRow | None,
    caption: CaptionRow | None,
    pixels: PixelRule,
) -> bool:
    """Return True if a recorded file was made from the current source; if the image is gone, its pixels cannot have changed."""
    if spec.source == "pixels":
        return source is None or (facts is not None and row.source is not None and pixels.is_current(row.source, facts))
    return (source is None or facts is not None) and caption is not None and row.source == caption.fingerprint


def adopted_row(
    store: NpyStore, image_id: str, rows: Iterable[FileRow], content: str, stat: FileSignature, wanted: str | None
) -> FileRow:
    """Return the row of a valid file without one; if an earlier file had equal bytes, keep its model key and source.

    Args:
        store: the folder of the kind.
        image_id: the image.
        rows: the rows of this image and kind.
        content: fingerprint of the file's bytes.
        stat: signature of the file.
        wanted: the source to prefer if equal bytes have several.
    """
    same = [row for row in rows if row.content == content and row.source is not None]
    found = next((row for row in same if row.source == wanted), same[0] if same else None)
    if found:
        return msgspec.structs.replace(found, stat=stat)
    return FileRow(store.spec.kind, image_id, stat, None, content, model_key_of_adopted(store, image_id))


def _refusal(
    spec: EmbeddingSpec,
    source: SourceFile,
    facts: SourceRow | None,
    caption: CaptionRow | None,
    known: LedgerSnapshot,
) -> Problem | None:
    if source.image_id in known.refusals and (problem := refused_image(source, known)):
        return problem
    if facts and (refused := spec.refuses(facts.height, facts.width)):
        return Problem(source.image_id, spec.kind, "refused", *refused, source.stat)
    if spec.source == "caption" and caption is None:
        outdated = source.image_id in known.outdated
        return unusable_sidecar(source, known.sidecars) or missing_caption(spec.kind, source, outdated=outdated)
    return None


def refused_image(source: SourceFile, known: LedgerSnapshot) -> Problem | None:
    """Return the refusal of this image's current bytes, by any asset."""
    refusals = known.refusals.get(source.image_id, ())
    return next((p for p in refusals if p.stat == source.stat and _still_refuses(p.reason, known.pixels)), None)


def _still_refuses(reason: str, pixels: PixelRule) -> bool:
    """Return whether a recorded refusal of an image holds with today's settings and libraries."""
    if reason == "hdr_transfer":
        return pixels.color == SRGB
    if reason == "unsupported_type":
        return not heif_is_installed()
    return reason in IMAGE_REASONS


def unusable_sidecar(source: SourceFile, sidecars: Mapping[str, Problem]) -> Problem | None:
    """Return why the present sidecar cannot be used: the only row of an image without another caption."""
    problem = sidecars.get(source.image_id)
    return problem if problem and problem.stat == source.caption else None


def missing_caption(asset: str, source: SourceFile, *, outdated: bool = False) -> Problem:
    """Return the problem of an image without a caption. `outdated`: its caption describes an earlier image."""
    lacking = f"no caption for {source.file_name}" if source.caption is None else f"{source.captions[0]} is blank"
    return Problem(
        source.image_id,
        asset,
        "refused",
        "missing_caption",
        OUTDATED_CAPTION if outdated else lacking,
        f"write one line of text to {stem_of(source.file_name.rpartition('/')[2])}.txt beside the image",
        source.stat,
    )


def plan_for(
    spec: EmbeddingSpec, ids: Sequence[str], inventory: Inventory, ledger: Ledger, awaited: Set[str] = frozenset()
) -> EmbeddingPlan:
    """Call `plan_embedding` with the inventory's listings and the ledger's rows for these images."""
    return plans_for([spec], ids, inventory, ledger, awaited)[spec]


def plans_for(
    specs: Iterable[EmbeddingSpec],
    ids: Sequence[str],
    inventory: Inventory,
    ledger: Ledger,
    awaited: Set[str] = frozenset(),
    complete: Set[str] | None = None,
) -> dict[EmbeddingSpec, EmbeddingPlan]:
    """Call `plan_embedding` for several kinds, with one reading of the ledger's rows for these images.

    If they are most of the folder, and most of them are complete, only the rows of the others are read. `complete`: those of
    `complete_images`, if they are known.
    """
    scan, recorded = inventory.scan, inventory.recorded
    plans: dict[EmbeddingSpec, EmbeddingPlan] = {declared: EmbeddingPlan() for declared in specs}
    # To read all rows takes less time than to look up most of them.
    if complete is None and 2 * len(ids) > len(scan.sources):
        complete = complete_images(plans, inventory, ledger, awaited)
    if complete:
        done = [image_id for image_id in ids if image_id in complete]
        plans = {declared: EmbeddingPlan(done=done) for declared in plans}
        ids = [image_id for image_id in ids if image_id not in complete]
    rows = None if 2 * len(ids) > len(scan.sources) else ids
    known = LedgerSnapshot.read(ledger, rows, (scan.sources[i] for i in ids if i in scan.sources))
    for declared, plan in plans.items():
        spec = inventory.in_force(declared)
        files, listing = ledger.files(spec.kind, rows), inventory.files(spec)
        plans[declared] = plan + plan_embedding(spec, ids, scan, known, files, listing, recorded, awaited)
    return plans


def complete_images(
    specs: Iterable[EmbeddingSpec], inventory: Inventory, ledger: Ledger, awaited: Set[str] = frozenset()
) -> set[str]:
    """Return images that `plan_embedding` calls done in every kind; not all of them. `awaited`: images that are captioned first.

    It compares columns of the ledger, which takes a fifth of the time of making rows of them, those of some images at a time.
    After a command that left nothing to do, only the images that have changed since are compared.
    """
    problems = {problem.item for problem in ledger.problems()}
    if (in_question := inventory.in_question(ledger)) is not None:
        return set(inventory.scan.sources.keys()).difference(in_question, problems, awaited)
    specs = [inventory.in_force(spec) for spec in specs]
    rule, refuses = PixelRule.read(ledger), functools.cache(lambda *size: any(spec.refuses(*size) for spec in specs))
    ending = functools.cache(rule.ending)
    sources, left_out = inventory.scan.sources, awaited | problems
    listings = {spec: inventory.files(spec) for spec in specs}
    complete: set[str] = set()
    for part in in_parts(ledger.as_read()):
        pixels: dict[str, str] = {}
        for image_id, signature, fingerprint, color, height, width in part:
            source, end = sources.get(image_id), ending(color)
            if source and source.stat == signature and end is not None and not refuses(height, width):
                pixels[image_id] = fingerprint + end
        ids = part[0][0], part[-1][0]
        captions, found = ledger.caption_fingerprints(*ids), pixels.keys() - left_out
        for spec, listing in listings.items():
            inputs = captions if spec.source == "caption" else pixels
            found &= {
                image_id
                for image_id, signature, source in ledger.file_inputs(spec.kind, *ids)
                if listing.get(image_id) == signature and inputs.get(image_id) == source
            }
        complete.update(map(sys.intern, found))
    return complete


def ids_of(jobs: Mapping[EmbeddingSpec, Iterable[Job]]) -> list[str]:
    """Return the image ids of all jobs, sorted, each once."""
    return sorted({job.image_id for of_kind in jobs.values() for job in of_kind})
