"""Stage-A: what a run works on, and one rank's share of it.

    groups ─sample─▶ plan ─▶ rank r's images, in order
        file as the store knows it, or read ─▶ fingerprint ─▶ summary known: its line
                                                           └▶ else decode ─▶ batch ─▶ summarizer ─▶ clean ─▶ its line

A finished summary goes into the store before it goes into the rank's file, batch by batch: a rank that dies loses the batch at
hand. Images are decoded for the next batch only. What a process was at work on when it died comes last, image by image.

Belongs here: the plan, one rank.
Belongs elsewhere: rank files (rank_files.py), the store (finished.py), groups of all ranks' lines (stage_a_merge.py).
Source: seed 003; CONTRACTS section 5.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import xxhash
from msgspec import UNSET
from PIL import Image

from imagemill.errors import Refused, WrongUsage, disk_full_told
from imagemill.files import FileSignature, file_signature, fingerprint
from imagemill.pipeline.batch_inference import Answered, Unanswered
from imagemill.pipeline.stage_a.at_work import AtWork, left_behind
from imagemill.pipeline.stage_a.finished import FinishedIndex, Keeper, summary_fingerprint
from imagemill.pipeline.stage_a.missions import DEFAULT_SEED, Discovery, Group, sample_groups
from imagemill.pipeline.stage_a.rank_files import (
    RankLine,
    RankMark,
    mark_file,
    new_rank_file,
    rank_file,
    rank_files,
    write_mark,
)
from imagemill.pipeline.stage_a.summaries import summarize_batch
from imagemill.pixels import decode_rgb
from imagemill.ranks import DEFAULT_MODE, ImageJob, RankPlan, ShardingMode, plan_ranks
from imagemill.summarizer import NamedImage, Summarizer

DEFAULT_BATCH_SIZE = 8


@dataclass(frozen=True, slots=True)
class StageAPlan:
    """What a run works on. A rank is told its share by its number alone.

    Attributes:
        folder: the mission's.
        identity: what makes two summarizers the same: model, prompt of this mission, settings.
        digest: equal for equal images (name, size, time), groups, ranks and summarizer.
    """

    mission: str
    folder: Path
    groups: tuple[Group, ...]
    ranks: RankPlan
    identity: str
    digest: str


def plan_stage_a(
    found: Discovery,
    identity: str,
    *,
    mode: ShardingMode = DEFAULT_MODE,
    world_size: int = 1,
    passes: int | None = None,
    fails: int | None = None,
    seed: int = DEFAULT_SEED,
) -> StageAPlan:
    """Sample groups, then cut them over ranks. Asks the file system for each image's size and time; opens none."""
    groups = tuple(sample_groups(found.groups, passes=passes, fails=fails, seed=seed))
    ranks = plan_ranks([len(group.images) for group in groups], mode, world_size)
    digest = _digest(found, groups, mode, world_size, identity)
    return StageAPlan(found.mission, found.folder, groups, ranks, identity, digest)


def _digest(found: Discovery, groups: Iterable[Group], mode: str, world_size: int, identity: str) -> str:
    digest = xxhash.xxh3_128("\0".join((found.mission, mode, str(world_size), identity)).encode())
    for group in groups:
        digest.update(f"\0\0{group.place}\0{group.group_id}".encode())
        for index, name in enumerate(group.images, start=1):
            digest.update(f"\0{name}\0{_size_and_time(found.folder / group.image_place(index))}".encode())
    return digest.hexdigest()


def _size_and_time(path: Path) -> str:
    try:
        stat = os.stat(path)
    except OSError:
        return "gone"
    return f"{stat.st_size} {stat.st_mtime_ns}"


class ImageRow(NamedTuple):
    """What became of one image: the rank, its line, and where the summary came from."""

    rank: int
    line: RankLine
    how: Literal["inferred", "reused", "failed"]


class _Ready(NamedTuple):
    """An image for the next batch."""

    job: ImageJob
    stat: FileSignature
    content: str
    known_by: str
    image: NamedImage


