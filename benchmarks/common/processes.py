"""What a command costs the processor."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

PROJECT = Path(__file__).parents[2]


def cpu_seconds(arguments: Sequence[str], **environment: str) -> float:
    """User and system seconds of `python ARGUMENTS…` and of the children it waited for. Raises where it fails, with its words."""
    variables = {**os.environ, "PYTHONPATH": str(PROJECT), **environment}
    with subprocess.Popen(
        [sys.executable, *arguments], cwd=PROJECT, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as process:
        assert process.stdout
        said = process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"{' '.join(arguments)} ended with {process.returncode}:\n{said.decode()}")
    return usage.ru_utime + usage.ru_stime
