"""Where work runs: one verb, whatever is behind it.

Belongs here: handing keys to workers and their rows back.
Belongs elsewhere: what a worker does (imagemill/pipeline/), the model's device (imagemill.yaml).
"""

from collections.abc import Iterable, Iterator
from contextlib import closing
from typing import Any, Protocol, TypeVar

import dagster as dg

Key = TypeVar("Key", contravariant=True)
Row = TypeVar("Row", covariant=True)


class Worker(Protocol[Key, Row]):
    """Built once per process; writes its own outputs and returns one small row per key, in any order."""

    def stream(self, keys: Iterable[Key], /) -> Iterator[Row]: ...

    def close(self) -> None: ...


class Engine(dg.ConfigurableResource):
    """The in-process engine: one worker, in the process of the run."""

    def map_batches(
        self,
        worker_class: type[Any],
        keys: Iterable[Any],
        *,
        batch_size: int = 8,
        num_cpus: float = 1,
        num_gpus: float = 0,
        **options: Any,
    ) -> Iterator[Any]:
        """Yield one row per key as results arrive.

        Args:
            worker_class: built once per worker with `options`. keys: small picklable values; pixels and arrays never travel.
            batch_size, num_cpus, num_gpus: for engines that place work elsewhere; in one process the worker sees the whole
                stream and batches by itself.
        """
        with closing(worker_class(**options)) as worker:
            yield from worker.stream(keys)
