"""Worker of one rank: turns images into the lines of its file.

    file unchanged, or read ─▶ fingerprint ─▶ summary known: its line
                                           └▶ else decode ─▶ batch ─▶ summarizer ─▶ clean ─▶ its line

Lines are written batch by batch: a rank that dies loses its current batch. Images are decoded for the next batch only. Images in
flight when a process died come last, one by one. A rank reads finished summaries from files; it never opens the ledger.

The plan is in plan.py, the files in rank_files.py; groups of all ranks' lines, in merge.py.
Spec: docs/spec/conventions.md#refused-and-failed
"""

import multiprocessing
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

from msgspec import UNSET
from PIL import Image

from imagemill.domain.inputs import SRGB, ColorSetting
from imagemill.domain.ranks import ImageJob
from imagemill.errors import ImagemillError, Refused, WrongUsage, disk_full_reported
from imagemill.formats.images import decode_rgb
from imagemill.formats.jsonl import LineAppender
from imagemill.fs.fingerprints import FileSignature, file_signature, fingerprint, read_signed
from imagemill.models import NamedImage, Summarizer
from imagemill.pipeline.batch_inference import Answer, Unanswered
from imagemill.pipeline.stage_a.missions import printable
from imagemill.pipeline.stage_a.plan import StageAPlan
from imagemill.pipeline.stage_a.rank_files import (
    RANK_DIED,
    InFlight,
    RankLine,
    RankMark,
    in_flight,
    left_behind,
    mark_file,
    new_rank_file,
    rank_file,
    read_mark,
    read_rank_lines,
    write_mark,
)
from imagemill.pipeline.stage_a.summaries import SNAPSHOT, KnownSummaries, summarize_batch, summary_fingerprint
from imagemill.progress import Progress

T = TypeVar("T")

DEFAULT_BATCH_SIZE = 8

_SHOWN = 3


class ImageRow(NamedTuple):
    """The result of one image: the rank, its line, and the origin of the summary."""

    rank: int
    line: RankLine
    how: Literal["inferred", "reused", "failed"]


class Outcome(NamedTuple):
    """The line of an image, and the origin of its summary."""

    line: RankLine
    how: Literal["inferred", "reused", "failed"]


class ReadImage(NamedTuple):
    """An image whose summary is not known: its job, the state and fingerprint of its file, key of its summary, bytes."""

    job: ImageJob
    stat: FileSignature
    content: str
    known_by: str
    data: bytes


class SummaryLookup:
    """Finds the lines of images whose summaries are known.

    Args:
        plan: the plan of the run.
        known: the finished summaries.
    """

    def __init__(self, plan: StageAPlan, known: KnownSummaries) -> None:
        self._plan, self._known = plan, known

    def unchanged(self, job: ImageJob) -> Outcome | FileSignature:
        """Return the line of an image whose file is as it was when its summary was made, else its signature. Raises OSError."""
        image = self._plan.image(job)
        stat = file_signature(self._plan.folder / image)
        content = self._known.content(image, stat)
        return (self._found(job, stat, content)[0] if content else None) or stat

    def read(self, job: ImageJob) -> Outcome | ReadImage:
        """Read an image; return its line if the same bytes have a summary under the same name. Raises OSError."""
        data, stat = read_signed(self._plan.folder / self._plan.image(job))
        content = fingerprint(data)
        line, known_by = self._found(job, stat, content, read_at=time.time_ns())
        return line or ReadImage(job, stat, content, known_by, data)

    def _found(
        self, job: ImageJob, stat: FileSignature, content: str, read_at: int | None = None
    ) -> tuple[Outcome | None, str]:
        """Return the line of an image with a known summary, and the key of a new one. `read_at`: when the file was read again."""
        plan, key = self._plan, ""
        name = plan.image_name(job)
        for identity in filter(None, (plan.former, plan.identity)):  # that of new summaries comes last
            key = summary_fingerprint(name, content, identity)
            if known := self._known.find(key):
                state = stat, content, read_at or known.at
                return Outcome(rank_line(plan, job, key, known.summary, state), "reused"), key
        return None, key


class _Ready(NamedTuple):
    """An image for the next batch."""

    job: ImageJob
    stat: FileSignature
    content: str
    known_by: str
    image: NamedImage


