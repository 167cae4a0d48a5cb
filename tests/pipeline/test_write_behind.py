"""Writing behind the thread that makes the data."""

import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from imagemill.pipeline import write_behind
from imagemill.pipeline.write_behind import WAITING_BYTES, WAITING_ITEMS, WriteBehind

THREADS = 4


class Writes:
    """Records what is written, and the most threads that write at the same time. The first calls wait for `wanted` threads."""

    def __init__(self, wanted=1):
        self.wanted, self.items, self.now, self.most = wanted, [], 0, 0
        self._lock, self._together = threading.Lock(), threading.Event()

    def __call__(self, some):
        with self._lock:
            self.now += 1
            self.most = max(self.most, self.now)
            if self.now == self.wanted:
                self._together.set()
        self._together.wait(30)
        with self._lock:
            self.now -= 1
            self.items += some


def write_all(write, sizes, *, at_once=8, threads=THREADS, most_bytes=2**30):
    """Write one item of each of these sizes, `at_once` in a call of `put`."""
    with ThreadPoolExecutor(threads) as pool:
        behind = WriteBehind(pool, threads, write, most_bytes)
        items = list(enumerate(sizes))
        for begin in range(0, len(items), at_once):
            behind.put(items[begin : begin + at_once])


def test_small_items_are_written_by_one_thread_in_order():
    write = Writes()

    write_all(write, [16] * WAITING_ITEMS, at_once=1)

    assert (write.most, write.items) == (1, list(range(WAITING_ITEMS)))


@pytest.mark.parametrize("sizes", [[WAITING_BYTES] * 12, [16] * 12 * WAITING_ITEMS], ids=["bytes", "items"])
def test_other_threads_join_as_items_accumulate(sizes):
    write = Writes(wanted=THREADS)

    write_all(write, sizes)

    assert write.most == THREADS
    assert sorted(write.items) == list(range(len(sizes)))


def test_put_waits_until_there_is_room():
    held, behind = threading.Event(), []

    def write(some):
        held.wait(30)
        behind.extend(some)

    with ThreadPoolExecutor(1) as pool:
        queue = WriteBehind(pool, 1, write, most_bytes=10)
        putting = threading.Thread(target=queue.put, args=([("a", 6), ("b", 6)],))
        putting.start()
        putting.join(0.1)
        waited = putting.is_alive()
        held.set()
        putting.join(30)

    assert (waited, behind) == (True, ["a", "b"])


def test_closed_queue_does_not_wait():
    held = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        queue = WriteBehind(pool, 1, lambda some: held.wait(30), most_bytes=10)
        putting = threading.Thread(target=queue.put, args=([("a", 6), ("b", 6)],))
        putting.start()
        queue.close()
        putting.join(30)
        ended = not putting.is_alive()
        held.set()

    assert ended


@given(
    sizes=st.lists(st.integers(0, 2 * WAITING_BYTES), max_size=60),
    at_once=st.integers(1, 20),
    threads=st.integers(1, THREADS),
    most_bytes=st.integers(1, 2**20),
)
def test_each_item_is_written_once(sizes, at_once, threads, most_bytes):
    write = Writes()

    write_all(write, sizes, at_once=at_once, threads=threads, most_bytes=most_bytes)

    assert Counter(write.items) == Counter(range(len(sizes)))


def test_a_call_has_few_items(monkeypatch):
    calls = []

    write_all(calls.append, [16] * 100, at_once=100)

    assert max(map(len, calls)) == write_behind._TAKEN_ITEMS
    assert sum(map(len, calls)) == 100
