"""Worker processes on this machine: one pebble pool with one spawned process per worker.

    caller ──batch──▶ worker 1   at most two batches each, so that no worker waits for the caller
           ◀──rows──
           ──batch──▶ worker 2   ...

Processes are spawned because many libraries that start threads do not work after a fork. If a process dies, the keys of its batch
run again one by one, and the other workers continue. Workers whose caller was killed end after their batch, and begin no other.

This module must not import Dagster, because every worker would import it too. The engine for assets is resources/engine.py.
"""

import os
import pickle
import signal
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from itertools import chain, islice
from multiprocessing.context import SpawnContext, SpawnProcess
from typing import Any, NamedTuple

from pebble import ProcessExpired, ProcessPool

from imagemill.errors import ImagemillError
from imagemill.fs.owners import current_folder, use
from imagemill.pipeline.remote import runs_again
from imagemill.processes import collect_rarely

BATCHES_AHEAD = 2
# After this many lost keys with no success in between, the work stops: the keys are probably not the cause.
LOST_IN_A_ROW = 3
CHECK_SECONDS = 1.0
CLOSE_SECONDS = 10.0


class WorkerDied(ImagemillError, RuntimeError):
    """A worker process ended early; `pid`, `exitcode`, and the `keys` that it may have been processing."""

    def __init__(self, pid: int | None, exitcode: int | None, keys: list[Any]) -> None:
        self.pid, self.exitcode, self.keys = pid, exitcode, keys
        self.how = _how(exitcode)
        shown = ", ".join(_short(key) for key in keys[:3]) + (f" and {len(keys) - 3} more" if len(keys) > 3 else "")
        super().__init__(
            f"worker process {pid} {self.how}",
            where=f"working on {shown}" if keys else None,
            why="something outside ended it (the system does when memory runs out), or one of these files brought it down",
            do="run the same command again: what was finished stays; with fewer workers, less memory is used",
        )


class _Batch(NamedTuple):
    """Keys that a process gets together. `deaths`: at which its only key was alone."""

    keys: list[Any]
    deaths: int = 0


def run_on_processes(
    worker_class: type[Any],
    keys: Iterable[Any],
    *,
    workers: int,
    batch_size: int,
    options: Mapping[str, Any] | Sequence[Mapping[str, Any]],
    died: Callable[[list[Any], WorkerDied], Iterable[Any]] | None = None,
    lost_key: Callable[[Any, WorkerDied], Any] | None = None,
) -> Iterator[Any]:
    """Run `worker_class(**options).stream(batch)` on batches of the keys in worker processes; yield the rows as they arrive.

    At most one process per batch is started. An exception of a worker is raised here, and ends the others.

    Args:
        worker_class: class that is constructed once per worker with `options`.
        keys: small picklable values.
        workers: number of processes.
        batch_size: keys per batch.
        options: arguments of `worker_class`, or those of each process; the process that replaces a dead one gets its arguments.
        died: return the rows of a batch whose process died; the batch does not run again. None: it runs again.
        lost_key: return the row of a key whose process died each time. None: such keys are reported at the end.

    Raises:
        WorkerDied: at the end, with every lost key without a row; earlier after several deaths without a success.
    """
    remaining = iter(keys)
    todo: Iterator[_Batch] = map(_Batch, iter(lambda: list(islice(remaining, batch_size)), []))
    most = BATCHES_AHEAD if died is None else 1
    each = [dict(options)] * workers if isinstance(options, Mapping) else [dict(own) for own in options]
    pools: dict[ProcessPool, _Spawn] = {}
    running: dict[Future[list[Any]], tuple[ProcessPool, _Batch]] = {}
    lost: list[Any] = []
    lost_in_a_row, death = 0, None

    def fill(pool: ProcessPool | None, most: int, number: int) -> None:
        for batch in islice(todo, most - sum(its_pool is pool for its_pool, _ in running.values())):
            if pool is None:
                spawn = _Spawn()
                spawn.number = number
                work = worker_class, each[number], current_folder()
                pool = ProcessPool(1, initializer=_begin, initargs=(os.getpid(), *work), context=spawn)
                pools[pool] = spawn
            running[_schedule(pool, _stream, batch.keys)] = pool, batch

    try:
        for number in range(workers):
            fill(None, 1, number)
        for pool, spawn in list(pools.items()):
            fill(pool, most, spawn.number)
        while running and lost_in_a_row < LOST_IN_A_ROW:
            wait(running, CHECK_SECONDS, FIRST_COMPLETED)
            for future in [
                future for future, (pool, _) in running.items() if future.done() or pools[pool].is_dead(pool)
            ]:
                if future not in running:
                    continue  # its batch was moved to another process
                pool, batch = running.pop(future)
                error = future.exception() if future.done() else BrokenProcessPool()
                if is_dead := isinstance(error, ProcessExpired | BrokenProcessPool):
                    death = WorkerDied(pools[pool].process.pid, pools[pool].process.exitcode, batch.keys)
                    again, rows = _after_death(batch, death, died, lost_key)
                    todo = chain(again, todo)
                    if not again and not died:
                        lost, lost_in_a_row = lost + ([] if lost_key else batch.keys), lost_in_a_row + 1
                else:
                    rows, lost_in_a_row = future.result(), 0
                number = pools[pool].number
                if is_dead or pools[pool].is_dead(pool):
                    # pebble would start another process in this pool, but half a message may be left in the pipe.
                    _stop([pool])
                    del pools[pool]
                    waiting = [running.pop(other)[1] for other, (its_pool, _) in [*running.items()] if its_pool is pool]
                    pool, todo = None, chain(waiting, todo)
                fill(pool, most, number)
                yield from rows
        lost = lost or [
            key for _, batch in running.values() for key in batch.keys
        ]  # running only if the work stopped early
        if lost and death:
            raise WorkerDied(death.pid, death.exitcode, lost)
        wait([_schedule(pool, _close) for pool, spawn in pools.items() if not spawn.is_dead(pool)], CLOSE_SECONDS)
    finally:
        _stop(pools)


