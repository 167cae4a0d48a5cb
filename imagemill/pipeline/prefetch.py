"""Work on threads ahead of whoever takes the results: in order, and never more of it at once than a budget.

Belongs here: how much is under way.
Belongs elsewhere: what the work is and what it weighs (pipeline/stage2/embed.py).
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

    An item is started once fewer than `most` are under way and their weights leave room for its own; one alone may weigh
    anything. Only the caller's thread decides that, and it holds nothing while it waits: there is no deadlock to avoid.

    Args:
        weigh: what an item weighs from its start; None where only `measure`, asked on the pool, can tell.
        keeps: what its result weighs until it is taken.
    """
    running: deque[tuple[Future[R], int]] = deque()
    begun = 0
    for item, weight in _weighed(pool, weigh, measure, items, most):
        # What was begun is never less than what is held, and known without asking each.
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
    """Items with their weights, which are asked for so early that none waits in the queue behind the work of others."""
    asked: deque[tuple[T, int | Future[int]]] = deque()
    for item in items:
        weight = weigh(item)
        asked.append((item, pool.submit(measure, item) if weight is None else weight))
        if len(asked) > ahead:
            yield _answered(*asked.popleft())
    while asked:
        yield _answered(*asked.popleft())


def _answered(item: T, weight: int | Future[int]) -> tuple[T, int]:
    return item, weight if isinstance(weight, int) else weight.result()


def _held(running: Iterable[tuple[Future[R], int]], keeps: Callable[[R], int]) -> int:
    return sum(
        keeps(future.result()) if future.done() and not future.exception() else weight for future, weight in running
    )