@dataclass(kw_only=True, eq=False)
class RankWorker:
    """A worker that runs ranks one after another. Built once per process.

    Args:
        summarizer: constructs that of a rank; called once per rank, and only if an image has to be inferred.
        output, store: the folders of rank files, and of the snapshot and in-flight files.
        launch: name that this start's ranks have in common (see `launch_of`).
        fresh: infer every image.
        color: how pixels are read.
    """

    plan: StageAPlan
    summarizer: Callable[[int], Summarizer]
    output: Path
    store: Path
    batch_size: int = DEFAULT_BATCH_SIZE
    launch: str = ""
    fresh: bool = False
    color: ColorSetting = SRGB

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise WrongUsage(f"--batch-size is {self.batch_size}", do="give 1 or more")

    def stream(self, ranks: Iterable[int]) -> Iterator[ImageRow]:
        """Yield one row per image of these ranks.

        Raises:
            DiskFull. ModelUnusable: from the summarizer. Every other failure is a row.
        """
        for rank in ranks:
            with disk_full_reported(self.output):
                yield from self._run(rank)

    def _run(self, rank: int) -> Iterator[ImageRow]:
        plan, path = self.plan, rank_file(self.output, self.plan.mission, rank)
        self._rank = rank
        # The rank's own file may have lines that were written after the snapshot, by a process of an earlier start.
        with KnownSummaries([] if self.fresh else [path, self.store / SNAPSHOT]) as known:
            self._lookup = SummaryLookup(plan, known)
            # In this order, so that a mark never names a plan other than that of the lines.
            mark_file(self.output, plan.mission, rank).unlink(missing_ok=True)
            behind = left_behind(self.store)
            with new_rank_file(path) as lines, InFlight(self.store, rank) as self._flight:
                self._mark(rank, ended=False)
                self._summarizer: Summarizer | None = None
                jobs, last = plan.split_jobs(rank, behind)
                # The last ones are done one by one, after all others are written.
                for rows in chain(self._batches(jobs, self.batch_size), *(self._batches([job], 1) for job in last)):
                    for line, _ in rows:
                        lines.append(line)
                    lines.flush()
                    yield from (ImageRow(rank, line, how) for line, how in rows)
        self._mark(rank, ended=True)

    def _mark(self, rank: int, *, ended: bool) -> None:
        write_mark(self.output, self.plan.mission, rank, RankMark(self.plan.digest, self.launch, ended))

    def _batches(self, jobs: Iterable[ImageJob], size: int) -> Iterator[list[Outcome]]:
        """Yield lists of lines: each must be written before the next is requested."""
        for part in in_batches(jobs, self._look, size, mixes_groups=self.plan.ranks.mixes_groups):
            if isinstance(part, Outcome):
                yield [part]
            else:
                yield self._infer(part)
                self._flight.done()
        self._flight.done()

    def _look(self, job: ImageJob) -> _Ready | Outcome:
        """Return the line of an image whose summary is known or that cannot be read, else the image."""
        known_by = ""
        try:
            known = self._lookup.unchanged(job)
            if isinstance(known, Outcome):
                return known
            self._flight.begin(self.plan.image(job))
            read = self._lookup.read(job)
            if isinstance(read, Outcome):
                return read
            known_by, name = read.known_by, self.plan.image_name(job)
            image = Image.fromarray(decode_rgb(read.data, name, self.color))
            return _Ready(job, read.stat, read.content, known_by, NamedImage(name, image))
        except (Refused, OSError, MemoryError) as error:
            return Outcome(rank_line(self.plan, job, known_by, unreadable(error)), "failed")

    def _infer(self, batch: list[_Ready]) -> list[Outcome]:
        """Return the lines of a batch and empty it: its images are not held while its lines are written."""
        if self._summarizer is None:
            self._summarizer = self.summarizer(self._rank)
        answers = summarize_batch(self._summarizer, [ready.image for ready in batch], self.plan.mission)
        done = [ready._replace(image=None) for ready in batch]
        batch.clear()
        return [inferred(self.plan, ready, answer) for ready, answer in zip(done, answers, strict=True)]


def in_batches(
    jobs: Iterable[ImageJob], look: Callable[[ImageJob], T | Outcome], size: int, *, mixes_groups: bool
) -> Iterator[list[T] | Outcome]:
    """Yield the lines of known images as they are found, and batches of the other images.

    Args:
        jobs: the images, in order.
        look: returns the line of an image, or what a batch has of it; called for the next image only when a batch has room.
        size: most images of a batch.
        mixes_groups: whether images of several groups may share a batch.
    """
    batch: list[T] = []
    group = -1
    for job in jobs:
        if batch and not mixes_groups and job.group_seq != group:
            yield batch
            batch = []
        found = look(job)
        if isinstance(found, Outcome):
            yield found
        else:
            batch.append(found)
            group = job.group_seq
        del found  # otherwise one more decoded image than the batch would stay in memory
        if len(batch) == size:
            yield batch
            batch = []
    if batch:
        yield batch


def unreadable(error: Refused | OSError | MemoryError) -> Unanswered:
    """Return why an image that cannot be read has no summary."""
    if isinstance(error, Refused):
        return Unanswered(error.reason, error.what)
    if isinstance(error, OSError):
        return Unanswered("read_error", str(error))
    return Unanswered("out_of_memory", str(error) or "out of memory while the image was being decoded")


def inferred(plan: StageAPlan, read: "ReadImage | _Ready", answer: Answer) -> Outcome:
    """Return the line of an image that the summarizer has answered."""
    if isinstance(answer, Unanswered):
        return Outcome(rank_line(plan, read.job, read.known_by, answer), "failed")
    state = read.stat, read.content, time.time_ns()
    return Outcome(rank_line(plan, read.job, read.known_by, answer.text, state), "inferred")


