"""Execution engines: one method distributes keys to workers, in this process, in several, or on the nodes of a cluster.

Workers are implemented in imagemill/pipeline/; `engine` and the device of a model are set in imagemill.yaml.
Spec: docs/spec/engines.md
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING, Any

import dagster as dg
from pydantic import Field

from imagemill.config import EngineSettings, file_in_force
from imagemill.store.trust import ENGINE, config_demands, refuse_untrusted
from resources.data_root import DataRootResource
from resources.local_pool import WorkerDied, run_on_processes

if TYPE_CHECKING:
    from resources.ray_pool import RayPool


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


class ConfiguredEngine(Engine):
    """The engine of `engine` in imagemill.yaml, for passes whose workers can run on other machines; other passes run here."""

    data_root: dg.ResourceDependency[DataRootResource]
    accept_node: str = Field(
        "", description="With engine.kind ray, if nodes would not make the same files: name of the node that is right."
    )

    def map_devices(
        self,
        worker_class: type[Any],
        keys: Sequence[Any],
        *,
        each: Sequence[Mapping[str, Any]],
        batch_size: int,
        lost_key: Callable[[Any, str], Any] | None = None,
    ) -> Iterator[Any]:
        """Yield one row per key, from the workers of the configured engine.

        Raises:
            WrongUsage, ClusterUnusable, NotTrusted: as `check`.
            NoWorkers, NodesDiffer: as `RayPool.stream`.
        """
        pass_class = self._pass_class(worker_class)
        if pass_class is None:
            yield from super().map_devices(worker_class, keys, each=each, batch_size=batch_size, lost_key=lost_key)
            return
        (options,) = each
        if keys:
            yield from self._on_nodes(self._task(pass_class, options), keys)

    def map_keys(
        self,
        worker_class: type[Any],
        keys: Sequence[Any],
        died: Callable[[Any, str], Any],
        *,
        workers: int,
        apart: bool,
        options: Mapping[str, Any],
        **more: Any,
    ) -> Iterator[Any]:
        """Process keys one at a time: as `LocalProcesses.map_keys`, or divided among the workers of the configured cluster.

        Args:
            worker_class: class that is constructed once per worker.
            keys: small picklable values.
            died: as for `LocalProcesses.map_keys`. A worker of a cluster that dies costs no key as a whole.
            workers: processes on this machine.
            apart: as for `LocalProcesses.map_keys`.
            options: argument of `worker_class`.
            **more: other arguments of `worker_class`.

        Raises:
            WrongUsage, ClusterUnusable, NotTrusted: as `check`.
            NoWorkers, NodesDiffer: as `RayPool.stream`.
        """
        pass_class = self._pass_class(worker_class)
        if pass_class is None:
            here = LocalProcesses(workers=workers)
            yield from here.map_keys(worker_class, keys, died, apart=apart, options=options, **more)
            return
        task = self._task(pass_class, options)
        yield from task.ranks(keys, lambda batches: self._on_nodes(task, batches) if batches else iter(()))

    def processes_here(self, workers: int) -> int:
        """Return how many of so many workers `map_keys` runs at a time on one machine."""
        return workers if self._settings.kind == "local" else 1

    @property
    def _settings(self) -> EngineSettings:
        return self.data_root.session.config.engine

    def _pass_class(self, worker_class: type[Any]) -> Callable[..., Any] | None:
        """Return the pass of a worker that runs on a cluster, None for a worker of this machine."""
        return None if self._settings.kind == "local" else _passes_elsewhere().get(worker_class)

    def _task(self, pass_class: Callable[..., Any], options: Mapping[str, Any]) -> Any:
        return pass_class(options, decode_threads=max(1, int(self._settings.cpus)), gpus=self._settings.gpus)

    def _on_nodes(self, task: Any, keys: Sequence[Any]) -> Iterator[Any]:
        """Join the cluster; yield one row per key."""
        pool = self._pool(task)
        try:
            yield from pool.stream(keys)
        except (
            KeyboardInterrupt
        ) as interrupt:  # in Ray's calls, it takes the place of the exception of the signal's handler
            raise dg.DagsterExecutionInterruptedError from interrupt

    def pool_of(self, worker_class: type[Any], options: Mapping[str, Any]) -> "RayPool":
        """Return what runs the pass of a worker class once on the configured cluster, which this process joins.

        Raises:
            WrongUsage, ClusterUnusable, NotTrusted: as `check`.
        """
        return self._pool(self._task(_passes_elsewhere()[worker_class], options))

    def _pool(self, task: Any) -> "RayPool":
        self.check()
        from resources.ray_pool import RayPool, WorkerDemand

        settings = self._settings
        demand = WorkerDemand(
            cpus=settings.cpus,
            gpus=task.gpus,
            resources=settings.resources,
            workers=settings.workers,
            ready_timeout=settings.ready_timeout,
            in_flight_bytes=settings.in_flight_mb and settings.in_flight_mb * 1_000_000,
            accept_node=self.accept_node or None,
        )
        return RayPool(task, demand, _note)

    def check(self) -> None:
        """Join the configured cluster, if there is one and this process is no part of it yet.

        Raises:
            WrongUsage, ClusterUnusable: as `ray_cluster.join`.
            NotTrusted: if the data root's own file names the cluster, and the user has not consented.
        """
        settings, root = self._settings, self.data_root.root()
        if settings.kind == "local":
            return
        from resources.ray_cluster import IN_FLIGHT_BYTES, join

        if file := self.data_root.own_config_file():
            demands = [demand for demand in config_demands(file) if demand.setting == ENGINE]
            refuse_untrusted(demands, root, "name a file by --config, or use engine.address: auto")
        least = IN_FLIGHT_BYTES if settings.in_flight_mb is None else settings.in_flight_mb * 1_000_000
        where = file_in_force(root, self.data_root.config_file or None)
        join(settings.address, insecure=settings.insecure, least_memory=least, where=where)


def _passes_elsewhere() -> dict[type[Any], Callable[..., Any]]:
    """Return the passes that other machines can work on, by the class of their workers here."""
    from imagemill.encoders.recipes import identify_vlm
    from imagemill.pipeline.stage2.caption import CaptionWorker
    from imagemill.pipeline.stage2.caption_remote import CaptionPass
    from imagemill.pipeline.stage2.embed import EmbedWorker
    from imagemill.pipeline.stage2.embed_remote import EmbedPass
    from imagemill.pipeline.stage_a.ranks_remote import RanksPass
    from imagemill.pipeline.stage_a.worker import RankRunner

    return {
        EmbedWorker: EmbedPass,
        CaptionWorker: partial(CaptionPass, identify=partial(identify_vlm, "captioner")),
        RankRunner: RanksPass,
    }


def _note(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


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
