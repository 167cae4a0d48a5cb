"""Where work runs: one verb, whatever is behind it.

Belongs here: handing keys to workers and their rows back.
Belongs elsewhere: what a worker does (imagemill/pipeline/), the model's device (imagemill.yaml).
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from typing import Any

import dagster as dg
from pydantic import Field

from resources.local_pool import WorkerDied, run_on_processes


class Engine(dg.ConfigurableResource):
    """The in-process engine: one worker, in the process of the run."""

    def map_batches(
        self, worker_class: type[Any], keys: Iterable[Any], *, batch_size: int = 8, **options: Any
    ) -> Iterator[Any]:
        """Yield one row per key as results arrive.

        Args:
            worker_class: built once per worker with `options`. Its `stream(keys)` writes its own outputs and returns one small
                row per key, in any order; `close()` ends it.
            keys: small picklable values; pixels and arrays never travel.
            batch_size: for engines that place work elsewhere; in one process the worker sees the whole stream and batches by
                itself.
        """
        with closing(worker_class(**options)) as worker:
            yield from worker.stream(keys)


class LocalProcesses(Engine):
    """Several worker processes of this machine; one worker stays in the process of the run.

    A worker that is killed ends `map_batches` with a WorkerDied that names it; finished work stays, the next run continues.
    """

    workers: int = Field(1, ge=1, description="Worker processes; each has its own memory and its own copy of a model.")

    def with_workers(self, workers: int) -> "LocalProcesses":
        """The same engine with that many workers."""
        return LocalProcesses(workers=workers)

    def map_batches(
        self, worker_class: type[Any], keys: Iterable[Any], *, batch_size: int = 8, **options: Any
    ) -> Iterator[Any]:
        """As the in-process engine; a worker's `stream` is called once per batch, and rows come in any order."""
        if self.workers == 1:
            yield from super().map_batches(worker_class, keys, batch_size=batch_size, **options)
            return
        yield from run_on_processes(worker_class, keys, workers=self.workers, batch_size=batch_size, options=options)

    def map_keys(
        self,
        worker_class: type[Any],
        keys: Sequence[Any],
        died: Callable[[Any, str], Any],
        *,
        apart: bool = False,
        **options: Any,
    ) -> Iterator[Any]:
        """One key at a time; a worker that is killed costs its key alone, and the others go on.

        Args:
            died: the row of a key whose worker ended before it, and how, such as "was ended by SIGKILL".
            apart: in a process of its own, also where there is one worker.
        """
        if self.workers == 1 and not apart:
            yield from super().map_batches(worker_class, keys, batch_size=1, **options)
            return

        def rows(lost: Sequence[Any], death: WorkerDied) -> list[Any]:
            return [died(key, death.how) for key in lost]

        yield from run_on_processes(worker_class, keys, workers=self.workers, batch_size=1, options=options, died=rows)
