"""Ranks on machines that share no folder with this one: images travel, answers return.

    here     lines of known summaries ─▶ rank files ◀── lines ◀── receive ◀─┐
             batches of the other images ──send──▶ bytes of files           │
    there                                          decode ─▶ summarizer ─▶ answers

A rank is only the number of a file here: workers get batches of any rank. Nothing is noted about images in flight, because the
engine counts the deaths of workers itself. The general part is in pipeline/remote.py, a rank on this machine in worker.py.
Spec: docs/spec/engines.md#stage-a
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from PIL import Image

from imagemill.domain.inputs import ColorSetting
from imagemill.domain.ranks import ImageJob
from imagemill.errors import ModelMismatch, Refused, disk_full_reported
from imagemill.formats.images import decode_rgb
from imagemill.formats.jsonl import LineAppender
from imagemill.fs.fingerprints import signature_bytes
from imagemill.models import SUMMARIZER, NamedImage, Summarizer
from imagemill.pipeline.batch_inference import Answer, Unanswered
from imagemill.pipeline.remote import About, NodeSide, Parcel, about_here
from imagemill.pipeline.stage_a.plan import StageAPlan
from imagemill.pipeline.stage_a.rank_files import (
    RankMark,
    left_behind,
    mark_file,
    new_rank_file,
    rank_file,
    write_mark,
)
from imagemill.pipeline.stage_a.summaries import SNAPSHOT, KnownSummaries, summarize_batch
from imagemill.pipeline.stage_a.worker import (
    Outcome,
    RankResult,
    ReadImage,
    SummaryLookup,
    in_batches,
    inferred,
    rank_line,
    unreadable,
)
from imagemill.progress import Progress
from imagemill.store.provenance import ModelIdentity, differing_facts


class SummarizerRecipe(Protocol):
    """Constructs the summarizer of a rank; picklable. Recipes are in imagemill/encoders/recipes.py."""

    @property
    def modules(self) -> tuple[str, ...]:
        """Modules of other packages that make the summaries."""
        ...

    def __call__(self, rank: int) -> Summarizer:
        """Return the summarizer of a rank."""
        ...

    def identity(self, mission: str) -> ModelIdentity | str:
        """Return the identity of the model with the prompt of a mission, or of the class."""
        ...

    def elsewhere(self, preview_root: Path, gpus: float) -> "SummarizerRecipe":
        """Return the recipe for a worker on another machine: its folder of preview models, and how many GPUs it has."""
        ...


class ImageBatch(NamedTuple):
    """Images of a rank that the summarizer gets together. `size`: bytes of their files."""

    rank: int
    jobs: tuple[ImageJob, ...]
    size: int

    @property
    def name(self) -> str:
        """Name of the batch, unlike that of a part of it."""
        first = self.jobs[0]
        return f"{self.rank}/{first.group_seq}/{first.image_index}x{len(self.jobs)}"


class SentBatch(NamedTuple):
    """A batch as it travels: its name, and the name and the bytes of each image, uint8 (n,)."""

    name: str
    images: tuple[tuple[str, np.ndarray], ...]


class AnsweredBatch(NamedTuple):
    """The answers of a batch, in the order of its images."""

    name: str
    answers: tuple[Answer, ...]


class BatchLines(NamedTuple):
    """The lines of a batch."""

    rank: int
    outcomes: tuple[Outcome, ...]


# ---- on the node


@dataclass(frozen=True, kw_only=True)
class SummaryRecipe:
    """Builds the worker on any machine that has the weights, or the class.

    Attributes:
        summarizer: constructs the summarizer; the worker has one for all ranks.
        mission: the mission.
        batch_size: most images in one call.
        gpus: GPUs of the worker.
        decode_threads: that open images.
        color: how pixels are read.
    """

    summarizer: SummarizerRecipe
    mission: str
    batch_size: int
    gpus: float
    decode_threads: int
    color: ColorSetting

    def __call__(self) -> "RemoteSummaryWorker":
        """Return the worker. The model is loaded when the first batch has come."""
        return RemoteSummaryWorker(self)


class RemoteSummaryWorker(NodeSide):
    """The worker, on the other machine."""

    def __init__(self, recipe: SummaryRecipe) -> None:
        super().__init__()
        self._recipe = recipe
        self._summarizer = recipe.summarizer.elsewhere(self.preview_root, recipe.gpus)
        self._threads = ThreadPoolExecutor(recipe.decode_threads, "decode")

    def about(self) -> About:
        """Return the facts on which the summaries depend; the identity of a model is read from its files."""
        return about_summarizer(self._summarizer, self._recipe.mission, self._recipe.batch_size)

    @cached_property
    def _made(self) -> Summarizer:
        return self._summarizer(0)

    def stream(self, payloads: Sequence[SentBatch]) -> Iterator[AnsweredBatch]:
        """Yield the answers of each batch. The images of the next one are decoded meanwhile."""
        decoding = self._decode(payloads[0]) if payloads else []
        for number, sent in enumerate(payloads):
            if self.stopped:
                return
            images = [future.result() for future in decoding]
            decoding = self._decode(payloads[number + 1]) if number + 1 < len(payloads) else []
            readable = [image for image in images if isinstance(image, NamedImage)]
            answers = iter(summarize_batch(self._made, readable, self._recipe.mission) if readable else ())
            made = tuple(next(answers) if isinstance(image, NamedImage) else image for image in images)
            del images, readable
            yield AnsweredBatch(sent.name, made)

    def _decode(self, sent: SentBatch) -> list[Future[NamedImage | Unanswered]]:
        return [self._threads.submit(self._opened, *image) for image in sent.images]

    def _opened(self, name: str, data: np.ndarray) -> NamedImage | Unanswered:
        try:
            return NamedImage(name, Image.fromarray(decode_rgb(data.tobytes(), name, self._recipe.color)))
        except (Refused, OSError, MemoryError) as error:
            return unreadable(error)

    def close(self) -> None:
        """Remove the preview models."""
        self._threads.shutdown(cancel_futures=True)
        super().close()


def about_summarizer(recipe: SummarizerRecipe, mission: str, batch_size: int) -> About:
    """Return the facts on which the summaries of this machine depend. Raises ModelUnusable, WrongUsage."""
    identity = recipe.identity(mission)
    if isinstance(identity, ModelIdentity):
        return about_here(identity, batch_size, *recipe.modules)
    about = about_here(None, "", *recipe.modules)
    return replace(about, batch_size=str(batch_size), model={SUMMARIZER: identity})


# ---- on the machine of the data root


class RanksPass:
    """The pass, as the process that owns the data root sees it.

    Args:
        options: arguments of a RankWorker.
        decode_threads: threads of a worker that open images.
        gpus: GPUs of a worker, by name of the pass.
    """

    def __init__(self, options: Mapping[str, Any], decode_threads: int, gpus: Mapping[str, float]) -> None:
        self._plan: StageAPlan = options["plan"]
        self._output, self._store = options["output"], options["store"]
        self._launch, self._fresh = options.get("launch", ""), options.get("fresh", False)
        self._here: SummarizerRecipe = options["summarizer"]
        self.gpus = gpus.get(SUMMARIZER, 0)
        self.modules = self._here.modules
        self.recipe = SummaryRecipe(
            summarizer=self._here,
            mission=self._plan.mission,
            batch_size=options["batch_size"],
            gpus=self.gpus,
            decode_threads=decode_threads,
            color=options["color"],
        )
        self._sent: dict[str, tuple[ImageBatch, list[ReadImage], list[Outcome]]] = {}

    # ---- ranks

    def ranks(
        self, ranks: Sequence[int], stream: Callable[[Sequence[ImageBatch]], Iterator[BatchLines]]
    ) -> Iterator[RankResult]:
        """Write the files of ranks; yield the result of each, once it has all its lines.

        Args:
            ranks: their numbers.
            stream: returns the lines of batches as they arrive, in any order.

        Raises:
            DiskFull, and what `stream` raises. Lines that arrived before are in the files, and will be used by the next run.
        """
        plan, paths = self._plan, [rank_file(self._output, self._plan.mission, rank) for rank in ranks]
        counts = {rank: Counter[str]() for rank in ranks}
        waiting = {rank: sum(1 for _ in plan.ranks.jobs(rank)) for rank in ranks}
        total = sum(waiting.values())
        with (
            disk_full_reported(self._output),
            KnownSummaries([] if self._fresh else [*paths, self._store / SNAPSHOT]) as known,
            Progress(f"stage-a {plan.mission}", total) as progress,
        ):
            self._lookup = SummaryLookup(plan, known)
            batches, last = [], []
            behind = left_behind(self._store)
            for rank in ranks:
                found, of_rank, of_last = self._begin(rank, behind)
                self._write(found, counts[rank], progress)
                waiting[rank] -= len(found.outcomes)
                batches += of_rank
                last += of_last
            for rank in [rank for rank in ranks if not waiting[rank]]:
                yield self._end(rank, counts[rank])
            for lines in stream([*batches, *last]):
                self._write(lines, counts[lines.rank], progress)
                waiting[lines.rank] -= len(lines.outcomes)
                if not waiting[lines.rank]:
                    yield self._end(lines.rank, counts[lines.rank])

    def _begin(self, rank: int, behind: Sequence[str]) -> tuple[BatchLines, list[ImageBatch], list[ImageBatch]]:
        """Empty the file of a rank; return the lines of unchanged images, the batches of others, and those that come last."""
        plan, path = self._plan, rank_file(self._output, self._plan.mission, rank)
        mark_file(self._output, plan.mission, rank).unlink(missing_ok=True)
        new_rank_file(path).close()
        self._mark(rank, ended=False)
        known: list[Outcome] = []
        jobs, last = plan.split_jobs(rank, behind)
        batches = self._batches(rank, jobs, self.recipe.batch_size, known)
        alone = self._batches(rank, last, 1, known)
        return BatchLines(rank, tuple(known)), batches, alone

    def _batches(self, rank: int, jobs: Sequence[ImageJob], size: int, known: list[Outcome]) -> list[ImageBatch]:
        """Return the batches of images that may have no summary; append the lines of the others."""
        batches: list[ImageBatch] = []
        for part in in_batches(jobs, self._look, size, mixes_groups=self._plan.ranks.mixes_groups):
            if isinstance(part, Outcome):
                known.append(part)
            else:
                batches.append(ImageBatch(rank, tuple(job for job, _ in part), sum(size for _, size in part)))
        return batches

    def _look(self, job: ImageJob) -> Outcome | tuple[ImageJob, int]:
        """Return the line of an image that is unchanged or cannot be read, else the image and the bytes of its file."""
        try:
            found = self._lookup.unchanged(job)
        except OSError as error:
            return Outcome(rank_line(self._plan, job, "", unreadable(error)), "failed")
        return found if isinstance(found, Outcome) else (job, signature_bytes(found))

    def _write(self, lines: BatchLines, counts: Counter[str], progress: Progress) -> None:
        with LineAppender(rank_file(self._output, self._plan.mission, lines.rank)) as file:
            for outcome in lines.outcomes:
                file.append(outcome.line)
        for outcome in lines.outcomes:
            counts[outcome.how] += 1
            progress.advance(free=outcome.how == "reused")

    def _end(self, rank: int, counts: Counter[str]) -> RankResult:
        self._mark(rank, ended=True)
        return RankResult(rank, counts["inferred"], counts["reused"], counts["failed"])

    def _mark(self, rank: int, *, ended: bool) -> None:
        write_mark(self._output, self._plan.mission, rank, RankMark(self._plan.digest, self._launch, ended))

    # ---- batches

    @property
    def model_batch(self) -> int:
        """Keys of a model call: one, because each is a batch of images."""
        return 1

    def weight(self, batch: ImageBatch) -> int:
        """Return the bytes that a batch will send."""
        return batch.size

    def name_of(self, key: ImageBatch | AnsweredBatch) -> str:
        """Return the name of a batch."""
        return key.name

    def parts(self, batch: ImageBatch) -> list[ImageBatch]:
        """Return a batch per image, of the mean size."""
        return [ImageBatch(batch.rank, (job,), batch.size // len(batch.jobs)) for job in batch.jobs]

    def send(self, batch: ImageBatch) -> BatchLines | Parcel:
        """Read the images of a batch; pack those whose bytes have no summary."""
        done: list[Outcome] = []
        reads: list[ReadImage] = []
        for job in batch.jobs:
            try:
                found = self._lookup.read(job)
            except (OSError, MemoryError) as error:
                found = Outcome(rank_line(self._plan, job, "", unreadable(error)), "failed")
            if isinstance(found, Outcome):
                done.append(found)
            else:
                reads.append(found)
        if not reads:
            return BatchLines(batch.rank, tuple(done))
        images = tuple((self._plan.image_name(read.job), np.frombuffer(read.data, np.uint8)) for read in reads)
        size = sum(len(read.data) for read in reads)
        self._sent[batch.name] = batch, [read._replace(data=b"") for read in reads], done
        return Parcel(batch, SentBatch(batch.name, images), size)

    def receive(self, row: AnsweredBatch) -> BatchLines:
        """Return the lines of an answered batch."""
        batch, reads, done = self._sent.pop(row.name)
        made = [inferred(self._plan, read, answer) for read, answer in zip(reads, row.answers, strict=True)]
        return BatchLines(batch.rank, (*done, *made))

    def lost(self, batch: ImageBatch, how: str) -> BatchLines:
        """Return the line of an image that ended its worker each time, which is alone in its batch."""
        self._sent.pop(batch.name, None)
        why = Unanswered("worker_died", f"its worker process {how} each time")
        lines = [Outcome(rank_line(self._plan, job, "", why), "failed") for job in batch.jobs]
        return BatchLines(batch.rank, tuple(lines))

    def fits(self, about: About) -> bool:
        """Return whether a worker has the summarizer of this machine."""
        return _text(about) == self._plan.identity

    def agree(self, about: About) -> None:
        """Check the summarizer. Raises ModelMismatch for another one than that of this machine, whose key summaries get."""
        if self.fits(about):
            return
        mine = self._here.identity(self._plan.mission)
        if isinstance(mine, ModelIdentity):
            differs = f"it differs in {', '.join(differing_facts(mine, about.identity))}"
        else:
            differs = f"it is {_text(about)}, not {mine}"
        raise ModelMismatch(
            f"summarizer: that of the nodes is not that of this machine; {differs}",
            do="give all machines the same model, or the same class",
        )


def _text(about: About) -> str:
    """Return the identity of a worker's summarizer, as in a plan."""
    made_by = about.identity
    return about.model[SUMMARIZER] if made_by is None else f"{made_by.kind}:{made_by.key}"
