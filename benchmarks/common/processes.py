"""Cost of a command in time, CPU time and memory."""

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

PROJECT = Path(__file__).parents[2]


class Cost(NamedTuple):
    """Cost of a command and its waited-for children: seconds, CPU seconds, peak bytes of the largest of them."""

    seconds: float
    cpu_seconds: float
    peak_bytes: int


def cost(arguments: Sequence[object], **environment: str) -> Cost:
    """Run `python ARGUMENTS…` to its end. Raises with its output if it fails.

    Python may write bytecode: without it, each command compiles its modules, which takes longer than most commands.
    """
    words = [str(argument) for argument in arguments]
    variables = {**os.environ, "PYTHONPATH": str(PROJECT), **environment}
    variables.pop("PYTHONDONTWRITEBYTECODE", None)
    began = time.perf_counter()
    with subprocess.Popen(
        [sys.executable, *words], cwd=PROJECT, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as process:
        assert process.stdout
        said = process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"{' '.join(words)} ended with {process.returncode}:\n{said.decode()}")
    return Cost(time.perf_counter() - began, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024)


def cpu_seconds(arguments: Sequence[object], **environment: str) -> float:
    return cost(arguments, **environment).cpu_seconds
