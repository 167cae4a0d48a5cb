"""Ranks of one start by torchrun, which wait for each other by their marks.

    rank 0    leases the mission ─▶ imports summaries ─▶ its mark ─▶ its images ─▶ waits ─▶ merges
    rank 1                                                └▶ begins ─▶ after each image: is the mark still of this start?

Without the wait, ranks of a second start would replace the files of ranks that are running.

Marks are in rank_files.py; the name of a start is in ranks.py.
Spec: docs/spec/conventions.md#leases, docs/spec/stage-a.md#torchrun
"""

import time
from collections.abc import Sequence
from pathlib import Path

from imagemill.errors import ImagemillError
from imagemill.pipeline.stage_a.rank_files import mark_file, read_mark, unfinished_ranks

FIRST = 0
POLL_SECONDS = 0.5


def wait_for_ranks(
    folder: Path, mission: str, ranks: Sequence[int], plan: str, launch: str | None, *, seconds: float
) -> list[int]:
    """Wait at most `seconds` until each rank has ended; return those that have not."""
    until = time.monotonic() + seconds
    while (missing := unfinished_ranks(folder, mission, ranks, plan, launch)) and time.monotonic() < until:
        time.sleep(POLL_SECONDS)
    return missing


def wait_for_first(folder: Path, mission: str, plan: str, launch: str, *, seconds: float) -> None:
    """Wait until rank 0 of this start works on this plan.

    Raises:
        ImagemillError: if it does not within `seconds`.
    """
    until = time.monotonic() + seconds
    while not ((mark := read_mark(folder, mission, FIRST)) and (mark.plan, mark.launch) == (plan, launch)):
        if time.monotonic() >= until:
            raise ImagemillError(
                f"rank {FIRST} did not start within {seconds:g} s",
                where=mark_file(folder, mission, FIRST),
                why="it waits for another run of the mission, it ended, or it has other options or images",
                do="read the output of rank 0, then start all ranks again; --wait-seconds sets how long the other ranks wait",
            )
        time.sleep(POLL_SECONDS)


def stop_if_superseded(folder: Path, mission: str, launch: str) -> None:
    """Raise ImagemillError if rank 0 of another start has the mission now: ours has merged, or its process has ended."""
    mark = read_mark(folder, mission, FIRST)
    if mark is not None and mark.launch != launch:
        raise ImagemillError(
            "the ranks have been started again: rank 0 of this start merged without this rank, or was killed",
            where=mark_file(folder, mission, FIRST),
            do="nothing: the finished images of this rank are kept and will not be inferred again",
        )
