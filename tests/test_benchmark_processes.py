"""Cost of commands that run in turns, as the benchmarks measure it."""

import itertools
import signal
import time
from collections.abc import Generator

import pytest

from benchmarks import scale
from benchmarks.common import processes
from benchmarks.common.processes import Cost, turns_of

SPIN = "import time\nwhile time.process_time() < {}: pass"


def costs(turns: Generator[None, None, list[Cost]]) -> list[Cost]:
    while True:
        try:
            next(turns)
        except StopIteration as ended:
            return ended.value


def test_command_that_ends_just_before_it_is_stopped_keeps_its_cost(monkeypatch):
    def at_the_end(command, number):
        if number == signal.SIGSTOP:
            time.sleep(0.5)  # it ends meanwhile
        signalled(command, number)

    signalled = processes._Command._signal
    monkeypatch.setattr(processes._Command, "_signal", at_the_end)
    monkeypatch.setattr(processes, "SECONDS_OF_TURN", 0.0)
    (found,) = costs(turns_of([(["-c", "print()"], {})]))
    assert found.cpu_seconds > 0


def test_costs_in_turns_are_those_of_each_command_in_order(monkeypatch):
    monkeypatch.setattr(processes, "SECONDS_OF_TURN", 0.05)
    short, long = costs(turns_of([(["-c", SPIN.format(0.2)], {}), (["-c", SPIN.format(0.6)], {})]))
    assert 0.2 <= short.cpu_seconds < 0.6 <= long.cpu_seconds


def test_commands_run_only_while_it_is_their_turn(monkeypatch):
    monkeypatch.setattr(processes, "SECONDS_OF_TURN", 0.05)
    turns = turns_of([(["-c", SPIN.format(0.2)], {})])
    next(turns)
    time.sleep(2)
    assert next(turns, "ended") is None
    (found,) = costs(turns)
    assert found.seconds < 2


def test_failure_of_one_of_several_commands_is_raised_with_its_output():
    with pytest.raises(RuntimeError, match=r"(?s)-c import sys.*ended with 1:\nno such thing"):
        costs(turns_of([(["-c", "import sys; sys.exit('no such thing')"], {}), (["-c", "print()"], {})]))


def test_first_runs_of_a_whole_and_of_its_parts_are_measured_in_turns(monkeypatch, tmp_path):
    """Each run takes 2 s and 2 ms for each image, so that an additional image costs 2 ms at any size."""
    sizes = {"one": 1, "few": 100, "thousand": 1000, "thousands": 2000}
    sizes |= {"quarter": 15_000, "half": 30_000, "whole": 60_000}

    def turns(names):
        names = list(names)
        seconds = [2 + 0.002 * sizes[name] for name in names]
        for _ in range(round(sum(seconds) / processes.SECONDS_OF_TURN)):
            yield
        return [Cost(each, each, 0) for each in seconds]

    monkeypatch.setattr(scale, "turns_of", turns)
    monkeypatch.setattr(scale, "_run_of", lambda name: name)
    runs = scale._FirstRuns(tmp_path, sizes, tiny=True)
    monkeypatch.setattr(runs, "_made", lambda name: name)
    runs.measure_in_turns()

    found = {name: len(costs) for name, costs in runs.costs.items()}
    assert [found[name] for name in ("whole", "half", "quarter")] == [1, 2, 4]
    assert found["thousand"] == found["thousands"] >= 40
    marginals = [runs.marginal_ms(*names) for names in itertools.pairwise(("thousand", "thousands", "half", "whole"))]
    assert marginals == pytest.approx([2, 2, 2])
    assert runs.error_of_pairs_ms() == pytest.approx(0)
