"""Ranks as an engine runs them: numbers of ranks in, one small row per rank out, progress on the way.

Belongs here: what a rank's rows come to.
Belongs elsewhere: what a rank does (stage_a.py), where it runs (resources/engine.py, or torchrun).
Source: CONTRACTS section 5, "Rank r of W".
"""

import multiprocessing
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from imagemill.errors import ImagemillError
from imagemill.pipeline.stage_a.rank_worker import RankWorker, StageAPlan
from imagemill.progress import Progress


class RankShare(NamedTuple):
    """What one rank did, in images. `died`: how it ended, where its process did before it."""

    rank: int
    inferred: int
    reused: int
    failed: int
    died: str = ""


class ShareWorker:
    """Runs ranks, one after another. Built once per process.

    Args:
        options: what a RankWorker takes; as one value, because engines have a `batch_size` of their own.
        go_on: called after each image; raises where the rank must stop.
    """

    def __init__(self, options: Mapping[str, Any], go_on: Callable[[], None] | None = None) -> None:
        self._plan: StageAPlan = options["plan"]
        self._worker = RankWorker(**options)
        self._go_on = go_on

    def stream(self, ranks: Iterable[int]) -> Iterator[RankShare]:
        """One row per rank, once it has come to its end.

        Raises:
            ImagemillError: as RankWorker; or the process that wanted this rank is gone: another may be at work on it.
        """
        for rank in ranks:
            _name_rank(rank)
            yield self._run(rank)

    def close(self) -> None:
        self._worker.close()

    def _run(self, rank: int) -> RankShare:
        plan, counts = self._plan, Counter[str]()
        images = sum(1 for _ in plan.ranks.jobs(rank))
        with Progress(f"stage-a {plan.mission}, rank {rank} of {plan.ranks.world_size}", images) as progress:
            for row in self._worker.stream([rank]):
                counts[row.how] += 1
                progress.advance(free=row.how == "reused")
                _stop_if_orphaned()  # the last time before the rank's end mark
                if self._go_on:
                    self._go_on()
        return RankShare(rank, counts["inferred"], counts["reused"], counts["failed"])


def _name_rank(rank: int) -> None:
    """In a process of our own, as torchrun does where it has not: by this number a model chooses its GPU."""
    if multiprocessing.parent_process() is not None and "LOCAL_WORLD_SIZE" not in os.environ:
        os.environ["LOCAL_RANK"] = str(rank)


def _stop_if_orphaned() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None and not parent.is_alive():
        raise ImagemillError("the run that this rank is of has been killed", do="run it again; what is finished stays")
