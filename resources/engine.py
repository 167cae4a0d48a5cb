"""Execution engines: one method distributes keys to workers, in this process or in several.

Workers are implemented in imagemill/pipeline/; the device of a model is set in imagemill.yaml.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
            worker_class: class that is constructed once per worker with `options`. Its `stream(keys)` writes its own outputs and
                yields one small row per key, in any order; `close()` frees its resources.
            keys: small picklable values; pixels and arrays are never sent.
            batch_size: for engines with several processes; in one process the worker gets the whole stream and batches it itself.
            **options: arguments of `worker_class`.
        """
        with closing(worker_class(**options)) as worker:
            yield from worker.stream(keys)

    def map_devices(
        self,
        worker_class: type[Any],
        keys: Sequence[Any],
        *,
        each: Sequence[Mapping[str, Any]],
        batch_size: int,
        lost_key: Callable[[Any, str], Any] | None = None,
    ) -> Iterator[Any]:
        """Yield one row per key, from one worker process per device; a single worker runs in this process.

        A killed worker is replaced and its keys run again.

        Args:
            worker_class: class that is constructed once per worker. It writes files; the caller alone publishes them.
            keys: small picklable values.
            each: arguments of the worker of each device.
            batch_size: keys that a worker's `stream` gets at a time.
            lost_key: return the row of a key whose worker died each time, given how it ended.
        """
        if len(each) == 1:
            yield from self.map_batches(worker_class, keys, batch_size=batch_size, **each[0])
            return

        def row(key: object, death: WorkerDied) -> object:
            assert lost_key
            return lost_key(key, death.how)

        # At least one batch for each worker, of the same size.
        size = max(1, min(batch_size, -(-len(keys) // len(each))))
        yield from run_on_processes(
            worker_class,
            keys,
            workers=len(each),
            batch_size=size,
            options=each,
            lost_key=row if lost_key else None,
        )


class LocalProcesses(Engine):
    """Several worker processes on this machine. A single worker runs in the process of the run.

    If a worker is killed, `map_batches` ends with a WorkerDied that names it. Finished work stays, and the next run continues.
    """

    workers: int = Field(1, ge=1, description="Worker processes; each has its own memory and its own copy of a model.")

    def with_workers(self, workers: int) -> "LocalProcesses":
        """Return an engine with that many workers."""
        return LocalProcesses(workers=workers)

    def map_batches(
        self, worker_class: type[Any], keys: Iterable[Any], *, batch_size: int = 8, **options: Any
    ) -> Iterator[Any]:
        """Yield one row per key, in any order. A worker's `stream` is called once per batch."""
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
        """Process keys one at a time; if a worker is killed, only its key is lost, and the other workers continue.

        Args:
            worker_class: class that is constructed once per worker with `options`.
            keys: small picklable values.
            died: return the row of a key whose worker ended early, given how it ended, such as "was ended by SIGKILL".
            apart: use a child process even if there is only one worker.
            options: arguments of `worker_class`.
        """
        if self.workers == 1 and not apart:
            yield from super().map_batches(worker_class, keys, batch_size=1, **options)
            return

        def rows(lost: Sequence[Any], death: WorkerDied) -> list[Any]:
            return [died(key, death.how) for key in lost]

        yield from run_on_processes(worker_class, keys, workers=self.workers, batch_size=1, options=options, died=rows)
