"""The limit on bytes between two threads."""

import threading

from imagemill.pipeline.byte_budget import ByteBudget


def waits(budget, size):
    """Return whether `acquire` waits, and the thread that calls it."""
    thread = threading.Thread(target=budget.acquire, args=(size,), daemon=True)
    thread.start()
    thread.join(0.1)
    return thread.is_alive(), thread


def test_item_waits_until_others_are_released():
    budget = ByteBudget(10)
    budget.acquire(6)
    waiting, thread = waits(budget, 5)
    budget.release(6)
    thread.join(10)

    assert (waiting, thread.is_alive()) == (True, False)


def test_item_above_the_limit_is_alone():
    budget = ByteBudget(10)

    assert (waits(budget, 100)[0], waits(budget, 1)[0]) == (False, True)


def test_closed_budget_limits_nothing():
    budget = ByteBudget(10)
    budget.acquire(10)
    waiting, thread = waits(budget, 10)
    budget.close()
    thread.join(10)

    assert (waiting, thread.is_alive()) == (True, False)