def _schedule(pool: ProcessPool, function: Callable[..., Any], *args: Any) -> Future[Any]:
    """Schedule a call. If the process of the pool has died, which pebble reports by a RuntimeError, the future has failed."""
    try:
        return pool.schedule(function, args=args)
    except RuntimeError:
        broken: Future[Any] = Future()
        broken.set_exception(BrokenProcessPool())
        return broken


def _after_death(
    batch: _Batch,
    death: WorkerDied,
    died: Callable[[list[Any], WorkerDied], Iterable[Any]] | None,
    lost_key: Callable[[Any, WorkerDied], Any] | None,
) -> tuple[list[_Batch], Iterable[Any]]:
    """Return the batches that run again after the death of a process, and the rows of those that do not."""
    if died:
        return [], died(batch.keys, death)
    deaths = batch.deaths + 1 if len(batch.keys) == 1 else 0
    if again := runs_again(batch.keys, deaths):
        return [_Batch(keys, deaths) for keys in again], []
    return [], [lost_key(key, death) for key in batch.keys] if lost_key else []


class _Spawn(SpawnContext):
    """The spawn context of one pool, which keeps the first process that it creates, and the number of its arguments."""

    process: Any = None
    number: int = 0

    def Process(self, *args: Any, **kwargs: Any) -> SpawnProcess:  # pyright: ignore[reportIncompatibleVariableOverride]  # noqa: N802
        """Create a process, and keep it if it is the first."""
        process = SpawnProcess(*args, **kwargs)
        self.process = self.process or process
        return process

    def is_dead(self, pool: ProcessPool) -> bool:
        """Return True if the process died while idle, or with exit code 0, for which pebble waits forever."""
        return not pool.active or self.process.exitcode == 0


def _stop(pools: Iterable[ProcessPool]) -> None:
    for pool in pools:
        pool.stop()
    for pool in pools:
        pool.join()


# ---- in the worker process

# `caller`: pid of the caller; `work`: worker class, options, and folder of owners; `worker` after the first batch.
_process: dict[str, Any] = {}


def _begin(caller: int, *work: Any) -> None:
    """Initialise the process. pebble ignores SIGINT: an interrupt reaches the whole process group, and the caller handles it."""
    collect_rarely()
    _process.update(caller=caller, work=work)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    warnings.filterwarnings("ignore", module=r"PIL\.")  # as the command does


def _stream(batch: list[Any]) -> list[Any]:
    try:
        if "worker" not in _process:
            worker_class, options, owners = _process["work"]
            if owners is not None:
                use(owners)  # temporary files name this process: they are removed after its death
            _process["worker"] = worker_class(**options)
        if os.getppid() != _process["caller"]:
            os._exit(1)  # the caller was killed; the next run makes these files, and has swept the folder already
        return list(_process["worker"].stream(batch))
    except Exception as error:
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:
            raise ImagemillError(f"{type(error).__name__}: {error}", where="a worker process") from None
        raise


def _close() -> None:
    if "worker" in _process:
        _process["worker"].close()


def _how(exitcode: int | None) -> str:
    if exitcode is not None and exitcode < 0:
        with suppress(ValueError):
            return f"was ended by {signal.Signals(-exitcode).name}"
    return f"ended with exit code {exitcode}"


def _short(key: object) -> str:
    text = str(getattr(key, "name", key))
    return text if len(text) <= 80 else f"{text[:77]}…"
