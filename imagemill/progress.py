"""How long work shows that it moves: a bar on a terminal, a plain line now and then elsewhere."""

import sys
import threading
import time
from typing import Self

from tqdm import tqdm

PLAIN_SECONDS = 30.0

# Threads of one process share a bar, processes never do; tqdm's own lock is a semaphore of the system, which a process
# that is stopped leaves behind.
tqdm.set_lock(threading.RLock())


class Progress:
    """Counts items of one task; rate and time left come with it. Use as a context manager, from as many threads as you like.

    Args:
        unit: what is counted; `B` for bytes, shown as MB.
    """

    def __init__(self, task: str, total: int, *, unit: str = "img") -> None:
        self._bar = tqdm(
            total=total,
            desc=task,
            unit=unit,
            unit_scale=unit == "B",
            file=sys.stderr,
            dynamic_ncols=True,
            # Where there is no terminal the bar stays silent and `_plain` speaks.
            disable=None,
        )
        self._task, self._total = task, total
        self._unit, self._scale = ("MB", 1e6) if unit == "B" else (unit, 1)
        self._done = 0
        self._lock = threading.Lock()
        self._began = self._spoken = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def advance(self, items: int = 1) -> None:
        with self._lock:
            self._done += items
            self._bar.update(items)
            if self._bar.disable:
                self._plain()

    def _plain(self) -> None:
        now = time.monotonic()
        if now - self._spoken < PLAIN_SECONDS or not self._done:
            return
        self._spoken = now
        rate = self._done / (now - self._began)
        left = (self._total - self._done) / rate
        done, total, rate = (amount / self._scale for amount in (self._done, self._total, rate))
        told = f"{done:.0f} of {total:.0f}, {rate:.1f} {self._unit}/s, {left:.0f} s left"
        print(f"{self._task}: {told}", file=sys.stderr, flush=True)
