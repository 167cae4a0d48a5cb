"""Begin and end of the processes of imagemill: commands, services and workers."""

import atexit
import gc
import os
import sys
import threading
from collections.abc import Callable

# New objects before the youngest generation is collected, then collections of each generation before that of the next.
# Objects live until the end of a process: by default, looking for garbage among them takes a tenth of its CPU time.
GARBAGE_THRESHOLDS = (10_000, 20, 50)


def collect_rarely() -> None:
    """Let this process look for garbage more rarely than by default."""
    gc.set_threshold(*GARBAGE_THRESHOLDS)


def run_process(function: Callable[[], object]) -> None:
    """Call the main function of a process, and end the process with the code of its SystemExit, or 0.

    As at the end of an interpreter, threads are joined, functions of `atexit` are called and output is flushed. But
    memory returns to the system as a whole: freeing objects one by one takes up to two fifths of a small command's CPU time.

    Every other exception is raised, also one for output that cannot be written.
    """
    collect_rarely()
    try:
        function()
        code = 0
    except SystemExit as ended:
        if not isinstance(ended.code, int | None):
            raise  # the interpreter prints a message
        code = ended.code or 0
    threading._shutdown()  # type: ignore[attr-defined]  # as multiprocessing does before it ends a process
    atexit._run_exitfuncs()
    try:
        for stream in (sys.stdout, sys.stderr):
            if stream and not stream.closed:
                stream.flush()
    except OSError:
        sys.exit(code)  # the interpreter reports it, and gives its own code
    os._exit(code)
