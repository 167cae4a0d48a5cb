"""The end of a process of imagemill has the code, the output and the calls of `atexit` of an interpreter that ends by itself."""

import subprocess
import sys

import pytest

from tests.helpers.product import PROJECT

MAIN = """
import atexit, sys, threading, time
from imagemill.processes import run_process

class Freed:
    def __del__(self):
        print("freed")

kept = Freed()
atexit.register(print, "atexit")

def later():
    time.sleep(0.3)
    print("thread")

def main():
    threading.Thread(target=later).start()
    print("main")
    {end}

run_process(main)
"""


def ended(end, **options):
    program = [sys.executable, "-P", "-c", MAIN.format(end=end)]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options
    return subprocess.run(program, cwd=PROJECT, env={"PYTHONPATH": str(PROJECT)}, text=True, check=False, **options)


@pytest.mark.parametrize(("end", "code"), [("pass", 0), ("sys.exit()", 0), ("sys.exit(0)", 0), ("sys.exit(130)", 130)])
def test_code_is_kept_threads_are_joined_and_output_is_written(end, code):
    """Objects are not freed one by one."""
    done = ended(end)

    assert done.returncode == code
    assert done.stdout.split() == ["main", "thread", "atexit"]
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("end", "code", "said"),
    [("sys.exit('no room')", 1, "no room"), ("raise ValueError('wrong')", 1, "ValueError: wrong")],
)
def test_interpreter_reports_every_other_end(end, code, said):
    done = ended(end)

    assert done.returncode == code
    assert said in done.stderr


@pytest.mark.parametrize("end", ["pass", "sys.exit(1)"])
def test_output_that_cannot_be_written_is_reported_by_a_code(end):
    with open("/dev/full", "w") as full:
        done = ended(end, stdout=full)

    assert done.returncode not in {0, 1}
    assert "No space left on device" in done.stderr
