"""Turns of threads: light work one thread after the other, other work at the same time."""

import threading
import time

import pytest

from imagemill.pipeline import turns
from imagemill.pipeline.turns import Turns


def compute(seconds):
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def is_taken(work):
    """Whether the next item of this work is done in a turn."""
    with work.turn(1):
        return turns._TURN.locked()


@pytest.fixture
def patient(monkeypatch):
    """A busy machine makes no work heavy, and no thread goes ahead."""
    for name in ("LIGHT_CPU_SECONDS", "_LIGHT_WAIT_SECONDS", "_LONGEST_WAIT_SECONDS"):
        monkeypatch.setattr(turns, name, 60)


def test_threads_take_turns_whatever_work_they_do(patient):
    now, most = [], []

    def do(work):
        for _ in range(20):
            with work.turn(3):
                now.append(1)
                time.sleep(0.001)
                most.append(len(now))
                now.pop()

    threads = [threading.Thread(target=do, args=(Turns(),)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert (max(most), len(most)) == (1, 80)


@pytest.mark.parametrize("take_long", [time.sleep, compute], ids=["waits", "computes"])
def test_work_that_takes_long_is_done_by_several_threads(take_long):
    work, together = Turns(), threading.Barrier(2, timeout=60)
    for _ in range(3):
        with work.turn(1):
            take_long(0.1)

    def do():
        with work.turn(1):
            together.wait()

    threads = [threading.Thread(target=do) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert not together.broken


def test_work_is_light_by_what_each_item_takes():
    """A long turn of many items is light."""
    work = Turns()
    with work.turn(10_000):
        time.sleep(0.1)

    assert is_taken(work)


def test_one_long_wait_leaves_work_light(monkeypatch):
    """A process that was stopped, or a core that other programs used, says nothing about the work."""
    monkeypatch.setattr(turns, "LIGHT_CPU_SECONDS", 60)
    monkeypatch.setattr(turns, "_LIGHT_WAIT_SECONDS", 0.05)  # a busy machine makes shorter waits
    work = Turns()
    for seconds in (0.5, *[0.0] * 20, 0.5):
        with work.turn(1):
            time.sleep(seconds)

        assert is_taken(work)


def test_work_that_waited_is_tried_again(monkeypatch):
    work = Turns()
    for _ in range(3):
        with work.turn(1):
            time.sleep(0.1)
    assert not work._light
    work._count = 1
    monkeypatch.setattr(turns, "_LIGHT_WAIT_SECONDS", 60)
    monkeypatch.setattr(turns, "LIGHT_CPU_SECONDS", 60)

    taken = [is_taken(work) for _ in range(turns._TRIED_ONCE_IN + 1)]

    assert taken == [False] * (turns._TRIED_ONCE_IN - 2) + [True] * 3


def test_work_that_computes_long_is_not_tried_again():
    """While it has the turn, the light work of other threads would wait."""
    work = Turns()
    for _ in range(2 * turns._TRIED_ONCE_IN):
        with work.turn(1):
            taken = turns._TURN.locked()
            compute(turns._HEAVY * turns.LIGHT_CPU_SECONDS)

    assert not taken


def test_a_thread_that_waits_too_long_works_without_a_turn(monkeypatch):
    """No thread can block another one. The turn stays with the thread that has it."""
    monkeypatch.setattr(turns, "_LONGEST_WAIT_SECONDS", 0.01)
    with turns._TURN:
        with Turns().turn(1):
            done = True
        kept = turns._TURN.locked()

    assert done
    assert kept
    assert not turns._TURN.locked()


def test_items_are_worked_on_some_in_each_turn(patient):
    seen = [(item, turns._TURN.locked()) for item in Turns().over(range(100))]

    assert seen == [(item, True) for item in range(100)]
    assert not turns._TURN.locked()


def test_a_turn_over_items_ends_with_its_iteration(patient):
    items = Turns().over(range(100))
    next(items)

    items.close()

    assert not turns._TURN.locked()


def test_an_error_ends_the_turn():
    with pytest.raises(OSError, match="no such file"), Turns().turn(1):
        raise OSError("no such file")

    assert not turns._TURN.locked()
