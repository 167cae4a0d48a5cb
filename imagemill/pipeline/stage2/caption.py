"""Captions by a vision-language model for images without one; the T5 pass runs this step before it embeds captions.

    images without one ──decode threads──> pixels ──batches──> captioner ──> one paragraph each ──> the ledger

The ledger records each caption with the fingerprint of its image and the key of its captioner. An image is captioned again
if the image changed, if a preview model wrote its caption and a real one is configured, or if the run requests it because
the captioner changed.

Sidecars and records take precedence: inputs/sidecars.py, image_metadata.py. The model is in encoders/vlm.py.

Spec: docs/spec/stage2.md#caption-sources
"""

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal

import msgspec
import numpy as np
from PIL import Image

from imagemill.config import DECODE_AHEAD_PIXELS
from imagemill.domain.inputs import SRGB, ColorSetting, normalise_caption
from imagemill.errors import ModelUnusable, Refused
from imagemill.fs.fingerprints import FileSignature
from imagemill.fs.folders import Folder, SourceFolder
from imagemill.inputs.scan import Scan
from imagemill.inputs.sidecars import caption_row
from imagemill.inputs.sources import SourceFile
from imagemill.models import CAPTIONER, Captioner
from imagemill.pipeline.batch_inference import Answer, Unanswered, answer_batch
from imagemill.pipeline.prefetch import bounded_map
from imagemill.pipeline.stage2.image_metadata import complete_facts, inspect_image, size_or_none
from imagemill.pipeline.stage2.plan import LedgerSnapshot, refused_image
from imagemill.store.ledger import FROM_CAPTIONER, FROM_PREVIEW, Captioned, CaptionRow, Ledger, Problem, SourceRow

_BY_A_MODEL = {FROM_CAPTIONER, FROM_PREVIEW}

# If the model raises for this many images before its first answer, it cannot run on this machine. Only captioning stops then.
_TRIES = 3
UNUSABLE = "captioner_unusable"


class CaptionJob(msgspec.Struct, frozen=True):
    """One image to caption. `described`: fingerprint of the image that its caption describes, if that may still be current."""

    image_id: str
    file_name: str
    stat: FileSignature
    described: str | None = None


@dataclass(frozen=True, slots=True)
class CaptionedImage:
    """The outcome of one job.

    `text`: the new caption; None without one, or if the existing caption still describes the image. `cut_off`: whether it
    ended at the most tokens that the model may write.
    """

    job: CaptionJob
    outcome: Literal["captioned", "kept", "refused", "failed"]
    source: SourceRow | None = None
    text: str | None = None
    cut_off: bool = False
    reason: str = ""
    detail: str = ""
    remedy: str = "run imagemill again"


def caption_jobs(
    ids: Iterable[str], scan: Scan, ledger: Ledger, *, preview: bool, replacing: Collection[str] | None = None
) -> list[CaptionJob]:
    """Return the images to caption, those whose captioning failed before last.

    Args:
        ids: candidate images.
        scan: contents of `approved/`.
        ledger: captions, sources and problems recorded so far.
        preview: whether the captioner is a preview model, whose captions never replace those of a real one.
        replacing: keys of the captioner, if captions by every other captioner are to be replaced.
    """
    chosen = list(ids)
    known, captioned = LedgerSnapshot.read(ledger, chosen), ledger.captioned()
    sources = [source for i in chosen if (source := scan.sources.get(i)) and not refused_image(source, known)]
    jobs: list[CaptionJob] = []
    for source in sources:
        caption, made = known.captions.get(source.image_id), captioned.get(source.image_id)
        outdated = source.image_id in known.outdated  # the earlier image may have been restored since
        if (caption is None and not outdated) or (caption and _is_replaced(caption, made, preview, replacing)):
            jobs.append(CaptionJob(source.image_id, source.file_name, source.stat))
        elif made and (outdated or (caption and caption.origin in _BY_A_MODEL and not _describes(made, source, known))):
            jobs.append(CaptionJob(source.image_id, source.file_name, source.stat, made.image))
    behind = {p.item for p in ledger.problems(chosen) if p.asset == CAPTIONER and p.outcome == "failed"
              and p.reason != UNUSABLE}  # fmt: skip
    # Otherwise the same few failing images would stop each run before it reached the others.
    return sorted(jobs, key=lambda job: job.image_id in behind)


