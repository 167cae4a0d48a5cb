"""Execution engines behind one interface."""

import itertools
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from imagemill.errors import DiskFull, ImagemillError
from resources import local_pool
from resources.engine import Engine, LocalProcesses
from resources.local_pool import WorkerDied, run_on_processes
from tests.helpers.pool_workers import Broken, Counted, Deadly, Doubling, Poisoned, Quitting, Wordy

two = LocalProcesses(workers=2)


def children():
    return [p for p in psutil.Process().children() if "spawn_main" in " ".join(p.cmdline())]


@pytest.mark.parametrize("engine", [Engine(), LocalProcesses(), two], ids=["in process", "one", "two"])
def test_every_key_gives_one_row(engine):
    rows = list(engine.map_batches(Doubling, range(20), batch_size=3))

    assert sorted(row[:2] for row in rows) == [(key, 2 * key) for key in range(20)]


def test_workers_are_built_once_per_process_and_closed(tmp_path):
    rows = list(two.map_batches(Doubling, range(40), batch_size=4, log=tmp_path))

    pids = {row[2] for row in rows}
    assert len(pids) == 2
    assert os.getpid() not in pids
    assert max(row[3] for row in rows) > 1, "a worker takes several batches"
    assert {f"closed-{pid}" for pid in pids} == {p.name for p in tmp_path.glob("closed-*")}
    assert children() == []


def test_one_worker_stays_in_this_process():
    assert {row[2] for row in LocalProcesses(workers=1).map_batches(Doubling, [1, 2])} == {os.getpid()}


def test_number_of_workers_is_chosen_per_run():
    assert (LocalProcesses().with_workers(3).workers, LocalProcesses().workers) == (3, 1)


def test_no_process_starts_without_keys():
    assert list(two.map_batches(Broken, [])) == []


def test_keys_are_consumed_on_demand(tmp_path):
    """Memory stays bounded: only a window of batches is read, not the whole plan."""
    taken = []
    keys = (taken.append(key) or key for key in range(1000))

    rows = two.map_batches(Doubling, keys, batch_size=5)
    next(rows)

    assert len(taken) <= 30
    rows.close()
    assert children() == []


def test_killed_worker_ends_the_run_and_is_named():
    with pytest.raises(WorkerDied) as died:
        list(two.map_batches(Poisoned, [*range(14), *range(16, 100)], batch_size=4))

    assert died.value.exitcode == -signal.SIGKILL
    assert 13 in died.value.keys
    assert str(died.value.pid) in str(died.value)
    assert "SIGKILL" in str(died.value)
    assert children() == []


@pytest.mark.parametrize("keys", [[1, 13, 2, 3, 4, 5, 13], [13]])
def test_only_the_key_of_a_killed_worker_fails_if_the_caller_handles_deaths(keys):
    """Another process handles the keys that were queued behind it."""
    for engine, apart in ((two, False), (LocalProcesses(workers=1), True)):
        rows = list(engine.map_keys(Poisoned, keys, lambda key, how: f"{key} {how}", apart=apart))

        assert sorted(map(str, rows)) == sorted("13 was ended by SIGKILL" if key == 13 else str(key) for key in keys)
        assert children() == []


def test_one_worker_with_a_death_handler_stays_in_this_process():
    rows = LocalProcesses(workers=1).map_keys(Doubling, [1], lambda key, how: None)

    assert [row[2] for row in rows] == [os.getpid()]


def test_keys_of_a_dead_worker_run_again_one_by_one(tmp_path):
    """All other keys have their rows before the key that kills its process is reported."""
    rows = []
    with pytest.raises(WorkerDied) as died:
        for row in two.map_batches(Counted, [*range(14), *range(16, 40)], batch_size=4, log=tmp_path):
            rows.append(row)

    assert died.value.keys == [13]
    assert sorted(rows) == [*range(13), *range(16, 40)]
    runs = {path.name: len(path.read_text()) for path in tmp_path.iterdir() if not path.name.startswith("closed")}
    assert (runs["12"], runs["13"], runs["30"]) == (2, 3, 1)
    assert runs["16"] <= 2, "it may have begun in the process that died"
    assert children() == []


def test_worker_killed_from_outside_loses_no_row():
    rows = two.map_batches(Doubling, range(400), batch_size=1, nap=0.01)
    first = next(rows)
    os.kill(first[2], signal.SIGKILL)

    assert sorted(row[0] for row in (first, *rows)) == list(range(400))
    assert children() == []


@pytest.mark.parametrize("call", [3, 4, 5, 9, 10])
def test_worker_that_dies_before_it_gets_its_next_batch_loses_no_row(monkeypatch, call):
    """pebble refuses work then with a RuntimeError. Calls 3 and 4 fill the workers, 9 and 10 close them."""
    calls = itertools.count(1)

    class Pool(local_pool.ProcessPool):
        def schedule(self, *args, **kwargs):
            if next(calls) == call:
                while self.active:
                    for pid in list(self._pool_manager.worker_manager.workers):
                        with suppress(ProcessLookupError):  # pebble has collected it meanwhile
                            os.kill(pid, signal.SIGKILL)
                    time.sleep(0.01)
            return super().schedule(*args, **kwargs)

    monkeypatch.setattr(local_pool, "ProcessPool", Pool)

    assert sorted(row[0] for row in two.map_batches(Doubling, range(8), batch_size=1)) == list(range(8))
    assert next(calls) > call
    assert children() == []