class RankWorker:
    """Runs ranks, one after another. Built once per process.

    Args:
        summarizer: makes one; called once per rank, and not before an image has to be inferred.
        output, store: the folders of rank files and of finished summaries.
        launch: what this start's ranks have in common (see `launch_of`).
        fresh: infer every image.
    """

    def __init__(
        self,
        *,
        plan: StageAPlan,
        summarizer: Callable[[], Summarizer],
        output: Path,
        store: Path,
        batch_size: int = DEFAULT_BATCH_SIZE,
        launch: str = "",
        fresh: bool = False,
    ) -> None:
        if batch_size < 1:
            raise WrongUsage(f"--batch-size is {batch_size}", do="give 1 or more")
        self._plan, self._summarizer = plan, summarizer
        self._output, self._store = output, store
        self._batch_size, self._launch, self._fresh = batch_size, launch, fresh

    def close(self) -> None:
        pass

    def stream(self, ranks: Iterable[int]) -> Iterator[ImageRow]:
        """One row per image of these ranks.

        Raises:
            DiskFull. ModelUnusable: of the summarizer. Every other failure is a row.
        """
        for rank in ranks:
            with disk_full_told(self._output):
                yield from self._run(rank)

    def _run(self, rank: int) -> Iterator[ImageRow]:
        plan = self._plan
        with FinishedIndex() as index, Keeper(self._store, rank) as keeper:
            if not self._fresh:
                index.read_all(self._store, self._output, plan.mission)
                for path in self._inherited(rank):
                    keeper.adopt(path, index)
                keeper.flush()
            # In this order: at no moment does a mark vouch for lines of another plan.
            mark_file(self._output, plan.mission, rank).unlink(missing_ok=True)
            behind = left_behind(self._store)
            with (
                new_rank_file(rank_file(self._output, plan.mission, rank)) as lines,
                AtWork(self._store, rank) as hands,
            ):
                self._mark(rank, ended=False)
                run = _Rank(plan, self._summarizer, index, keeper, hands, self._batch_size)
                for rows in run.rows(*split_jobs(plan, rank, behind)):
                    keeper.flush()
                    for line, _ in rows:
                        lines.append(line)
                    lines.flush()
                    yield from (ImageRow(rank, line, how) for line, how in rows)
        self._mark(rank, ended=True)

    def _inherited(self, rank: int) -> list[Path]:
        """Files whose lines this rank brings into the store: its own, and those of ranks there are no more."""
        world = self._plan.ranks.world_size
        return [path for other, path in rank_files(self._output, self._plan.mission).items() if other % world == rank]

    def _mark(self, rank: int, *, ended: bool) -> None:
        write_mark(self._output, self._plan.mission, rank, RankMark(self._plan.digest, self._launch, ended))


def split_jobs(plan: StageAPlan, rank: int, behind: Sequence[str]) -> tuple[Iterable[ImageJob], list[ImageJob]]:
    """A rank's images: those to do in order, and those among `behind`, in the order of that, to do last and one by one."""
    jobs = plan.ranks.jobs(rank)
    if not behind:
        return jobs, []
    order = {place: number for number, place in enumerate(behind)}
    numbers = {job: order.get(plan.groups[job.group_seq].image_place(job.image_index)) for job in jobs}
    last = {number: job for job, number in numbers.items() if number is not None}
    return [job for job, number in numbers.items() if number is None], [job for _, job in sorted(last.items())]


_Outcome = tuple[RankLine, Literal["inferred", "reused", "failed"]]


