"""Cost of a command in time, CPU time and memory."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

PROJECT = Path(__file__).parents[2]
SECONDS_BETWEEN_STOPS = 2.0  # at least


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
    words = [sys.executable, *map(str, arguments)]
    variables = {**os.environ, "PYTHONPATH": str(PROJECT), **environment}
    variables.pop("PYTHONDONTWRITEBYTECODE", None)
    began, stopped = time.perf_counter(), 0.0
    with (
        tempfile.TemporaryFile() as output,
        subprocess.Popen(words, cwd=PROJECT, env=variables, stdout=output, stderr=subprocess.STDOUT) as process,
    ):
        while meanwhile and _runs_for(process, max(SECONDS_BETWEEN_STOPS, 2 * stopped - (time.perf_counter() - began))):
            process.send_signal(signal.SIGSTOP)
            at = time.perf_counter()
            try:
                meanwhile()
            finally:
                stopped += time.perf_counter() - at
                process.send_signal(signal.SIGCONT)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        output.seek(0)
        said = output.read()
    if process.returncode:
        raise RuntimeError(f"{' '.join(words[1:])} ended with {process.returncode}:\n{said.decode()}")
    return Cost(time.perf_counter() - began - stopped, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024)


def _runs_for(process: subprocess.Popen[bytes], seconds: float) -> bool:
    """Return whether a process still runs after this time; it is not waited for."""
    end = time.perf_counter() + seconds
    while (left := end - time.perf_counter()) > 0:
        if os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            return False
        time.sleep(min(left, 0.1))
    return True


def cpu_seconds(arguments: Sequence[object], **environment: str) -> float:
    return cost(arguments, **environment).cpu_seconds