@pytest.mark.parametrize("verb", ["map_batches", "map_keys"])
@pytest.mark.parametrize("count", [4, 12])
def test_worker_killed_between_two_batches_loses_no_row(verb, count):
    """The worker is idle because the caller takes no rows in the meantime."""
    more = {"batch_size": 1} if verb == "map_batches" else {"died": lambda key, how: pytest.fail(f"{key} {how}")}
    rows = getattr(two, verb)(Doubling, range(count), **more)
    first = next(rows)
    time.sleep(0.5)
    for child in children():
        child.kill()
    time.sleep(0.5)

    assert sorted(row[0] for row in (first, *rows)) == list(range(count))
    assert children() == []


def test_worker_that_ends_its_process_without_an_error_is_named():
    with pytest.raises(WorkerDied, match="exit code 0") as died:
        list(two.map_batches(Quitting, range(30), batch_size=4))

    assert died.value.keys == [13]
    assert children() == []


def test_stream_ends_early_if_every_worker_dies(tmp_path):
    with pytest.raises(WorkerDied) as died:
        list(two.map_batches(Deadly, range(1000), batch_size=4, log=tmp_path))

    assert len(died.value.keys) == 3
    # Each of four batches in flight runs three times, then three keys run alone; each death may start one more process.
    assert len(list(tmp_path.iterdir())) <= 2 * (4 * 3 + 3)
    assert children() == []


def test_interrupt_of_a_worker_alone_is_ignored():
    """A terminal sends the interrupt to every process of the group; only the caller handles it."""
    rows = two.map_batches(Doubling, range(200), batch_size=2, nap=0.005)
    os.kill(next(rows)[2], signal.SIGINT)

    assert len(list(rows)) == 199


@pytest.mark.parametrize(("key", "kind", "says"), [(14, DiskFull, "no space"), (15, ImagemillError, "Local: strange")])
def test_exception_of_a_worker_keeps_its_attributes(key, kind, says):
    with pytest.raises(kind, match=says):
        list(two.map_batches(Poisoned, [1, 2, key, 3], batch_size=1))
    assert children() == []


def test_worker_construction_error_ends_the_run_with_its_reason():
    with pytest.raises(ValueError, match="no model"):
        list(two.map_batches(Broken, range(10)))
    assert children() == []


def test_consumer_that_stops_leaves_no_process():
    """An interrupt closes the stream in the same way."""
    rows = two.map_batches(Doubling, range(1000), batch_size=2, nap=0.01)
    next(rows)
    assert len(children()) == 2

    rows.close()

    assert children() == []


def test_large_rows_and_large_batches_do_not_deadlock():
    keys = ["k" * 10_000] * 64
    rows = run_on_processes(Wordy, keys, workers=2, batch_size=16, options={})
    assert len(list(rows)) == 64


CALLER = """
from resources.local_pool import run_on_processes as run
from tests.helpers.pool_workers import Doubling

if __name__ == "__main__":
    try:
        for row in run(Doubling, range(10**6), workers=2, batch_size=2, options={"nap": 0.02}):
            print(row[2], flush=True)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
"""


@pytest.fixture
def caller(tmp_path):
    """Start a program with two busy workers as the leader of a process group; yield it and the ids of the workers."""
    script = tmp_path / "caller.py"
    script.write_text(CALLER)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    with subprocess.Popen(
        [sys.executable, str(script)], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    ) as program:  # fmt: skip
        workers: set[int] = set()
        while len(workers) < 2:
            workers.add(int(program.stdout.readline()))
        yield program, workers
        program.kill()


def assert_gone(workers):
    gone_by = time.monotonic() + 30
    while any(psutil.pid_exists(pid) for pid in workers) and time.monotonic() < gone_by:
        time.sleep(0.05)
    assert not any(psutil.pid_exists(pid) for pid in workers)


def test_workers_of_a_killed_caller_exit(caller):
    program, workers = caller
    program.kill()
    program.wait()
    assert_gone(workers)


def test_worker_whose_caller_was_killed_while_it_started_processes_nothing(monkeypatch):
    def leave(code):
        raise SystemExit(code)

    processed = []
    worker = SimpleNamespace(stream=lambda batch: processed.append(batch) or batch)
    monkeypatch.setattr(local_pool.os, "_exit", leave)
    for caller, expected in ((os.getppid(), [["a"]]), (os.getppid() + 1, [])):
        processed.clear()
        monkeypatch.setattr(local_pool, "_process", {"caller": caller, "worker": worker})
        with suppress(SystemExit):
            local_pool._stream(["a"])
        assert processed == expected


def test_interrupt_of_the_terminal_ends_caller_and_silent_workers(caller):
    """The interrupt reaches every process of the group; only the caller reports it."""
    program, workers = caller
    os.killpg(program.pid, signal.SIGINT)
    out, err = program.communicate(timeout=60)

    assert (out.splitlines()[-1], err) == ("interrupted", "")
    assert_gone(workers)
