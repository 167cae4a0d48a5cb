"""Workers on the nodes of a Ray cluster: one actor per worker, which gets batches and returns rows as a stream.

    keys ──send──> batch ──▶ actor 1   at most two batches each, so that no actor waits for the driver
    rows <─receive─ parts ◀──
                    batch ──▶ actor 2  ...

Placement is Ray's, one node at a time: a node whose software or model differs gets no actor. An actor that dies is replaced; its
batch is divided as pipeline/remote.py says. How the driver joins the cluster is in ray_cluster.py.

What runs on the nodes is in pipeline/remote.py, which does not import Dagster. The engine for assets is engine.py.

A signal that arrives in a call of Ray is handled after the call: Ray would replace the exception of the handler, or drop it.
Spec: docs/spec/engines.md
"""

import os
import pickle
import socket
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import ray
from ray.exceptions import ObjectLostError, RayActorError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from imagemill.errors import ImagemillError
from imagemill.pipeline.prefetch import bounded_map
from imagemill.pipeline.remote import (
    About,
    Batch,
    BatchEnded,
    BatchFailed,
    LinkEnd,
    NodeWorker,
    Parcel,
    RemotePass,
    WorkQueue,
    about_here,
    bytes_of,
    differences,
)
from resources.dagster_internals.events import interrupts_held
from resources.ray_cluster import IN_FLIGHT_BYTES

BATCHES_AHEAD = 2
# A batch is so many model calls, and at most so many seconds of work, but at least one model call.
CALLS_PER_BATCH = 4
SECONDS_PER_BATCH = 5.0
# Parts that an actor makes before the driver takes the first.
PARTS_AHEAD = 4

IN_FLIGHT_BYTES_PER_ACTOR = 32 << 20

# Actors that are ready so long after the first one must agree with it before work begins.
AGREE_SECONDS = 30.0
# The driver looks for new and lost nodes this often, and waits this long for results in between.
NODES_SECONDS = 2.0
WAIT_SECONDS = 0.2
# After an interrupt, rows of the model calls that had begun arrive within this time.
STOP_SECONDS = 12.0
# Idle actors have so long to remove their temporary files.
CLOSE_SECONDS = 2.0
# Threads that read images, and that write files; rows that a thread gets at a time.
READERS = 8
WRITERS = min(8, os.cpu_count() or 1)
ROWS_PER_TASK = 4

# The loss of a node is known so long after its workers have died.
LOSS_SECONDS = 4.0
# What Ray says of a worker that it has ended itself, and of one whose node is lost.
_LOW_MEMORY, _NODE_DIED = "low on memory", "node has died"

# What Ray raises if a worker has died, and if a node is lost with rows that had not been fetched from it.
_Death = RayActorError | ObjectLostError
# Seconds in which a node that exists accepts a connection.
CONNECT_SECONDS = 1.0

# A node whose workers die so often before they answer gets no other.
TRIES = 3

# Deaths one after the other, without a row in between, after which the keys are probably not the cause.
DEATHS_IN_A_ROW = 8


class NoWorkers(ImagemillError, RuntimeError):
    """No worker could begin, or none is left."""


class NodesDiffer(ImagemillError, RuntimeError):
    """The nodes of a cluster would not make the same files."""


@dataclass(frozen=True, kw_only=True)
class WorkerDemand:
    """Resources that a worker asks of a node, and limits of a pass.

    Attributes:
        cpus: processors.
        gpus: GPUs, or a share of one.
        resources: other resources of the cluster, by name.
        workers: most workers; None for as many as the nodes have room for.
        ready_timeout: seconds within which the first worker must be ready.
        in_flight_bytes: most bytes of images and arrays on the driver; None: what the number of workers needs.
        accept_node: node that is right where nodes differ.
    """

    cpus: float = 1
    gpus: float = 0
    resources: Mapping[str, float] = field(default_factory=dict)
    workers: int | None = None
    ready_timeout: float = 300
    in_flight_bytes: int | None = None
    accept_node: str | None = None

    @property
    def amounts(self) -> dict[str, float]:
        """The resources by their names in Ray."""
        named = {"CPU": self.cpus, "GPU": self.gpus, **self.resources}
        return {name: amount for name, amount in named.items() if amount}

    def __str__(self) -> str:
        return ", ".join(f"{amount:g} {name}" for name, amount in self.amounts.items()) or "nothing"


