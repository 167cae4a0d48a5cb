"""Bounded prefetching on a thread pool, in order, within a budget.

The work itself and its weights are defined by callers (pipeline/stage2/embed.py).
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain
from typing import Generic, NamedTuple, TypeVar

from imagemill.parts import in_parts
from imagemill.pipeline.turns import LIGHT_CPU_SECONDS, Turns

T = TypeVar("T")
R = TypeVar("R")

_NOTHING: Future[list[int]] = Future()
_NOTHING.set_result([])

# Light items are passed to a thread several at a time: to pass one costs about as much as to open a small image. A task has at
# most so many items, and so small a part of the budget.
_ITEMS_PER_TASK = 32
_BUDGET_PER_TASK = 1 / 64

# Light work that waits less than this per item gains nothing from another thread: passing it to one takes 0.03 ms. Each part of
# so many items decides: few, because the waits of the first parts add up.
_LIGHT_WAIT_SECONDS = 0.000_1
_TRIED_AT_ONCE = 16


class _Task(NamedTuple, Generic[R]):
    """Items at work. `future`: their results in order, and the error that ended the work, if any."""

    future: Future[tuple[list[R], BaseException | None]]
    items: int
    weight: int


def map_on(pool: ThreadPoolExecutor, work: Callable[[T], R], items: Iterable[T]) -> Iterator[R]:
    """Yield `work(item)` of each item, in order: `pool.map` for items that may take little time each.

    The caller's thread does the work until other threads would be faster, as where a disk must be waited for: until two
    successive parts took long, because one may have if the process was stopped or its core had other work.
    From then on, the pool does it, and all items are taken at once.
    """
    remaining, took_long = iter(items), False
    for part in in_parts(remaining, _TRIED_AT_ONCE):
        began, cpu_began = time.perf_counter(), time.thread_time()
        made = [work(item) for item in part]
        seconds, cpu = time.perf_counter() - began, time.thread_time() - cpu_began
        yield from made
        before = took_long
        took_long = cpu >= LIGHT_CPU_SECONDS * len(part) or seconds - cpu >= _LIGHT_WAIT_SECONDS * len(part)
        if before and took_long:
            break
    parts = in_parts(remaining, _ITEMS_PER_TASK)
    yield from chain.from_iterable(pool.map(lambda part: [work(item) for item in part], parts))


def bounded_map(
    pool: ThreadPoolExecutor,
    work: Callable[[T], R],
    items: Iterable[T],
    *,
    weigh: Callable[[T], int | None],
    measure: Callable[[T], int],
    keeps: Callable[[R], int],
    most: Callable[[], int],
    budget: int,
    threads: int,
) -> Iterator[R]:
    """Yield `work(item)` of each item, in order.

    An item is started once fewer than `most()` are pending and their weights leave room for its own; a single item may have any
    weight. Only the caller's thread decides, and it holds no lock while it waits, so there is no deadlock.

    Args:
        pool: runs `work` and `measure`.
        work: computes the result of an item.
        items: the items.
        weigh: returns the weight of an item from its start; None if only `measure` can determine it.
        measure: returns the weight of an item; called on the pool.
        keeps: returns the weight of a result until it is yielded.
        most: returns the number of items that may be pending at once, which may change.
        budget: largest total weight.
        threads: threads of the pool.
    """
    turns, of_measuring = Turns(), Turns()
    running: deque[_Task[R]] = deque()
    begun = pending = 0
    together = max(1, min(_ITEMS_PER_TASK, most() // max(4, 2 * threads)))

    def measure_some(some: Sequence[T]) -> list[int]:
        with of_measuring.turn(len(some)):
            return [measure(item) for item in some]

    for part, weight in _parts(_weighed(pool, weigh, measure_some, items, most, together), together, budget):
        # `begun` is never less than the weight held, and known without examining each future.
        while running and (
            pending + len(part) > most() or (begun + weight > budget and _held(running, keeps) + weight > budget)
        ):
            task = running.popleft()
            yield from _results(task)
            begun, pending = begun - task.weight, pending - task.items
        running.append(_Task(pool.submit(_work_on, work, part, turns), len(part), weight))
        begun, pending = begun + weight, pending + len(part)
    while running:
        yield from _results(running.popleft())


def _work_on(work: Callable[[T], R], items: Sequence[T], turns: Turns) -> tuple[list[R], BaseException | None]:
    made: list[R] = []
    try:
        with turns.turn(len(items)):
            for item in items:
                made.append(work(item))
    except BaseException as error:  # raised by the caller's thread, after the results before it
        return made, error
    return made, None


def _results(task: _Task[R]) -> Iterator[R]:
    made, error = task.future.result()
    yield from made
    if error is not None:
        raise error


def _parts(weighed: Iterable[tuple[T, int]], most: int, budget: int) -> Iterator[tuple[list[T], int]]:
    """Yield the items of each task, and their weight."""
    part: list[T] = []
    total = 0
    for item, weight in weighed:
        if part and (len(part) == most or total + weight > budget * _BUDGET_PER_TASK):
            yield part, total
            part, total = [], 0
        part.append(item)
        total += weight
    if part:
        yield part, total


def _weighed(
    pool: ThreadPoolExecutor,
    weigh: Callable[[T], int | None],
    measure: Callable[[Sequence[T]], list[int]],
    items: Iterable[T],
    ahead: Callable[[], int],
    together: int,
) -> Iterator[tuple[T, int]]:
    """Yield items with their weights; measuring starts early enough not to queue behind the work on other items."""
    requested: deque[tuple[list[T], list[int | None], Future[list[int]]]] = deque()
    count = 0
    for part in in_parts(items, together):
        weights = [weigh(item) for item in part]
        unknown = [item for item, weight in zip(part, weights, strict=True) if weight is None]
        requested.append((part, weights, pool.submit(measure, unknown) if unknown else _NOTHING))
        count += len(part)
        while count > ahead():
            count -= len(requested[0][0])
            yield from _measured(*requested.popleft())
    while requested:
        yield from _measured(*requested.popleft())


def _measured(items: list[T], weights: list[int | None], measured: Future[list[int]]) -> Iterator[tuple[T, int]]:
    missing = iter(measured.result())
    for item, weight in zip(items, weights, strict=True):
        yield item, next(missing) if weight is None else weight


def _held(running: Iterable[_Task[R]], keeps: Callable[[R], int]) -> int:
    return sum(sum(map(keeps, task.future.result()[0])) if task.future.done() else task.weight for task in running)
