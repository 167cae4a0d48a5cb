"""Bounded prefetching on a thread pool, in order, within a budget.

The work itself and its weights are defined by callers (pipeline/stage2/embed.py).
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


def bounded_map(
    pool: ThreadPoolExecutor,
    work: Callable[[T], R],
    items: Iterable[T],
    *,
    weigh: Callable[[T], int | None],
    measure: Callable[[T], int],
    keeps: Callable[[R], int],
    most: int,
    budget: int,
) -> Iterator[R]:
    """Yield `work(item)` of each item, in order.

    An item is started once fewer than `most` are pending and their weights leave room for its own; a single item may have any
    weight. Only the caller's thread decides, and it holds no lock while it waits, so there is no deadlock.

    Args:
        pool: runs `work` and `measure`.
        work: computes the result of an item.
        items: the items.
        weigh: returns the weight of an item from its start; None if only `measure` can determine it.
        measure: returns the weight of an item; called on the pool.
        keeps: returns the weight of a result until it is yielded.
        most: most items pending at once.
        budget: largest total weight.
    """
    running: deque[tuple[Future[R], int]] = deque()
    begun = 0
    for item, weight in _weighed(pool, weigh, measure, items, most):
        # `begun` is never less than the weight held, and known without examining each future.
        while running and (
            len(running) >= most or (begun + weight > budget and _held(running, keeps) + weight > budget)
        ):
            future, taken = running.popleft()
            begun -= taken
            yield future.result()
        running.append((pool.submit(work, item), weight))
        begun += weight
    while running:
        yield running.popleft()[0].result()


def _weighed(
    pool: ThreadPoolExecutor,
    weigh: Callable[[T], int | None],
    measure: Callable[[T], int],
    items: Iterable[T],
    ahead: int,
) -> Iterator[tuple[T, int]]:
    """Yield items with their weights; measuring starts early enough not to queue behind the work on other items."""
    requested: deque[tuple[T, int | Future[int]]] = deque()
    for item in items:
        weight = weigh(item)
        requested.append((item, pool.submit(measure, item) if weight is None else weight))
        if len(requested) > ahead:
            yield _measured(*requested.popleft())
    while requested:
        yield _measured(*requested.popleft())


def _measured(item: T, weight: int | Future[int]) -> tuple[T, int]:
    return item, weight if isinstance(weight, int) else weight.result()


def _held(running: Iterable[tuple[Future[R], int]], keeps: Callable[[R], int]) -> int:
    return sum(
        keeps(future.result()) if future.done() and not future.exception() else weight for future, weight in running
    )
