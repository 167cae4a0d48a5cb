"""Cost of commands that run in turns, as the benchmarks measure it."""

import signal
import time

import pytest

from benchmarks.common import processes
from benchmarks.common.processes import cost, costs_in_turns

SPIN = "import time\nwhile time.process_time() < {}: pass"


def test_command_that_ends_just_before_it_is_stopped_keeps_its_cost(monkeypatch):
    def at_the_end(command, number):
        if number == signal.SIGSTOP:
            time.sleep(0.5)  # it ends meanwhile
        signalled(command, number)

    signalled = processes._Command._signal
    monkeypatch.setattr(processes._Command, "_signal", at_the_end)
    monkeypatch.setattr(processes, "SECONDS_BETWEEN_STOPS", 0.0)
    assert cost(["-c", "print()"], meanwhile=lambda: None).cpu_seconds > 0


def test_costs_in_turns_are_those_of_each_command_in_order(monkeypatch):
    monkeypatch.setattr(processes, "SECONDS_OF_TURN", 0.05)
    short, long = costs_in_turns([(["-c", SPIN.format(0.2)], {}), (["-c", SPIN.format(0.6)], {})])
    assert 0.2 <= short.cpu_seconds < 0.6 <= long.cpu_seconds


def test_failure_of_one_of_several_commands_is_raised_with_its_output():
    with pytest.raises(RuntimeError, match=r"(?s)-c import sys.*ended with 1:\nno such thing"):
        costs_in_turns([(["-c", "import sys; sys.exit('no such thing')"], {}), (["-c", "print()"], {})])
