"""Cost of a command in time, CPU time and memory."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple, Self

PROJECT = Path(__file__).parents[2]
SECONDS_BETWEEN_STOPS = 2.0  # at least
SECONDS_OF_TURN = 1.0  # with shorter ones, filling the caches of the processor again and again may count


class Cost(NamedTuple):
    """Cost of a command and its waited-for children: seconds, CPU seconds, peak bytes of the largest of them."""

    seconds: float
    cpu_seconds: float
    peak_bytes: int


def cost(arguments: Sequence[object], *, meanwhile: Callable[[], object] | None = None, **environment: str) -> Cost:
    """Run `python ARGUMENTS…` to its end. Raises with its output if it fails.

    meanwhile: called again and again while the command is stopped, for half of the time that passes
    (which does not count), so that it finds the machine as fast as the command does.

    Python may write bytecode: without it, each command compiles its modules, which takes longer than most commands.
    """
    with _Command(arguments, environment) as command:
        stopped = 0.0
        while meanwhile and command.runs_for(max(SECONDS_BETWEEN_STOPS, stopped - command.seconds)):
            at = time.perf_counter()
            meanwhile()
            stopped += time.perf_counter() - at
        return command.end()


def costs_in_turns(commands: Iterable[tuple[Sequence[object], Mapping[str, str]]]) -> list[Cost]:
    """Run several commands, arguments and environment variables each, to their ends. Raises as `cost`.

    One runs at a time, for a second, while the others are stopped, so that they find the machine equally fast.
    """
    with ExitStack() as opened:
        all_of_them = [opened.enter_context(_Command(*command)) for command in commands]
        running = all_of_them
        while running:
            running = [command for command in running if command.runs_for(SECONDS_OF_TURN)]
        return [command.end() for command in all_of_them]


class _Command:
    """A Python process, stopped except during `runs_for` and `end`. Used as a context, it is killed at the end."""

    def __init__(self, arguments: Sequence[object], environment: Mapping[str, str]) -> None:
        words = [sys.executable, *map(str, arguments)]
        variables = {**os.environ, "PYTHONPATH": str(PROJECT), **environment}
        variables.pop("PYTHONDONTWRITEBYTECODE", None)
        self.seconds = 0.0
        self._text = " ".join(words[1:])
        self._output = tempfile.TemporaryFile()  # noqa: SIM115  # closed by __exit__
        self._process = subprocess.Popen(
            words, cwd=PROJECT, env=variables, stdout=self._output, stderr=subprocess.STDOUT
        )
        self._signal(signal.SIGSTOP)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        self._output.close()

    def runs_for(self, seconds: float) -> bool:
        """Let it run for this time; return whether it still runs then."""
        began = time.perf_counter()
        self._signal(signal.SIGCONT)
        try:
            while not os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                if (left := began + seconds - time.perf_counter()) <= 0:
                    self._signal(signal.SIGSTOP)
                    return True
                time.sleep(min(left, 0.05))
            return False
        finally:
            self.seconds += time.perf_counter() - began

    def end(self) -> Cost:
        """Let it run to its end. Raises RuntimeError if it fails."""
        began = time.perf_counter()
        self._signal(signal.SIGCONT)
        _, status, usage = os.wait4(self._process.pid, 0)
        self.seconds += time.perf_counter() - began
        self._process.returncode = os.waitstatus_to_exitcode(status)
        if self._process.returncode:
            self._output.seek(0)
            raise RuntimeError(f"{self._text} ended with {self._process.returncode}:\n{self._output.read().decode()}")
        return Cost(self.seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024)

    def _signal(self, number: int) -> None:
        os.kill(self._process.pid, number)  # `send_signal` would wait for a process that has ended, and lose its cost


def cpu_seconds(arguments: Sequence[object], **environment: str) -> float:
    return cost(arguments, **environment).cpu_seconds
