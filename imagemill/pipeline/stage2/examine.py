"""Decisions about an image before a model is needed: its file is kept, adopted, restored, extracted or linked, or it is refused.

A job that needs the model comes out as a `Needed`. The model is in embed.py; publish.py gives staged files their final names.
Spec: docs/spec/conventions.md#completion, docs/spec/stage2.md#reuse
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np

from imagemill.domain.embedding_specs import EmbeddingSpec
from imagemill.errors import ImagemillError, InvalidNpy, Refused
from imagemill.formats.npy import NpyStore, check_npy_header, npy_header
from imagemill.fs.fingerprints import FileSignature, file_signature, fingerprint, has_content
from imagemill.fs.folders import SourceFolder
from imagemill.pipeline.stage2.damage import DAMAGED, damaged_file
from imagemill.pipeline.stage2.image_metadata import inspect_image
from imagemill.pipeline.stage2.plan import Job, adopted_row
from imagemill.pipeline.stage2.reuse import Donors
from imagemill.pipeline.stage2.stage1 import Unusable, read_vector
from imagemill.store.inputs import PixelRule
from imagemill.store.ledger import FileRow, SourceRow
from imagemill.store.provenance import UNKNOWN, UNKNOWN_PREVIEW, ModelIdentity

Outcome = Literal["computed", "linked", "extracted", "restored", "kept", "adopted", "refused", "failed"]


@dataclass(slots=True)
class EmbedRow:
    """The outcome of one job: a few hundred bytes, unless it carries an array.

    `stat`: of the image, None if it is gone. `replaced`: why the previous data was rejected (a file: `truncated`, `stale`, …; a
    Stage 1 record's vector: `unusable_vector`). `staged`: the temporary file to publish. `calls`: model calls that this row's
    batch took, on one row of each batch; `divided`: 1 there if the batch did not fit into memory. `identity`: of the model that
    made the file in this pass. `array`: of a worker that sees no folder of files, until it is staged; `empty_caption`: the
    state of the empty caption by the same model, on one row of such a worker.
    """

    image_id: str
    outcome: Outcome
    stat: FileSignature | None
    source: SourceRow | None = None
    caption_fingerprint: str | None = None
    file: FileRow | None = None
    staged: Path | None = None
    replaced: str | None = None
    reason: str = ""
    detail: str = ""
    remedy: str = ""
    calls: int = 0
    divided: int = 0
    facts: dict[str, Any] = field(default_factory=dict)
    identity: ModelIdentity | None = None
    array: np.ndarray | None = None
    empty_caption: np.ndarray | None = None


class Needed(NamedTuple):
    """A job that needs the model.

    Attributes:
        job: the job.
        source: the image as it was read; None if the image is gone, or is left for the worker to read.
        pixels: uint8 (H, W, 3), if the image was read for its source row.
        replaced: why the previous data was rejected.
    """

    job: Job
    source: SourceRow | None
    pixels: np.ndarray | None
    replaced: str | None


@dataclass(kw_only=True, eq=False)
class Examiner:
    """Decides about the jobs of one kind, on threads of the process that sees the data root.

    Args:
        spec: the kind.
        approved: folder of images.
        store: folder of the files.
        preview: whether the model is a preview model.
        pixels: how pixels are read, and the input that files must have.
        donors: files that may be linked instead of making equal ones.
        extract_only: take vectors out of Stage 1 records, and need no model.
        regenerate: make every file again, even if a valid one exists.
    """

    spec: EmbeddingSpec
    approved: SourceFolder
    store: NpyStore
    preview: bool
    pixels: PixelRule = field(default_factory=PixelRule)
    donors: Donors = field(default_factory=dict)
    extract_only: bool = False
    regenerate: bool = False

    def examine(self, job: Job, *, reads_elsewhere: bool = False) -> EmbedRow | Needed:
        """Return the row of a job that needs no model, or what the model needs.

        Args:
            job: the job.
            reads_elsewhere: leave an image that only the model needs to the worker, which reads it for its source row too.

        Raises:
            Refused: as `inspect_image`, or if the settings of the kind refuse images of this size.
            OSError: if the disk fails.
        """
        if reads_elsewhere and job.facts is None and self._is_new(job):
            return Needed(job, None, None, None)
        facts, pixels = read_source(self.spec, self.approved, job, self.pixels)
        wanted = wanted_input(self.spec, job, facts, self.pixels)
        if job.suspect and not self.regenerate and (settled := self._settle(job, facts, wanted)):
            return settled
        replaced = None
        if job.present and not self.regenerate:
            file, replaced = self._existing(job, facts, wanted)
            if file:
                outcome: Outcome = "kept" if any(known.content == file.content for known in job.known) else "adopted"
                return row_of(job, outcome, facts, file)
        if job.inline and not self.regenerate:
            row, replaced = self._extract(job, facts, wanted, replaced)
            if row:
                return row
        return self._link(job, facts, wanted, replaced) or Needed(job, facts, pixels, replaced)

    def _is_new(self, job: Job) -> bool:
        """Return whether nothing exists that could be the file of a job."""
        return not (job.present or job.suspect or job.inline or self.donors)

    def _settle(self, job: Job, facts: SourceRow | None, wanted: str | None) -> EmbedRow | None:
        """Keep a suspect file that contains its recorded bytes, or restore it from a shard; None if it has to be made again."""
        recorded = next((known for known in job.known if known.stat == job.present), None)
        made_from = wanted if facts or self.spec.source == "caption" else None
        if recorded is None or (made_from and self._made_from(recorded.source, facts) not in (None, made_from)):
            return None
        if has_content(self.store.path(job.image_id), recorded.content):
            return row_of(job, "kept", facts, recorded)
        copies = (sample.file(self.spec, recorded.content) for sample in job.copies)
        if data := next((copy for copy in copies if copy is not None), None):
            staged = self.store.stage_bytes(data)
            row = msgspec.structs.replace(recorded, stat=file_signature(staged))
            return row_of(job, "restored", facts, row, staged, DAMAGED)
        if job.stat is None and not job.inline and self.spec.source == "pixels":
            remedy = "restore the image or a valid copy of the file, then run imagemill again"
            return failed_row(job, DAMAGED, damaged_file(self.spec.kind, job.image_id).detail, remedy)
        return None

    def _extract(
        self, job: Job, facts: SourceRow | None, wanted: str | None, replaced: str | None
    ) -> tuple[EmbedRow | None, str | None]:
        """Stage the vector of a Stage 1 record; return its row, or the reason for making another one."""
        assert job.inline
        adopted = facts and self.pixels.made_from(None, facts)
        if not (adopted == wanted or self.extract_only or facts is None):
            return None, "stale"
        try:
            vector = read_vector(job.inline, job.image_id)
            # The vector is copied bit for bit; its model is not recorded.
            staged = stage_array(self.store, job, vector, adopted, None)
            return row_of(job, "extracted", facts, *staged, replaced), None
        except Unusable as unusable:
            if self.extract_only or job.stat is None:
                do = "run imagemill stage2 --pass dinov3" if job.stat else "restore the image, or repair the record"
                return failed_row(job, "unusable_vector", f"the record's {unusable}", do), None
            return None, "unusable_vector"

    def _link(self, job: Job, facts: SourceRow | None, wanted: str | None, replaced: str | None) -> EmbedRow | None:
        """Stage a link to a valid file with the same input, or return None. Spec: docs/spec/stage2.md#reuse."""
        if wanted is None or self.regenerate or (facts is None and self.spec.source == "pixels"):
            return None
        for donor in self.donors.get(wanted, ()):
            if donor.image_id == job.image_id or (job.suspect and donor.stat == job.present):
                continue
            if staged := self._stage_same(donor, facts):
                file = msgspec.structs.replace(donor, image_id=job.image_id, stat=file_signature(staged))
                row = row_of(job, "linked", facts, file, staged, replaced)
                row.facts["donor"] = donor.image_id
                return row
        return None

    def _stage_same(self, donor: FileRow, facts: SourceRow | None) -> Path | None:
        """Stage the file of another image if it still has its recorded bytes and the layout of this one."""
        try:
            staged = self.store.stage_same(donor.image_id)
        except FileNotFoundError:
            return None
        try:
            # A link has the signature of the recorded file, which need not be read again.
            if file_signature(staged) == donor.stat or has_content(staged, donor.content):
                check_npy_header(staged, *self.spec.layout(*((facts.height, facts.width) if facts else (0, 0))))
                return staged
        except InvalidNpy:
            pass
        except BaseException:
            staged.unlink(missing_ok=True)
            raise
        staged.unlink(missing_ok=True)
        return None

    def _made_from(self, source: str | None, facts: SourceRow | None) -> str | None:
        """Return the input of a file, that of an adopted one if none is recorded."""
        if self.spec.source == "pixels" and facts:
            return self.pixels.made_from(source, facts)
        return source

    def _existing(self, job: Job, facts: SourceRow | None, wanted: str | None) -> tuple[FileRow | None, str | None]:
        """Return the row of a file that may stay, or the reason for replacing it."""
        assert job.present
        row = next((known for known in job.known if known.stat == job.present), None)
        if row and job.suspect:
            return None, DAMAGED
        if row is None or row.source is None:
            try:
                content = self.store.check(job.image_id, *((facts.height, facts.width) if facts else (0, 0)))
            except InvalidNpy as invalid:
                return None, invalid.reason
            row = adopted_row(self.store, job.image_id, job.known, content, job.present, wanted)
            if row.source is None:  # no earlier file had the same bytes
                if row.model_key == UNKNOWN_PREVIEW and not self.preview:
                    return None, "preview"
                made_from = self._made_from(None, facts)
                row = msgspec.structs.replace(row, source=wanted if made_from is None else made_from)
        return (row, None) if row.source == wanted else (None, "stale")


def row_of(
    job: Job,
    outcome: Outcome,
    source: SourceRow | None,
    file: FileRow,
    staged: Path | None = None,
    replaced: str | None = None,
) -> EmbedRow:
    """Return the row of a job with a file."""
    return EmbedRow(job.image_id, outcome, job.stat, source, job.caption_fingerprint, file, staged, replaced)


def lost_row(job: Job, how: str) -> EmbedRow:
    """Return the row of a job whose worker process died each time, given how it ended."""
    return failed_row(job, "worker_died", f"its worker process {how} each time")


def failed_row(job: Job, reason: str, problem: Exception | str, remedy: str = "run imagemill again") -> EmbedRow:
    """Return the row of a job without a file. The next run tries it again."""
    detail = problem.what if isinstance(problem, ImagemillError) else problem
    detail = detail if isinstance(detail, str) else f"{type(detail).__name__}: {detail}"
    return EmbedRow(job.image_id, "failed", job.stat, reason=reason, detail=detail, remedy=remedy)


def row_of_error(job: Job, error: Exception) -> EmbedRow:
    """Return the row of a job whose image was refused, or could not be read or prepared.

    Raises the error if it stops the pass: the model cannot be loaded, or is not the recorded one.
    """
    if isinstance(error, Refused):
        remedy = error.do or "replace the image"
        return EmbedRow(job.image_id, "refused", job.stat, reason=error.reason, detail=error.what, remedy=remedy)
    if isinstance(error, ImagemillError):
        raise error
    # A disk or memory error: the next run tries this image again.
    return failed_row(job, "read_error" if isinstance(error, OSError) else "prepare_error", error)


def wanted_input(spec: EmbeddingSpec, job: Job, facts: SourceRow | None, pixels: PixelRule) -> str | None:
    """Return the fingerprint of the input that a job's file must have."""
    if spec.source == "pixels" and facts:
        return facts.pixel_input(pixels.color)
    return job.caption_fingerprint


def read_source(
    spec: EmbeddingSpec, approved: SourceFolder, job: Job, pixels: PixelRule
) -> tuple[SourceRow | None, np.ndarray | None]:
    """Return the source row of a job's image, and its pixels if it had to be read for that; None for an image that is gone.

    Raises:
        Refused: as `inspect_image`, or if the settings of the kind refuse images of this size.
        OSError: if the disk fails.
    """
    facts, read = job.facts, None
    if facts is None and job.stat is not None:
        facts, read = inspect_image(approved, job, pixels.color)
    if facts and (refused := spec.refuses(facts.height, facts.width)):
        raise Refused(refused.reason, refused.detail, do=refused.remedy)
    return facts, read


def stage_array(
    store: NpyStore, job: Job, array: np.ndarray, source: str | None, identity: ModelIdentity | None
) -> tuple[FileRow, Path]:
    """Stage an array and return its row. `identity`: of the model that made the array, None if it is unknown."""
    preview, model_key = (identity.preview, identity.key) if identity else (False, UNKNOWN)
    staged = store.stage(array, preview=preview)
    header = npy_header(array.shape, array.dtype, preview=preview)
    content = fingerprint(header, np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return FileRow(store.spec.kind, job.image_id, file_signature(staged), source, content, model_key), staged