@dataclass
class NodeWork:
    """Work of a node: number, keys and seconds of its workers; apart, their first batches, in which they load the model."""

    workers: int = 0
    keys: int = 0
    seconds: float = 0.0
    first_keys: int = 0
    first_seconds: float = 0.0


@dataclass(eq=False)
class _Actor:
    """An actor, as the driver sees it. `about`: the answer of a new one, until it has come. `ended`: batches."""

    handle: Any
    node: str
    name: str
    began: float
    about: Any
    batches: deque[tuple[Any, Batch]] = field(default_factory=deque)
    known: About | None = None
    ended: int = 0

    @property
    def has_room(self) -> bool:
        """Whether it can get another batch: none beside a suspect."""
        return (
            self.known is not None
            and len(self.batches) < BATCHES_AHEAD
            and not any(batch.suspect for _, batch in self.batches)
        )


class RayPool:
    """Runs one pass on a cluster that this process has joined.

    Args:
        task: the pass.
        demand: what a worker needs.
        note: called with a line for people, such as that a node is not used.

    Attributes:
        work: of each node, by its name.
        sent: bytes of images that were sent.
        returned: bytes of arrays that came back.
    """

    def __init__(self, task: RemotePass, demand: WorkerDemand, note: Callable[[str], None]) -> None:
        self._task, self._demand, self._note = task, demand, note
        self._recipe = pickle.dumps(task.recipe)
        self._queue = WorkQueue(task.name_of, task.model_batch, task.parts)
        self._actors: list[_Actor] = []
        self._unfit: dict[str, str] = {}  # node id -> why
        self._driver = about_here(None, "", *task.modules)
        self._reference: About | None = None
        self._last_ready, self._looked, self._first_ready = time.monotonic(), 0.0, None
        self._starts: Counter[str] = Counter()  # workers of a node that died before they answered
        self._in_flight, self._deaths_in_a_row, self._stopping = 0, 0, False
        self.work: defaultdict[str, NodeWork] = defaultdict(NodeWork)
        self.sent, self.returned = 0, 0
        self._staging: deque[tuple[Future[Any], int]] = deque()
        self._readers = ThreadPoolExecutor(READERS, "send")
        self._writers = ThreadPoolExecutor(WRITERS, "receive")

    # ---- the stream

    def stream(self, keys: Sequence[Any]) -> Iterator[Any]:
        """Yield one row per key, in any order. On interrupt, yield the rows that arrive soon after, then re-raise.

        Raises:
            NoWorkers: if no worker is ready in time, or workers die one after the other.
            NodesDiffer: if the nodes do not agree, before any work.
        """
        try:
            yield from self._work(keys)
        except GeneratorExit:
            raise
        except BaseException:
            yield from self._rest()
            raise
        finally:
            self._end_actors()
            self._readers.shutdown(cancel_futures=True)
            self._writers.shutdown()

    def _work(self, keys: Sequence[Any]) -> Iterator[Any]:
        sent = bounded_map(
            self._readers,
            self._task.send,
            keys,
            weigh=self._task.weight,
            measure=self._task.weight,
            keeps=lambda made: made.size if isinstance(made, Parcel) else 0,
            most=lambda: 4 * CALLS_PER_BATCH * self._task.model_batch,
            budget=self._limit // 4,
            threads=READERS,
        )
        next_batch: list[Parcel] = []
        more = True
        while True:
            each = -(-len(keys) // max(1, len(self._actors)))  # at least one batch for each worker
            while more and len(next_batch) < max(1, min(self._queue.size, each)):
                made = next(sent, None)
                if isinstance(made, Parcel):
                    next_batch.append(made)
                elif made is not None:
                    yield made
                more = made is not None
            if not (more or next_batch or self._queue or self._running):
                break
            if self._nodes_are_due:
                self._look_after_nodes()
            while (actor := self._free_actor()) and (next_batch or self._queue):
                if (again := self._queue.again(idle=not actor.batches)) is not None:
                    parcels = yield from self._sent_again(again)
                elif next_batch:
                    parcels, next_batch = next_batch, []
                else:  # single keys, which wait for a worker without a batch
                    yield from self._arriving()
                    break
                self._submit(actor, parcels, suspect=again is not None and len(again) == 1)
                if more and not next_batch:
                    break
            else:
                yield from self._arriving()
            yield from self._staged()
        yield from self._staged(all_of_them=True)

    def _sent_again(self, keys: Sequence[Any]) -> Generator[Any, None, list[Parcel]]:
        """Return parcels of keys that were given back; yield rows of those that need no worker any more."""
        made = [self._task.send(key) for key in keys]
        yield from (row for row in made if not isinstance(row, Parcel))
        return [parcel for parcel in made if isinstance(parcel, Parcel)]

    def _rest(self) -> Iterator[Any]:
        """After an interrupt, yield the rows of the model calls that had begun."""
        until = time.monotonic() + STOP_SECONDS
        self._stop()
        while self._running and time.monotonic() < until:
            with suppress(ImagemillError):  # a second error says no more than the first
                yield from self._arriving()
            yield from self._staged()
        yield from self._staged(all_of_them=True)

    @interrupts_held()
    def _stop(self) -> None:
        self._stopping = True
        for actor in self._actors:
            actor.handle.stop.options(concurrency_group="control").remote()
            while len(actor.batches) > 1:
                ray.cancel(actor.batches.pop()[0])

    @interrupts_held()
    def _end_actors(self) -> None:
        """Let idle actors remove their temporary files; then end all."""
        idle = [actor for actor in self._actors if actor.known and not actor.batches]
        closing = [actor.handle.close.options(concurrency_group="control").remote() for actor in idle]
        if closing:
            ray.wait(closing, num_returns=len(closing), timeout=CLOSE_SECONDS)
        for actor in self._actors:
            ray.kill(actor.handle)

    @property
    def _limit(self) -> int:
        """Most bytes of images and arrays on the driver."""
        least = max(IN_FLIGHT_BYTES, IN_FLIGHT_BYTES_PER_ACTOR * len(self._actors))
        return self._demand.in_flight_bytes or least

    @property
    def _nodes_are_due(self) -> bool:
        """Whether workers have to be started or are waited for; asked for every row, and cheaper than to look."""
        waits = self._reference is None or not all(actor.known for actor in self._actors)
        return waits or time.monotonic() - self._looked >= NODES_SECONDS

    @property
    def _running(self) -> bool:
        return any(actor.batches for actor in self._actors)

    # ---- batches

    def _free_actor(self) -> _Actor | None:
        """Return the actor with the fewest batches, None if no further batch may begin now."""
        if self._reference is None or self._in_flight > self._limit:
            return None
        ready = [actor for actor in self._actors if actor.has_room]
        return min(ready, key=lambda actor: len(actor.batches), default=None)

    @interrupts_held()
    def _submit(self, actor: _Actor, parcels: list[Parcel], *, suspect: bool) -> None:
        if not parcels:
            return
        batch = self._queue.batch(parcels, suspect=suspect)
        stream = actor.handle.run.options(
            num_returns="streaming", _generator_backpressure_num_objects=PARTS_AHEAD
        ).remote([parcel.payload for parcel in parcels])
        batch.parcels = [parcel._replace(payload=None) for parcel in parcels]  # Ray has a copy
        actor.batches.append((stream, batch))
        self._in_flight += batch.size
        self.sent += batch.size

    def _arriving(self) -> Iterator[Any]:
        """Wait a moment for parts, and take them; yield the rows of keys that are lost."""
        for actor, part in self._parts():
            if isinstance(part, _Death):
                yield from self._after_death(actor, part)
            elif part is None:
                self._end_of_batch(actor)
            else:
                self._take(actor, part)

    @interrupts_held()
    def _parts(self) -> list[tuple[_Actor, Any]]:
        """Wait a moment; return a part of each batch that has one: None at its end, an error if the worker died."""
        streams = {stream: actor for actor in self._actors for stream, _ in list(actor.batches)[:1]}
        if not streams:
            time.sleep(WAIT_SECONDS / 4)
            return []
        ready, _ = ray.wait(list(streams), num_returns=1, timeout=WAIT_SECONDS, fetch_local=True)
        return [(streams[stream], _next_part(stream)) for stream in ready]

    def _take(self, actor: _Actor, part: "list[Any] | BatchFailed | BatchEnded") -> None:
        _, batch = actor.batches[0]
        if isinstance(part, BatchFailed):
            raise part.error
        if isinstance(part, BatchEnded):
            self._queue.took(len(batch.parcels), part.seconds, SECONDS_PER_BATCH, CALLS_PER_BATCH)
            self._count(actor, len(batch.parcels), part.seconds)
            return
        self._deaths_in_a_row = 0
        for row in part:
            name = self._task.name_of(row)
            if name not in batch.names:
                raise NodesDiffer(f"the worker on {actor.name} returned {name}, which it was not asked for")
            batch.names.discard(name)
        # Several rows per task, because to pass one to another thread takes as long as to store a small array.
        for begin in range(0, len(part), ROWS_PER_TASK):
            rows = part[begin : begin + ROWS_PER_TASK]
            size = sum(map(bytes_of, rows))
            self._in_flight += size
            self.returned += size
            self._staging.append((self._writers.submit(self._receive, rows), size))

    def _receive(self, rows: Sequence[Any]) -> list[Any]:
        return [self._task.receive(row) for row in rows]

    def _count(self, actor: _Actor, keys: int, seconds: float) -> None:
        work = self.work[actor.name]
        if actor.ended:
            work.keys += keys
            work.seconds += seconds
        else:
            work.workers += 1
            work.first_keys += keys
            work.first_seconds += seconds
        actor.ended += 1

    def _end_of_batch(self, actor: _Actor) -> None:
        _, batch = actor.batches.popleft()
        self._in_flight -= batch.size
        if batch.names and not self._stopping:
            raise NodesDiffer(f"the worker on {actor.name} returned nothing for {min(batch.names)}")

    def _staged(self, *, all_of_them: bool = False) -> Iterator[Any]:
        """Yield the rows that are stored; while too many bytes wait, or at the end, wait for them."""
        while self._staging:
            future, size = self._staging[0]
            if not (all_of_them or future.done() or self._in_flight > self._limit):
                return
            rows = future.result()
            self._staging.popleft()
            self._in_flight -= size
            yield from rows

    # ---- actors

    @interrupts_held()
    def _look_after_nodes(self) -> None:
        """Start actors on nodes with room, take the answers of new ones, and settle whose software counts."""
        now = time.monotonic()
        if now - self._looked >= NODES_SECONDS:
            self._looked = now
            self._start_actors()
        self._take_answers()
        ready = [actor for actor in self._actors if actor.known]
        if ready:
            self._last_ready = now
        if self._reference is None and ready:
            self._first_ready = self._first_ready or now
            asked = [actor for actor in self._actors if not actor.known]
            if not asked or now - self._first_ready >= AGREE_SECONDS:
                self._agree(ready)
        elif now - self._last_ready >= self._demand.ready_timeout:
            raise self._no_workers()

    def _start_actors(self) -> None:
        nodes = [node for node in ray.nodes() if node["Alive"] and node["NodeID"] not in self._unfit]
        room = {node["NodeID"]: _room(node["Resources"], self._demand.amounts) for node in nodes}
        names = {node["NodeID"]: node["NodeManagerHostname"] for node in nodes}
        here = Counter(actor.node for actor in self._actors)
        free = [node for node, places in room.items() for _ in range(places - here[node])]
        free.sort(key=lambda node: here[node])
        most = len(free) if self._demand.workers is None else self._demand.workers - len(self._actors)
        for node in free[: max(0, most)]:
            amounts = dict(self._demand.amounts)
            handle = (
                ray.remote(concurrency_groups={"control": 1})(NodeWorker)  # pyright: ignore[reportCallIssue]
                .options(
                    num_cpus=amounts.pop("CPU", 0),
                    num_gpus=amounts.pop("GPU", 0),
                    resources=amounts,
                    max_restarts=0,
                    scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
                )
                .remote(self._recipe)
            )
            self._actors.append(
                _Actor(
                    handle,
                    node,
                    names[node],
                    time.monotonic(),
                    handle.about.options(concurrency_group="control").remote(),
                )
            )

    def _take_answers(self) -> None:
        waiting = {actor.about: actor for actor in self._actors if actor.known is None}
        if not waiting:
            return
        answered, _ = ray.wait(list(waiting), num_returns=len(waiting), timeout=0)
        for ref in answered:
            actor = waiting[ref]
            try:
                about = ray.get(ref)
            except RayError as error:
                self._starts[actor.node] += 1
                if isinstance(error, RayActorError) and self._starts[actor.node] < TRIES:
                    self._actors.remove(actor)
                else:
                    self._leave(actor, f"its worker does not start: {_last_line(error)}")
                continue
            if isinstance(about, BatchFailed):
                if self._reference is None and len(self._actors) == 1:
                    raise about.error
                self._leave(actor, str(about.error.args[0] if about.error.args else about.error))
                continue
            differs = differences(self._driver, about, model=False)
            if not differs and self._reference is not None:
                differs = differences(self._reference, about)
            if differs:
                self._leave(actor, "; ".join(differs))
            else:
                actor.known = about

    def _leave(self, actor: _Actor, why: str) -> None:
        """Use the node of an actor no more."""
        self._unfit[actor.node] = f"{actor.name}: {why}"
        self._note(f"node {actor.name} gets no work: {why}")
        for other in [other for other in self._actors if other.node == actor.node and not other.batches]:
            self._actors.remove(other)
            ray.kill(other.handle)

    def _agree(self, ready: Sequence[_Actor]) -> None:
        """Settle the reference: the node that the user accepts, the recorded model, or what all workers have in common."""
        chosen = [actor for actor in ready if actor.name == self._demand.accept_node]
        fitting = chosen or [actor for actor in ready if actor.known and self._task.fits(actor.known)] or list(ready)
        first = fitting[0]
        assert first.known
        for actor in list(ready):
            assert actor.known
            if not (differs := differences(first.known, actor.known, code=False)):
                continue
            if not chosen and actor in fitting:
                raise NodesDiffer(
                    f"the nodes {first.name} and {actor.name} would not make the same files: {'; '.join(differs)}",
                    why=f"on {actor.name}, {differs[0]}, as on {first.name}",
                    do=f"make the nodes equal, or name the one that is right: --accept-node {first.name}",
                )
            self._leave(actor, "; ".join(differs))
        self._task.agree(first.known)
        self._reference = first.known

    def _after_death(self, actor: _Actor, death: _Death) -> Iterator[Any]:
        ray.kill(actor.handle)  # which may live if only rows are lost: its keys run elsewhere
        may_be_lost = actor.batches and len(actor.batches[0][1].parcels) == 1
        how, counts = _cause(death, actor.node, LOSS_SECONDS if may_be_lost else 0)
        self._actors.remove(actor)
        self._looked = 0.0  # a replacement is due
        self._deaths_in_a_row += counts
        if self._deaths_in_a_row >= DEATHS_IN_A_ROW:
            raise NoWorkers(
                f"{self._deaths_in_a_row} workers died one after the other, the last one on {actor.name}: it {how}",
                do="look at the worker's log in the Ray dashboard, then run the same command again: finished work is kept",
            )
        for number, (_, batch) in enumerate(actor.batches):
            self._in_flight -= batch.size
            batch.begun, batch.alone = number == 0, len(actor.batches) == 1
            for key in self._queue.died(batch, counts=counts):
                yield self._task.lost(key, how)

    def _no_workers(self) -> NoWorkers:
        nodes = [node for node in ray.nodes() if node["Alive"]]
        has = "; ".join(
            f"{node['NodeManagerHostname']} has "
            + (", ".join(f"{amount:g} {name}" for name, amount in _shown(node["Resources"])) or "nothing")
            for node in nodes
        )
        why = "; ".join(self._unfit.values()) or has
        return NoWorkers(
            f"no worker was ready within {self._demand.ready_timeout:g} s; each asks for {self._demand}",
            why=why,
            do="start nodes with these resources, or ask for less in `engine` of imagemill.yaml",
        )


def measure_links(bytes_each: int = 32_000_000) -> dict[str, float]:
    """Return the bytes per second between this computer and each node of the cluster, in the slower direction, by name."""
    found = {}
    data = np.zeros(bytes_each, np.uint8)
    for node in ray.nodes():
        if not node["Alive"] or not _room(node["Resources"], {"CPU": 1}):
            continue
        at = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        there: Any = ray.remote(LinkEnd).options(num_cpus=0, scheduling_strategy=at).remote()  # pyright: ignore
        ray.get(there.take.remote(data[:1]))  # starts its process
        took = _seconds(lambda end: end.take.remote(ray.put(data)), there)
        took = max(took, _seconds(lambda end: end.give.remote(bytes_each), there))
        ray.kill(there)
        found[node["NodeManagerHostname"]] = bytes_each / took
    return found


def _seconds(call: Callable[[Any], Any], there: Any) -> float:
    began = time.perf_counter()
    ray.get(call(there))
    return max(time.perf_counter() - began, 1e-9)


def _next_part(stream: Any) -> Any:
    """Return the next part of a batch, None at its end, or the error of a worker that died or of rows that are lost."""
    try:
        return ray.get(next(stream))
    except StopIteration:
        return None
    except (RayActorError, ObjectLostError) as death:
        return death


def _shown(resources: Mapping[str, float]) -> list[tuple[str, float]]:
    hidden = ("node:", "accelerator_type:", "memory", "object_store_memory")
    return [(name, amount) for name, amount in sorted(resources.items()) if not name.startswith(hidden)]


def _room(has: Mapping[str, float], asks: Mapping[str, float]) -> int:
    """Return how many workers have room on a node."""
    return min((int(has.get(name, 0) / amount + 1e-9) for name, amount in asks.items()), default=1)


def _cause(death: _Death, node: str, wait: float) -> tuple[str, bool]:
    """Return how a worker ended, and whether its keys may be the cause: not if the node was lost, or its memory ran out.

    Args:
        death: the error of Ray.
        node: id of the node.
        wait: seconds within which the loss of the node would be known.
    """
    text = str(death).lower()
    if _LOW_MEMORY in text:
        return "was ended because the memory of its node ran out", False
    until = time.monotonic() + wait
    lost = _NODE_DIED in text or isinstance(death, ObjectLostError)
    while not (lost := lost or _is_lost(node)):
        if time.monotonic() >= until:
            return "was killed", True
        time.sleep(WAIT_SECONDS)
    return "was on a node that is lost", False


def _is_lost(node: str) -> bool:
    """Return whether a node is lost: Ray knows it, or nothing listens any more at the node's port, which is known sooner."""
    found = next((each for each in ray.nodes() if each["NodeID"] == node), None)
    if found is None or not found["Alive"]:
        return True
    try:
        with socket.create_connection((found["NodeManagerAddress"], found["NodeManagerPort"]), CONNECT_SECONDS):
            return False
    except ConnectionRefusedError:
        return True
    except OSError:  # a network that answers slowly, or not at all: Ray decides
        return False


def _last_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