def look_again(ids: Iterable[str], scan: Scan, ledger: Ledger, approved: Folder) -> None:
    """Open the images with a model's caption whose file has changed since, for runs without a captioner.

    Only then can the ledger determine whether the caption describes an earlier image (`outdated_captions`).
    """
    if not ledger.captioned():  # the usual case: no caption was written by a model
        return
    changed = [job.image_id for job in caption_jobs(ids, scan, ledger, preview=True) if job.described is not None]
    if changed:
        complete_facts(approved, Scan({i: scan.sources[i] for i in changed}, []), ledger)


def _is_replaced(caption: CaptionRow, made: Captioned | None, preview: bool, replacing: Collection[str] | None) -> bool:
    """Return True if a caption is to be replaced even though its image has not changed."""
    if caption.origin.startswith("preview") and not preview:
        return True
    return replacing is not None and caption.origin in _BY_A_MODEL and (made is None or made.model_key not in replacing)


def _describes(made: Captioned, source: SourceFile, known: LedgerSnapshot) -> bool:
    """Return True if the ledger shows that the image is still the captioned one."""
    facts = known.facts(source)
    return facts is not None and facts.fingerprint == made.image


@dataclass(kw_only=True, eq=False)
class CaptionWorker:
    """A captioner of images. Built once per process; the model is loaded when the first image needs it.

    Args:
        approved: folder of images.
        captioner: builds the model.
        images_per_call: most images in one call of the model.
        decode_threads: threads that open images.
        decode_ahead_pixels: most pixels of images opened ahead of the model.
        color: how pixels are read.
    """

    approved: SourceFolder
    captioner: Callable[[], Captioner]
    images_per_call: int = 8
    decode_threads: int = 2
    decode_ahead_pixels: int = DECODE_AHEAD_PIXELS
    color: ColorSetting = SRGB

    def __post_init__(self) -> None:
        self._captioner: Captioner | None = None
        self._answered, self._failures = False, 0
        self._unusable: str | None = None

    def close(self) -> None:
        """Close the model if it was loaded."""
        if self._captioner is not None:
            self._captioner.close()
            self._captioner = None

    def stream(self, jobs: Iterable[CaptionJob]) -> Iterator[CaptionedImage]:
        """Yield one row per job, in order. If the model cannot be loaded or run, the remaining jobs fail without a call."""
        with ThreadPoolExecutor(self.decode_threads, "decode") as pool:
            batch: list[_Opened] = []
            for opened in self._opened_ahead(pool, jobs):
                if isinstance(opened, CaptionedImage):
                    yield opened
                    continue
                batch.append(opened)
                # The first batch has one image, so that a model that cannot run here fails within seconds.
                if len(batch) == (self.images_per_call if self._answered else 1):
                    yield from self._caption(batch)
                    batch = []
            if batch:
                yield from self._caption(batch)

    def _opened_ahead(
        self, pool: ThreadPoolExecutor, jobs: Iterable[CaptionJob]
    ) -> Iterator["CaptionedImage | _Opened"]:
        return bounded_map(
            pool,
            self._open,
            jobs,
            weigh=lambda job: None,
            measure=lambda job: math.prod(size_or_none(self.approved, job.file_name) or (0,)),
            keeps=lambda opened: opened.pixels if isinstance(opened, _Opened) else 0,
            most=lambda: self.images_per_call + 2 * self.decode_threads,
            budget=self.decode_ahead_pixels,
            threads=self.decode_threads,
        )

    def _open(self, job: CaptionJob) -> "CaptionedImage | _Opened":
        if self._unusable is not None and job.described is None:
            return _unasked(job, self._unusable)
        try:
            source, pixels = inspect_image(self.approved, job, self.color)
        except Refused as refusal:
            remedy = refusal.do or "replace the image"
            return CaptionedImage(job, "refused", reason=refusal.reason, detail=refusal.what, remedy=remedy)
        except Exception as error:  # disk or memory error: the next run tries this image again
            return CaptionedImage(job, "failed", reason="read_error", detail=f"{type(error).__name__}: {error}")
        if job.described == source.fingerprint:
            return CaptionedImage(job, "kept", source)
        return _Opened(job, source, pixels)

    def _caption(self, batch: Sequence["_Opened"]) -> Iterator[CaptionedImage]:
        for opened, answer in zip(batch, self._answers(batch), strict=True):
            if self._unusable is not None and answer is None:
                yield _unasked(opened.job, self._unusable, opened.source)
            elif isinstance(answer, Unanswered):
                yield CaptionedImage(opened.job, "failed", opened.source, reason=answer.reason, detail=answer.detail)
            elif answer is not None:
                yield CaptionedImage(opened.job, "captioned", opened.source, answer.text, answer.cut_off)

    def _answers(self, batch: Sequence["_Opened"]) -> "Sequence[Answer | None]":
        """Return one answer per image; None for each if the model is unusable."""
        if self._unusable is None:
            try:
                self._captioner = self._captioner or self.captioner()
                images = [Image.fromarray(opened.image) for opened in batch]
                answers = answer_batch(
                    self._captioner.caption, images, lambda answer: normalise_caption(answer) or None
                )
            except ModelUnusable as error:
                self._unusable = error.what
            else:
                self._judge(answers)
                return answers
        return [None] * len(batch)

    def _judge(self, answers: Sequence[Answer]) -> None:
        """Mark the model as unusable if it has only raised so far; blank answers show that it runs."""
        raised = [a for a in answers if isinstance(a, Unanswered) and a.reason != "blank_answer"]
        self._answered = self._answered or len(raised) < len(answers)
        self._failures += len(raised)
        if not self._answered and self._failures >= _TRIES:
            self._unusable = f"the captioner does not run here: {raised[-1].detail}"


