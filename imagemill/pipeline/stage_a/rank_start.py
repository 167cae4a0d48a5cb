"""Ranks of one start by torchrun: the first claims the mission for all of them, and its mark tells the others that it has.

    rank 0    claims ─▶ mark of this start ─▶ its images ─▶ waits ─▶ merges
    rank 1             └▶ begins ─▶ after each image: is the mark still of this start? ─▶ its own mark

Without this a second start, whose first rank waits for the claim, would write over the files of the one at work.

Belongs here: when a rank but the first may begin, and when it must stop.
Belongs elsewhere: the claim (claims.py, assets/stage_a_groups.py), marks (rank_files.py), what tells starts apart (ranks.py).
Source: CONTRACTS section 0, "Locks are per asset and partition"; section 5, "Under torchrun".
"""

import time
from collections.abc import Callable
from pathlib import Path

from imagemill.errors import ImagemillError
from imagemill.pipeline.stage_a.rank_files import POLL_SECONDS, mark_file, read_mark

FIRST = 0


def wait_for_first(
    folder: Path,
    mission: str,
    plan: str,
    launch: str,
    *,
    seconds: float,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Return once rank 0 of this start is at work on this plan.

    Raises:
        ImagemillError: it is not, after so many seconds.
    """
    until = clock() + seconds
    while not ((mark := read_mark(folder, mission, FIRST)) and (mark.plan, mark.launch) == (plan, launch)):
        if clock() >= until:
            raise ImagemillError(
                f"rank {FIRST} of this start has not begun within {seconds:g} s",
                where=mark_file(folder, mission, FIRST),
                why="it waits for another run of the mission, has ended, or was given other options or images",
                do="see what rank 0 says, then start all ranks again; --wait-seconds is how long the others wait",
            )
        sleep(POLL_SECONDS)


def stop_if_superseded(folder: Path, mission: str, launch: str) -> None:
    """Raises ImagemillError where rank 0 of another start has the mission by now: ours has merged, or is gone."""
    mark = read_mark(folder, mission, FIRST)
    if mark is not None and mark.launch != launch:
        raise ImagemillError(
            "another start of the ranks has begun: this one's rank 0 has merged without this rank, or was killed",
            where=mark_file(folder, mission, FIRST),
            do="nothing: what this rank has finished is kept, and is not inferred again",
        )
