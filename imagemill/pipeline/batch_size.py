"""The number of items in a model call: as configured, or found among powers of two while batches are computed.

Spec: docs/spec/stage2.md#batch-size
"""

from typing import Literal

FIRST, LARGEST = 8, 256

# Most batches that are needed to know a size, and what the next larger one must gain.
_TRIALS = 3
_GAIN = 1.05


class BatchSize:
    """The size of batches, which `note` may change.

    Args:
        given: the configured size.
        recorded: the size that earlier files of the kind were made with, if it is known.
        fixed: whether a size that is not given is not tried out.

    Attributes:
        size: most items of the next batch.
        settled: whether the size is final.
    """

    def __init__(self, given: int | Literal["auto"], recorded: int | None = None, *, fixed: bool = False) -> None:
        known = recorded if given == "auto" else given
        self.size = known or FIRST
        self.settled = fixed or known is not None
        self._rate = 0.0
        self._seconds: list[float] = []

    def note(self, items: int, seconds: float) -> None:
        """Take the time of a batch into account. The fastest of a few counts, because others may wait for their inputs."""
        if self.settled or items != self.size:
            return
        self._seconds.append(seconds)
        if len(self._seconds) < _TRIALS:
            return
        rate = items / max(min(self._seconds), 1e-9)
        if rate < _GAIN * self._rate:
            self.size //= 2
            self.settled = True
        elif self.size == LARGEST:
            self.settled = True
        else:
            self._rate, self._seconds, self.size = rate, [], 2 * self.size

    def does_not_fit(self, items: int) -> None:
        """Settle on a smaller size: a batch of so many items did not fit into memory."""
        if not self.settled and items > 1:
            self.size, self.settled = max(1, min(self.size, items) // 2), True