def _unasked(job: CaptionJob, why: str, source: SourceRow | None = None) -> CaptionedImage:
    do = "choose another device, dtype or model under captioner in imagemill.yaml, or leave the captioner off"
    return CaptionedImage(job, "failed", source, reason=UNUSABLE, detail=why, remedy=do)


def lost_caption(job: CaptionJob, how: str) -> CaptionedImage:
    """Return the row of a job whose worker process died each time, given how it ended."""
    detail = f"its worker process {how} each time"
    return CaptionedImage(job, "failed", reason="worker_died", detail=detail, remedy="run imagemill again")


class _Opened(msgspec.Struct):
    job: CaptionJob
    source: SourceRow
    image: np.ndarray

    @property
    def pixels(self) -> int:
        return self.source.height * self.source.width


def keep_captions(
    rows: Iterable[CaptionedImage],
    ledger: Ledger,
    *,
    model_key: str,
    preview: bool,
    run_id: str = "",
    on_row: Callable[[], None] = lambda: None,
) -> Counter[str]:
    """Record each row as it arrives; a kill loses only the batch in the model. Return counts by outcome, and of `cut_off`.

    Args:
        rows: results of `CaptionWorker.stream`.
        ledger: receives sources, captions and problems.
        model_key: key of the captioner.
        preview: whether the captioner is a preview model.
        run_id: the run that is recorded with problems.
        on_row: called after each row, for progress.
    """
    counts: Counter[str] = Counter()
    for row in rows:
        job, origin = row.job, FROM_PREVIEW if preview else FROM_CAPTIONER
        with ledger.transaction():
            ledger.record_sources([row.source] if row.source else [])
            if row.text is not None and row.source is not None:
                ledger.record_captions([caption_row(job.image_id, row.text, origin)])
                ledger.record_captioned([Captioned(job.image_id, row.source.fingerprint, model_key, row.cut_off)])
            if row.reason:
                ledger.record_problems([_problem(row, run_id)])
            else:
                ledger.clear_problems(CAPTIONER, [job.image_id])
        counts[row.outcome] += 1
        if row.cut_off:
            counts["cut_off"] += 1
        on_row()
    return counts


def forget_problems(jobs: Sequence[CaptionJob], ledger: Ledger) -> None:
    """Remove the problems of images that no longer wait for a captioner: they have another caption, or captioning is off."""
    waiting = {job.image_id for job in jobs}
    noted = [problem.item for problem in ledger.problems() if problem.asset == CAPTIONER]
    ledger.clear_problems(CAPTIONER, [item for item in noted if item not in waiting])


def _problem(row: CaptionedImage, run_id: str) -> Problem:
    outcome: Literal["refused", "failed"] = "refused" if row.outcome == "refused" else "failed"
    return Problem(row.job.image_id, CAPTIONER, outcome, row.reason, row.detail, row.remedy, row.job.stat, run_id)
