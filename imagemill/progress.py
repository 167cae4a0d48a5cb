"""Progress reporting for long-running work: a bar on a terminal, otherwise a plain line from time to time.

Both show one text: items done, rate, time left. Rate and time left follow the amount of work (pixels, bytes), not the
number of items, because one photo of 25 megapixels takes as long as twenty-five of one megapixel.

The amount of work per item is computed in pipeline/forecast.py; numbers are formatted in text/units.py.
"""

import shutil
import sys
import threading
import time
from typing import Self

from tqdm import tqdm

from imagemill.text.units import as_duration, as_rate, as_size, plural

# Seconds after which plain lines are printed; the last interval repeats.
PLAIN_SECONDS = (5.0, 10.0, 15.0, 30.0)

# Shortest time between two drawings of a bar.
MIN_SECONDS = 0.1

# A terminal that does not report its width counts as 80 columns wide.
_UNKNOWN_TERMINAL = (80, 24)


class _Bar(tqdm):
    """A progress bar that threads of one process share, and processes never do.

    tqdm's own lock is a system semaphore, which remains behind when a process is stopped.
    """

    _lock = threading.RLock()


class Progress:
    """Progress of one task, as a context manager; `advance` may be called from several threads.

    Work without items prints nothing. The rate is measured from the end of the first piece of work, which includes
    loading a model.

    Args:
        task: name that each line starts with.
        total: number of items.
        unit: what an item is, in the singular.
        work: amount of work of all items together; None if every item is the same amount.
        work_unit: `px` (shown in megapixels), `B` (bytes), or a noun.
    """

    def __init__(
        self, task: str, total: int, *, unit: str = "image", work: int | None = None, work_unit: str = "px"
    ) -> None:
        self._task, self._total, self._unit = task, total, unit
        self._work, self._work_unit = (total, unit) if work is None else (work, work_unit)
        self._items, self._done, self._free = 0, 0, 0
        self._first: tuple[float, int] | None = None
        self._lock = threading.Lock()
        self._began = time.monotonic()
        self._next, self._lines = self._began, 0
        # tqdm writes nothing if stderr is not a terminal (`disable=None`).
        self._bar = _Bar(
            total=self._work,
            bar_format="{percentage:3.0f}%|{bar}| {desc}",
            file=sys.stderr,
            ncols=_width(),
            disable=None if total else True,
        )
        self._show()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            if not self._bar.disable:
                self._draw()
            elif self._lines > 1 and self._items:
                self._print()
            self._bar.close()

    def advance(self, items: int = 1, work: int | None = None, *, free: bool = False) -> None:
        """Count items as done.

        Args:
            items: number of items.
            work: amount of work of these items (default: one per item).
            free: the items cost no work (such as files that already exist), so the rate does not count them.
        """
        with self._lock:
            self._items += items
            amount = items if work is None else work
            self._done += amount
            if free:
                self._free += amount
            elif self._first is None:
                self._first = (time.monotonic(), self._done - self._free)
            self._show()

    def _show(self) -> None:
        now = time.monotonic()
        if now < self._next:
            return
        if not self._bar.disable:
            self._next = now + MIN_SECONDS
            self._draw()
        elif self._total:
            self._next = now + PLAIN_SECONDS[min(self._lines, len(PLAIN_SECONDS) - 1)]
            self._lines += 1
            self._print()

    def _draw(self) -> None:
        self._bar.n, self._bar.ncols = self._done, _width()
        self._bar.set_description_str(self._text())

    def _print(self) -> None:
        print(self._text(), file=sys.stderr, flush=True)

    def _text(self) -> str:
        parts = [f"{self._task}: {self._counts()}"]
        now = time.monotonic()
        if self._items and self._done >= self._work:
            parts.append(as_duration(now - self._began))
        elif (left := self.seconds_left(now)) is not None:
            assert self._first
            parts += [self._rate(self._measured(), now - self._first[0]), f"{as_duration(left)} left"]
        return ", ".join(parts)

    def _counts(self) -> str:
        if self._work_unit == "B":
            return f"{as_size(self._done)} of {as_size(self._work)}"
        counts = f"{self._items:,} of {self._total:,} {plural(self._total, self._unit)}"
        return f"{counts} ({_megapixels(self._work)})" if self._work_unit == "px" and not self._items else counts

    def _rate(self, done: int, seconds: float) -> str:
        match self._work_unit:
            case "B":
                return f"{as_size(int(done / seconds))}/s"
            case "px":
                return f"{_megapixels(done / seconds)}/s"
            case _:
                return as_rate(done, seconds, self._work_unit)

    def seconds_left(self, now: float) -> float | None:
        """Return the estimated seconds until the end; None until two pieces of work are done."""
        if self._first is None or not self._measured() or now <= self._first[0]:
            return None
        return max(0.0, self._work - self._done) * (now - self._first[0]) / self._measured()

    def _measured(self) -> int:
        """Return the amount of work done since the start of the rate measurement."""
        return self._done - self._free - self._first[1] if self._first else 0


def _megapixels(pixels: float) -> str:
    megapixels = pixels / 1e6
    return f"{megapixels:,.1f} MP" if megapixels >= 1 else f"{megapixels:.2g} MP"


def _width() -> int:
    return shutil.get_terminal_size(_UNKNOWN_TERMINAL).columns
