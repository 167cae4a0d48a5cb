"""Threads that take turns while their work is light.

Each system call of a thread releases Python's interpreter lock. If another thread takes it meanwhile, the first one has to wait
for it again, and each of the two may have to wake a core. Threads that read or write many small files thus spend up to half of
their CPU time on the lock. So light work is done some items at a time, by one thread after the other. Work that computes or
waits for longer, mostly without the lock, is done by all threads at the same time.

The work is defined by callers (prefetch.py, stage2/embed.py, stage2/publish.py, shards/shard_writer.py).
"""

import threading
import time
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from imagemill.parts import in_parts

T = TypeVar("T")

# Work is light if it takes less CPU time per item, and waits less: the header of a photo in memory takes 0.05 ms.
LIGHT_CPU_SECONDS = 0.000_5
_LIGHT_WAIT_SECONDS = 0.000_5

# Threads that wait for the lock make light work take up to twice its CPU time, and a few items may take more. Work that took so
# many times as much is not tried in a turn.
_HEAVY = 4

# Most of the wait of a turn that counts, in multiples of the wait of light work. A turn in which the process was stopped, or
# its core had other work, then leaves light work light; work that really waits is heavy after three turns.
_MOST_WAIT = 4

# Other work is tried in a turn once in so many times.
_TRIED_ONCE_IN = 16

# Share of the last items in the averages that decide whether work remains light.
_SHARE_OF_LAST = 1 / 8

# Longest wait for a turn. Then a thread works at the same time as the others, so that no thread can block another one. The
# turns of a dozen threads on a slow machine take less.
_LONGEST_WAIT_SECONDS = 0.25

# Items of a turn over many.
_ITEMS_PER_TURN = 32

# The interpreter lock is one per process, and so is the turn.
_TURN = threading.Lock()


class Turns:
    """The turns of one sort of work, whose past items determine whether it is light."""

    def __init__(self) -> None:
        self._light = True
        self._cpu = self._wait = 0.0  # averages of the turns, in seconds per item
        self._cpu_outside = 0.0  # of the last items without a turn
        self._count = 0

    @contextmanager
    def turn(self, items: int) -> Iterator[None]:
        """Do work on so many items, in a turn if it is light; other threads may do theirs meanwhile if it is not."""
        self._count += 1
        tried = self._count % _TRIED_ONCE_IN == 0 and self._cpu_outside < _HEAVY * LIGHT_CPU_SECONDS
        taken = (self._light or tried) and _TURN.acquire(timeout=_LONGEST_WAIT_SECONDS)
        began, cpu_began = time.perf_counter(), time.thread_time()
        try:
            yield
        finally:
            if taken:
                _TURN.release()
            cpu = (time.thread_time() - cpu_began) / items
            if taken:
                self._note(cpu, (time.perf_counter() - began) / items - cpu)
            else:
                self._cpu_outside = cpu

    def over(self, items: Iterable[T]) -> Generator[T, None, None]:
        """Yield items to the thread that works on them, some in each turn."""
        for part in in_parts(items, _ITEMS_PER_TURN):
            with self.turn(len(part)):
                yield from part

    def _note(self, cpu: float, wait: float) -> None:
        """Update the averages by the seconds per item of a turn. The first turn after others without one sets them."""
        share = _SHARE_OF_LAST if self._light else 1.0
        self._cpu += share * (cpu - self._cpu)
        self._wait += share * (min(wait, _MOST_WAIT * _LIGHT_WAIT_SECONDS) - self._wait)
        self._light = self._cpu < LIGHT_CPU_SECONDS and self._wait < _LIGHT_WAIT_SECONDS
