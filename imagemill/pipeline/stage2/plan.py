"""Which images an embedding pass has to look at. Values in, values out; folders are listed, no file is opened.

An image is *done* where the ledger vouches for its file (by stat triple) and for its source, and both belong together.
It is *refused* where the ledger says so of these very bytes. Everything else is a job: the worker opens what it needs and
either keeps, adopts or makes the file. Of an image that is gone, its record still gives what needs no pixels: the vector
inside a Stage 1 record, the caption's hidden state.

Spec: docs/spec/conventions.md#completion, docs/spec/conventions.md#staleness, docs/spec/conventions.md#refused-and-failed
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field

import msgspec

from imagemill.domain.embedding_specs import EmbeddingSpec
from imagemill.formats.npy import NpyStore
from imagemill.formats.tar import StoredSample
from imagemill.fs.fingerprints import FileSignature
from imagemill.pipeline.stage2.damage import damaged_files
from imagemill.pipeline.stage2.inventory import Inventory
from imagemill.pipeline.stage2.record_index import Recorded, Span
from imagemill.pipeline.stage2.scan import SIDECARS, Scan, SourceFile
from imagemill.store.ledger import SUPERSEDED, CaptionRow, FileRow, Ledger, Problem, SourceRow
from imagemill.store.provenance import maker_of_adopted

NOTHING_RECORDED = Recorded()

OUTDATED_CAPTION = "its caption is by a model, of the image that was there before"

# Failures of the model on one item.
MODEL_REASONS = frozenset({"model_error", "non_finite"})

# Refusals of the image itself, which hold for every kind made from it.
IMAGE_REASONS = frozenset({"undecodable", "too_small", "too_large"})


@dataclass(frozen=True, slots=True)
class Job:
    """One image for one kind, with what is known of it beforehand.

    `stat`: None, and no file name, where the image is gone; `facts`: the source as last read, only if it still has that stat
    triple; `present`: the stat triple of a file already there; `known`: the ledger's rows of this image's files, that one's
    and earlier ones'; `inline`: the Stage 1 record that holds this array; `failed`: whether the model could not take these very
    bytes in an earlier run; `suspect`: the file has other bytes than recorded (damage.py), `copies`: samples in the shards that
    may hold the recorded ones.
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

    @property
    def needs_model(self) -> bool:
        """Whether only a model can make this file: it does not exist, or it was made from an earlier source.

        A file that is not the recorded one is read first, and kept if it is valid; a damaged one may be restored from a tar.
        """
        if self.inline is not None or self.suspect:
            return False
        return self.present is None or any(row.stat == self.present for row in self.known)


