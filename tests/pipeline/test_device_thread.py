"""The order of launches and results on the device thread."""

import threading
from queue import SimpleQueue

import pytest

from imagemill.pipeline.device_thread import DeviceThread


def run(*batches, launch, ends=None):
    """Put all batches before the first begins; return what `ended` received, of `ends` batches or of all."""
    ended = SimpleQueue()
    begin = threading.Event()
    with DeviceThread(lambda batch: begin.wait(10) and launch(batch), ended.put) as device:
        for batch in batches:
            device.put(batch)
        begin.set()
        return [ended.get(timeout=10) for _ in batches[:ends]]


def test_batch_is_launched_before_the_previous_one_is_finished():
    events = []

    def launch(batch):
        events.append(f"launch {batch}")
        return lambda: events.append(f"finish {batch}")

    assert run("a", "b", "c", launch=launch) == [None, None, None]
    assert events == ["launch a", "launch b", "finish a", "launch c", "finish b", "finish c"]


def test_device_that_does_not_overlap_runs_one_batch_at_a_time():
    events = []

    assert run("a", "b", launch=events.append) == [None, None]
    assert events == ["a", "b"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_failing_launch_ends_the_thread_and_keeps_the_batch_before_it(error):
    finished = []

    def launch(batch):
        if batch == "b":
            raise error
        return lambda: finished.append(batch)

    received = run("a", "b", launch=launch, ends=1)

    assert finished == ["a"]
    assert any(isinstance(value, error) for value in received)


def test_end_drops_batches_that_have_not_begun():
    begun = []
    with DeviceThread(lambda batch: begun.append(batch) or (stop.wait(10) and None), lambda _: None) as device:
        stop = threading.Event()
        device.put("a")
        device.put("b")
        while not begun:
            pass
        threading.Timer(0.05, stop.set).start()

    assert begun == ["a"]