def rank_line(
    plan: StageAPlan,
    job: ImageJob,
    known_by: str,
    result: str | Unanswered,
    read: tuple[FileSignature, str, int] | None = None,
) -> RankLine:
    """Return the line of one image.

    Args:
        plan: the plan of the run.
        job: the image.
        known_by: fingerprint of the line.
        result: its summary, or why it has none.
        read: the file's signature, fingerprint of its bytes, time of the summary.
    """
    group = plan.groups[job.group_seq]
    failed = isinstance(result, Unanswered)
    stat, content, at = read or (UNSET, UNSET, UNSET)
    return RankLine(
        group_seq=job.group_seq,
        group_id=group.group_id,
        label=group.label,
        image_index=job.image_index,
        image_name=plan.image_name(job),
        ok=not failed,
        summary=UNSET if failed else result,
        error=f"{result.reason}: {result.detail}" if failed else UNSET,
        fingerprint=known_by,
        image=plan.image(job) if read else UNSET,
        stat=stat,
        content=content,
        at=at,
    )


# ---- ranks as an engine runs them


class RankResult(NamedTuple):
    """The result of one rank, in images. `died`: how its process ended, if that ended before the rank did."""

    rank: int
    inferred: int
    reused: int
    failed: int
    died: str = ""


class RankRunner:
    """A worker that runs ranks with progress, one row per rank. Built once per process.

    Args:
        options: of a RankWorker; as one value, because engines have a `batch_size` of their own.
        go_on: called after each image; raises if the rank must stop.
    """

    def __init__(self, options: Mapping[str, Any], go_on: Callable[[], None] | None = None) -> None:
        self._plan: StageAPlan = options["plan"]
        self._worker = RankWorker(**options)
        self._go_on = go_on

    def stream(self, ranks: Iterable[int]) -> Iterator[RankResult]:
        """Yield one row per rank, once it has ended.

        Raises:
            ImagemillError: as RankWorker; or if the process that started this one is gone: another may run the rank.
        """
        parent = multiprocessing.parent_process()
        for rank in ranks:
            # Set in a process of our own if torchrun has not: a model chooses its GPU by this number.
            if parent is not None and "LOCAL_WORLD_SIZE" not in os.environ:
                os.environ["LOCAL_RANK"] = str(rank)
            plan, counts = self._plan, Counter[str]()
            images = sum(1 for _ in plan.ranks.jobs(rank))
            with Progress(f"stage-a {plan.mission}, rank {rank} of {plan.ranks.world_size}", images) as progress:
                for row in self._worker.stream([rank]):
                    counts[row.how] += 1
                    progress.advance(free=row.how == "reused")
                    if parent is not None and not parent.is_alive():  # the last check comes before the rank's end mark
                        raise ImagemillError(
                            "the run of this rank was killed", do="run it again; finished images are kept"
                        )
                    if self._go_on:
                        self._go_on()
            yield RankResult(rank, counts["inferred"], counts["reused"], counts["failed"])

    def close(self) -> None:
        """Do nothing."""


def close_dead_rank(plan: StageAPlan, output: Path, store: Path, launch: str, rank: int, how: str) -> RankResult:
    """Write the lines that a rank lacks whose process died, and its end mark; summaries that it finished count as inferred.

    Args:
        plan: the plan of the run.
        output: folder of the rank files.
        store: the mission's `summaries_folder`.
        launch: the start of the ranks.
        rank: the rank.
        how: end of the process, such as "was ended by SIGKILL".
    """
    path, mark = rank_file(output, plan.mission, rank), read_mark(output, plan.mission, rank)
    ours = mark is not None and not mark.ended and (mark.plan, mark.launch) == (plan.digest, launch)
    present = {(line.group_seq, line.image_index): line.ok for line in read_rank_lines(path)} if ours else {}
    images = in_flight(store, rank)
    died = f"rank {rank} of {plan.ranks.world_size} of {plan.mission} {how}"
    lost = 0
    with LineAppender(path) if ours else new_rank_file(path) as lines:
        for job in plan.ranks.jobs(rank):
            if (job.group_seq, job.image_index) not in present:
                when = "before it had finished this image"
                if plan.image(job) in images:
                    when = "working on this image" + (f" and {len(images) - 1} more" if len(images) > 1 else "")
                lines.append(rank_line(plan, job, "", Unanswered(RANK_DIED, f"{died} {when}")))
                lost += 1
    write_mark(output, plan.mission, rank, RankMark(plan.digest, launch, ended=True))
    finished = sum(present.values())
    more = f" and {len(images) - _SHOWN} more" if len(images) > _SHOWN else ""
    where = f" working on {printable(', '.join(images[:_SHOWN]))}{more}" if images else ""
    return RankResult(rank, finished, 0, len(present) - finished + lost, died=f"{died}{where}")