@dataclass(slots=True)
class EmbeddingPlan:
    """What one pass does with the images it was given; every id is in exactly one list."""

    jobs: list[Job] = field(default_factory=list)
    done: list[FileRow] = field(default_factory=list)
    refused: list[Problem] = field(default_factory=list)
    absent: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class LedgerSnapshot:
    """The ledger's rows for some images, read once for a plan.

    `outdated`: any image whose caption is of an earlier picture; `failures`: kind, image and bytes that a model could not take.
    `damaged`: kind and image of files with other bytes than recorded. `sidecars`: per image, why its sidecar is not used.
    """

    sources: Mapping[str, SourceRow]
    captions: Mapping[str, CaptionRow]
    refusals: Mapping[str, Sequence[Problem]]
    outdated: Set[str] = frozenset()
    failures: Set[tuple[str, str, FileSignature | None]] = frozenset()
    damaged: Set[tuple[str, str]] = frozenset()
    sidecars: Mapping[str, Problem] = field(default_factory=dict)

    @classmethod
    def read(cls, ledger: Ledger, ids: Sequence[str] | None = None) -> "LedgerSnapshot":
        refusals: dict[str, list[Problem]] = {}
        failures = set()
        problems = ledger.problems(ids)
        for problem in problems:
            if problem.outcome == "refused":
                refusals.setdefault(problem.item, []).append(problem)
            elif problem.reason in MODEL_REASONS:
                failures.add((problem.asset, problem.item, problem.stat))
        return cls(
            ledger.sources(ids),
            ledger.captions(ids),
            refusals,
            ledger.outdated_captions(),
            failures,
            damaged_files(problems),
            {problem.item: problem for problem in problems if problem.asset == SIDECARS},
        )

    def facts(self, source: SourceFile) -> SourceRow | None:
        """The source as last read, if it has not changed since."""
        row = self.sources.get(source.image_id)
        return row if row and row.stat == source.stat else None


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
        files: the ledger's rows of this kind. listing: the files of this kind on disk, by image id.
        recorded: the records there are. awaited: images that are to be captioned first.
    """
    plan = EmbeddingPlan()
    rows: dict[str, list[FileRow]] = defaultdict(list)
    for row in files.values():
        rows[row.image_id].append(row)
    vectors = recorded.vectors if spec.inline_field else {}
    for image_id in ids:
        source, caption = scan.sources.get(image_id), known.captions.get(image_id)
        inline, present = vectors.get(image_id), listing.get(image_id)
        suspect = present is not None and (spec.kind, image_id) in known.damaged
        from_record = spec.source == "caption" and caption is not None and image_id in recorded.lines
        if source is None and not (inline or suspect or from_record):
            plan.absent.append(image_id)
            continue
        waits = spec.source == "caption" and image_id in awaited
        if source and not waits and (refusal := _refusal(spec, source, caption, known)):
            plan.refused.append(refusal)
            continue
        facts = known.facts(source) if source else None
        row = files.get((image_id, present)) if present else None
        if (
            row
            and not waits
            and not suspect
            and row.maker != SUPERSEDED
            and _is_current(row, spec, source, facts, caption)
        ):
            plan.done.append(row)
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
                tuple(rows.get(image_id, ())),
                inline,
                (spec.kind, image_id, source and source.stat) in known.failures,
                suspect,
            )
        )
    # What failed before comes last: a few such images must not keep the model from the others.
    plan.jobs.sort(key=lambda job: job.failed)
    return plan


def _is_current(
    row: FileRow, spec: EmbeddingSpec, source: SourceFile | None, facts: SourceRow | None, caption: CaptionRow | None
) -> bool:
    """Whether a file the ledger vouches for is made from what is there now; of pixels that are gone, nothing is newer."""
    if spec.source == "pixels":
        return source is None or (facts is not None and row.source == facts.fingerprint)
    return (source is None or facts is not None) and caption is not None and row.source == caption.fingerprint


def adopted_row(
    store: NpyStore, image_id: str, rows: Iterable[FileRow], content: str, stat: FileSignature, wanted: str | None
) -> FileRow:
    """Return the row of a valid file that the ledger does not know: of equal bytes, it keeps their maker and source.

    Args:
        rows: of this image and kind. wanted: the source to prefer if equal bytes came of several.
    """
    same = [row for row in rows if row.content == content and row.source is not None]
    found = next((row for row in same if row.source == wanted), same[0] if same else None)
    if found:
        return msgspec.structs.replace(found, stat=stat)
    return FileRow(store.spec.kind, image_id, stat, None, content, maker_of_adopted(store, image_id))


def _refusal(
    spec: EmbeddingSpec, source: SourceFile, caption: CaptionRow | None, known: LedgerSnapshot
) -> Problem | None:
    if problem := refused_image(source, known):
        return problem
    if spec.source == "caption" and caption is None:
        outdated = source.image_id in known.outdated
        return unusable_sidecar(source, known.sidecars) or missing_caption(spec.kind, source, outdated=outdated)
    return None


def refused_image(source: SourceFile, known: LedgerSnapshot) -> Problem | None:
    """The refusal of these very bytes, whichever asset met them."""
    refusals = known.refusals.get(source.image_id, ())
    return next((p for p in refusals if p.stat == source.stat and p.reason in IMAGE_REASONS), None)


def unusable_sidecar(source: SourceFile, sidecars: Mapping[str, Problem]) -> Problem | None:
    """Return why the sidecar that is there now cannot be used: the only row of an image without another caption."""
    problem = sidecars.get(source.image_id)
    return problem if problem and problem.stat == source.caption else None


def missing_caption(asset: str, source: SourceFile, *, outdated: bool = False) -> Problem:
    """`outdated`: there is a caption, of another picture."""
    lacking = f"no caption for {source.file_name}" if source.caption is None else f"{source.image_id}.txt is blank"
    return Problem(
        source.image_id,
        asset,
        "refused",
        "missing_caption",
        OUTDATED_CAPTION if outdated else lacking,
        f"write one line of text to {source.image_id}.txt beside the image",
        source.stat,
    )


def plan_for(
    spec: EmbeddingSpec, ids: Sequence[str], inventory: Inventory, ledger: Ledger, awaited: Set[str] = frozenset()
) -> EmbeddingPlan:
    """`plan_embedding` with what is listed, and the ledger's rows for these images."""
    known, files = LedgerSnapshot.read(ledger, ids), ledger.files(spec.kind, ids)
    return plan_embedding(spec, ids, inventory.scan, known, files, inventory.files(spec), inventory.recorded, awaited)


def all_jobs(
    specs: Sequence[EmbeddingSpec], inventory: Inventory, ledger: Ledger, awaited: Set[str] = frozenset()
) -> dict[EmbeddingSpec, list[Job]]:
    """Per kind, the images that lack its file, or have an invalid or stale one; images that are gone too, by their records."""
    sources = inventory.scan.sources
    ids = [*sources, *(image_id for image_id in inventory.recorded.lines if image_id not in sources)]
    return {spec: plan_for(spec, ids, inventory, ledger, awaited).jobs for spec in specs}


def ids_of(jobs: Mapping[EmbeddingSpec, Iterable[Job]]) -> list[str]:
    return sorted({job.image_id for of_kind in jobs.values() for job in of_kind})
