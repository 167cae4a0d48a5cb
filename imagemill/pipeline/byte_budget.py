"""A limit on the bytes that wait between two threads."""

import threading


class ByteBudget:
    """Bytes in a queue, of which at most `most` wait at a time; a single item may be larger.

    Attributes:
        most: the limit in bytes.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._held = 0
        self._closed = False
        self._changed = threading.Condition()

    def has_room(self, size: int) -> bool:
        """Return whether an item of this size fits now."""
        with self._changed:
            return self._fits(size)

    def _fits(self, size: int) -> bool:
        return self._closed or not self._held or self._held + size <= self.most

    def acquire(self, size: int) -> None:
        """Wait until an item of this size fits, then count it."""
        with self._changed:
            while not self._fits(size):
                self._changed.wait()
            self._held += size

    def release(self, size: int) -> None:
        """Count an item as removed from the queue."""
        with self._changed:
            self._held -= size
            self._changed.notify_all()

    def close(self) -> None:
        """Stop limiting: nothing waits from now on."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
