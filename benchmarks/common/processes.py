"""Cost of a command in time, CPU time and memory."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple, Self

PROJECT = Path(__file__).parents[2]
SECONDS_OF_TURN = 2.0  # with much shorter ones, filling the caches of the processor again and again may count


class Cost(NamedTuple):
    """Cost of a command and its waited-for children: seconds, CPU seconds, peak bytes of the largest of them."""

    seconds: float
    cpu_seconds: float
    peak_bytes: int


def cost(arguments: Sequence[object], **environment: str) -> Cost:
    """Run `python ARGUMENTS…` to its end. Raises with its output if it fails.

    Python may write bytecode: without it, each command compiles its modules, which takes longer than most commands.
    """
    with _Command(arguments, environment) as command:
        return command.end()


def turns_of(commands: Iterable[tuple[Sequence[object], Mapping[str, str]]]) -> Generator[None, None, list[Cost]]:
    """Run several commands, arguments and environment variables each, to their ends. Raises as `cost`.

    One runs at a time, for two seconds, while the others are stopped, so that they find the machine equally fast. After
    each turn the generator yields, with all of them stopped. It returns their costs.
    """
    with ExitStack() as opened:
        all_of_them = [opened.enter_context(_Command(*command)) for command in commands]
        running = all_of_them
        while running:
            for command in list(running):
                if not command.runs_for(SECONDS_OF_TURN):
                    running = [each for each in running if each is not command]
                yield
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