class _Rank:
    """One rank's images in order, as portions of lines: each is to be written before the next is asked for."""

    def __init__(
        self,
        plan: StageAPlan,
        make: Callable[[], Summarizer],
        index: FinishedIndex,
        keeper: Keeper,
        hands: AtWork,
        batch_size: int,
    ) -> None:
        self._plan, self._make, self._index, self._keeper = plan, make, index, keeper
        self._hands, self._batch_size = hands, batch_size
        self._summarizer: Summarizer | None = None

    def rows(self, jobs: Iterable[ImageJob], last: Iterable[ImageJob] = ()) -> Iterator[list[_Outcome]]:
        """`last`: each alone, once all the others are written."""
        yield from self._batches(jobs, self._batch_size)
        for job in last:
            yield from self._batches([job], 1)

    def _batches(self, jobs: Iterable[ImageJob], size: int) -> Iterator[list[_Outcome]]:
        batch: list[_Ready] = []
        for job in jobs:
            if batch and not self._plan.ranks.mixes_groups and batch[-1].job.group_seq != job.group_seq:
                yield self._infer(batch)
                self._hands.done()
            found = self._look(job)
            if isinstance(found, _Ready):
                batch.append(found)
            else:
                yield [found]
            del found  # or a decoded image more than the batch's would be held
            if len(batch) == size:
                yield self._infer(batch)
                self._hands.done()
        if batch:
            yield self._infer(batch)
        self._hands.done()

    def _look(self, job: ImageJob) -> _Ready | _Outcome:
        """The line of an image whose summary is known or that cannot be read, else the image."""
        group = self._plan.groups[job.group_seq]
        name, place = group.images[job.image_index - 1], group.image_place(job.image_index)
        known_by = ""
        try:
            path = self._plan.folder / place
            content = self._index.content(place, file_signature(path))
            if content:
                known_by = summary_fingerprint(name, content, self._plan.identity)
                if summary := self._index.summary(known_by):
                    return self._line(job, known_by, summary), "reused"
            self._hands.begin(place)
            data, stat = _read(path)
            content = fingerprint(data)
            known_by = summary_fingerprint(name, content, self._plan.identity)
            if summary := self._index.summary(known_by):
                self._keeper.keep(place, stat, content, known_by, summary)
                return self._line(job, known_by, summary), "reused"
            image = NamedImage(name, Image.fromarray(decode_rgb(data, name)))
            return _Ready(job, stat, content, known_by, image)
        except Refused as refusal:
            return self._line(job, known_by, Unanswered(refusal.reason, refusal.what)), "failed"
        except OSError as error:
            return self._line(job, known_by, Unanswered("read_error", str(error))), "failed"
        except MemoryError as error:
            return self._line(
                job, known_by, Unanswered("out_of_memory", str(error) or "memory ran out while the image was decoded")
            ), "failed"

    def _infer(self, batch: list[_Ready]) -> list[_Outcome]:
        """The lines of a batch, which is empty afterwards: its images are not held while its lines are written."""
        if self._summarizer is None:
            self._summarizer = self._make()
        answers = summarize_batch(self._summarizer, [ready.image for ready in batch], self._plan.mission)
        done = [ready._replace(image=None) for ready in batch]
        batch.clear()
        outcomes: list[_Outcome] = []
        for ready, answer in zip(done, answers, strict=True):
            if isinstance(answer, Answered):
                place = self._plan.groups[ready.job.group_seq].image_place(ready.job.image_index)
                self._keeper.keep(place, ready.stat, ready.content, ready.known_by, answer.text)
                outcomes.append((self._line(ready.job, ready.known_by, answer.text), "inferred"))
            else:
                outcomes.append((self._line(ready.job, ready.known_by, answer), "failed"))
        return outcomes

    def _line(self, job: ImageJob, known_by: str, result: str | Unanswered) -> RankLine:
        return rank_line(self._plan, job, known_by, result)


def rank_line(plan: StageAPlan, job: ImageJob, known_by: str, result: str | Unanswered) -> RankLine:
    """What became of one image, a summary or why there is none, as a line of its rank's file."""
    group = plan.groups[job.group_seq]
    failed = isinstance(result, Unanswered)
    return RankLine(
        group_seq=job.group_seq,
        group_id=group.group_id,
        label=group.label,
        image_index=job.image_index,
        image_name=group.images[job.image_index - 1],
        ok=not failed,
        summary=UNSET if failed else result,
        error=f"{result.reason}: {result.detail}" if failed else UNSET,
        fingerprint=known_by,
    )


def _read(path: Path) -> tuple[bytes, FileSignature]:
    with open(path, "rb") as file:
        # Taken before the bytes: a file that changes while it is read does not look as it did afterwards.
        stat = file_signature(os.fstat(file.fileno()))
        return file.read(), stat
