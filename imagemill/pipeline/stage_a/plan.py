"""The plan of a Stage-A run: which groups, and which rank works on which images.

    groups ──sample──▶ plan ──▶ rank r's images, in order; those that ended a process last

Spec: docs/spec/stage-a.md#sampling
"""

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import xxhash

from imagemill.domain.ranks import DEFAULT_MODE, ImageJob, RankPlan, ShardingMode, plan_ranks
from imagemill.pipeline.stage_a.missions import DEFAULT_SEED, Discovery, ImageGroup, sample_groups


@dataclass(frozen=True, slots=True)
class StageAPlan:
    """The work of a run. A rank selects its share by its number.

    Attributes:
        folder: of the mission.
        identity: of the summarizer: model, prompt of this mission, settings.
        former: the identity that earlier releases gave to this summarizer; its summaries are used as well.
        digest: equal for equal images (name, size, time), groups, ranks and summarizer.
    """

    mission: str
    folder: Path
    groups: tuple[ImageGroup, ...]
    ranks: RankPlan
    identity: str
    digest: str
    former: str | None = None

    def image(self, job: ImageJob) -> str:
        """Return a job's image, relative to the mission's folder."""
        return self.groups[job.group_seq].image_place(job.image_index)

    def image_name(self, job: ImageJob) -> str:
        """Return the file name of a job's image."""
        return self.groups[job.group_seq].images[job.image_index - 1]

    def split_jobs(self, rank: int, behind: Sequence[str]) -> tuple[list[ImageJob], list[ImageJob]]:
        """Return a rank's jobs in order, and those among `behind`, in its order, which come last and one by one."""
        order = {image: number for number, image in enumerate(behind)}
        jobs: list[ImageJob] = []
        last: dict[int, ImageJob] = {}
        for job in self.ranks.jobs(rank):
            number = order.get(self.image(job)) if order else None
            if number is None:
                jobs.append(job)
            else:
                last[number] = job
        return jobs, [job for _, job in sorted(last.items())]


def plan_stage_a(
    found: Discovery,
    identity: str,
    *,
    mode: ShardingMode = DEFAULT_MODE,
    world_size: int = 1,
    passes: int | None = None,
    fails: int | None = None,
    seed: int = DEFAULT_SEED,
    former: str | None = None,
) -> StageAPlan:
    """Sample groups, then divide them among ranks. Looks up each image's size and time; opens none."""
    groups = tuple(sample_groups(found.groups, passes=passes, fails=fails, seed=seed))
    ranks = plan_ranks([len(group.images) for group in groups], mode, world_size)
    digest = _digest(found, groups, mode, world_size, identity)
    return StageAPlan(found.mission, found.folder, groups, ranks, identity, digest, former)


def _digest(found: Discovery, groups: Iterable[ImageGroup], mode: str, world_size: int, identity: str) -> str:
    digest = xxhash.xxh3_128("\0".join((found.mission, mode, str(world_size), identity)).encode())
    for group in groups:
        digest.update(f"\0\0{group.place}\0{group.group_id}".encode())
        for index, name in enumerate(group.images, start=1):
            try:
                stat = os.stat(found.folder / group.image_place(index))
                state = f"{stat.st_size} {stat.st_mtime_ns}"
            except OSError:
                state = "gone"
            digest.update(f"\0{name}\0{state}".encode())
    return digest.hexdigest()
