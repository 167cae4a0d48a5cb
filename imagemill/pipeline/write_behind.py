"""Writing on a pool of threads, behind the thread that makes the data.

Threads that write small files at the same time mostly wait for each other, because each system call releases Python's interpreter
lock. So one thread writes, and others join it as items accumulate, as they do where a thread has to wait for a disk.

What is written, and how, is defined by the caller (pipeline/stage2/embed.py).
"""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor
from typing import Generic, TypeVar

T = TypeVar("T")

# Another thread joins when more than this waits for each thread that writes. A thread takes at most so much at a time: to take an
# item costs as much as to write a small one.
WAITING_BYTES, WAITING_ITEMS = 1024 * 1024, 64
_TAKEN_ITEMS = 32


class WriteBehind(Generic[T]):
    """Items that wait to be written, limited by their bytes.

    Args:
        pool: runs the writers.
        threads: most writers at a time.
        write: writes some items, in order; called by several writers at a time. It must not raise.
        most_bytes: largest total size of the items that are not written yet; a single item may be larger.
    """

    def __init__(self, pool: Executor, threads: int, write: Callable[[Sequence[T]], None], most_bytes: int) -> None:
        self._pool, self._threads, self._write, self._most = pool, threads, write, most_bytes
        self._changed = threading.Condition()
        self._waiting: deque[tuple[T, int]] = deque()
        self._waiting_bytes = self._pending_bytes = self._writers = 0
        self._closed = False

    def put(self, items: Iterable[tuple[T, int]]) -> None:
        """Add items and their sizes in bytes; wait while too many bytes are not written."""
        with self._changed:
            for item, size in items:
                while self._pending_bytes and self._pending_bytes + size > self._most and not self._closed:
                    self._start_writers()
                    self._changed.wait()
                self._waiting.append((item, size))
                self._waiting_bytes += size
                self._pending_bytes += size
            self._start_writers()

    def close(self) -> None:
        """Stop limiting: `put` does not wait from now on."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _start_writers(self) -> None:
        while self._writers < self._threads and self._are_too_few():
            self._pool.submit(self._run)
            self._writers += 1

    def _are_too_few(self) -> bool:
        if not self._writers:
            return bool(self._waiting)
        return self._waiting_bytes > WAITING_BYTES * self._writers or len(self._waiting) > WAITING_ITEMS * self._writers

    def _run(self) -> None:
        written = 0
        while some := self._taken(written):
            self._write([item for item, _ in some])
            written = sum(size for _, size in some)

    def _taken(self, written: int) -> list[tuple[T, int]]:
        """Return the next items of a writer, which has written so many bytes; none ends the writer."""
        some: list[tuple[T, int]] = []
        with self._changed:
            if written:
                self._pending_bytes -= written
                self._changed.notify_all()
            taken = 0
            while self._waiting and len(some) < _TAKEN_ITEMS and taken < WAITING_BYTES:
                some.append(self._waiting.popleft())
                taken += some[-1][1]
            self._waiting_bytes -= taken
            self._writers -= not some
        return some
