"""A thread that keeps one device busy: it launches each batch before it waits for the results of the previous one.

    caller ──put──▶ ready batches ──launch──▶ device ──finish──▶ results

What a launch is, and where results go, is defined by the caller (pipeline/stage2/embed.py).
"""

import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar

B = TypeVar("B")

_END = object()


class DeviceThread(Generic[B]):
    """Runs batches in order on one thread. Use as a context manager: its end drops the batches that have not begun.

    Args:
        launch: starts a batch; returns a function that waits for its end, or None if the batch has ended already.
        ended: called on the thread with None after each batch, and at the end with the error that ended it, or None.
    """

    def __init__(self, launch: Callable[[B], Callable[[], None] | None], ended: Callable[[Any], None]) -> None:
        self._launch, self._ended = launch, ended
        self._batches: SimpleQueue[B | None] = SimpleQueue()
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="device", daemon=True)

    def __enter__(self) -> "DeviceThread[B]":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def put(self, batch: B) -> None:
        """Add a batch to those that are ready."""
        self._batches.put(batch)

    def stop(self) -> None:
        """Finish the batches that have begun, drop the others, and end the thread."""
        self._stopped = True
        self._batches.put(None)
        self._thread.join()

    def _run(self) -> None:
        running: Callable[[], None] | None = None
        try:
            while (batch := self._next(wait=running is None)) is not _END:
                following = None if batch is None else self._launch(batch)
                if running:
                    finish, running = running, None
                    finish()
                    self._ended(None)
                if batch is not None and following is None:
                    self._ended(None)
                running = following
        except BaseException as error:  # an interrupt of the model too: the caller's thread raises it
            failure: BaseException | None = error
        else:
            failure = None
        if running:  # launched before the end, or before the launch that failed
            try:
                running()
            except BaseException as error:
                failure = failure or error
        self._ended(failure)

    def _next(self, *, wait: bool) -> Any:
        """Return the next batch, None if none is ready, or _END."""
        try:
            batch = self._batches.get(block=wait)
        except Empty:
            return None
        return _END if self._stopped else batch
