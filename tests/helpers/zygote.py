"""A process that has imported the product once and forks for each command: imports take most of a small command's time.

One JSON line per command on stdin, one answer per line on stdout. A command runs in its own session, with stub encoders.
"""

import gc
import importlib
import json
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

import dagster_project.cli.main as product
from imagemill.domain.embedding_specs import EmbeddingSpec
from tests.helpers.stubs import StubEncoder, stub_captioner

IMPORTED = ("dagster_project.definitions", "dagster_project.work")


def serve():
    """Answer requests until stdin ends."""
    stub_captioner()
    EmbeddingSpec.encoder_class = lambda self: StubEncoder
    for name in (*IMPORTED, *map(product.module_of, product.COMMANDS)):
        importlib.import_module(name)
    gc.freeze()  # the pages of imported modules stay shared
    answers = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        asked = json.loads(line)
        child = os.fork()
        if child == 0:
            _command(asked)
        _, status = os.waitpid(child, 0)
        with suppress(ProcessLookupError):  # workers that outlive their command
            os.killpg(child, signal.SIGKILL)
        if asked["learn"]:
            _import_as(asked["output"])
        answers.write(json.dumps(os.waitstatus_to_exitcode(status)) + "\n")
        answers.flush()


def _import_as(output):
    """Import the modules that a command has imported, so that the next one finds them."""
    listed = Path(f"{output}.modules")
    for name in listed.read_text().split() if listed.exists() else ():
        with suppress(Exception):  # names that only their own package can import
            importlib.import_module(name)
    listed.unlink(missing_ok=True)


def _command(asked):
    """Run one command and end the process."""
    os.setsid()
    output = os.open(asked["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (output, 1), (output, 2)):
        os.dup2(source, target)
    os.environ.update(asked["environment"])
    sys.argv = ["imagemill", *asked["arguments"]]
    signal.alarm(asked["seconds"])  # a command that hangs is killed and reported
    code, before = 0, sys.modules.keys() | set()
    try:
        product.main()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1 if end.code else 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    if asked["learn"]:
        Path(f"{asked['output']}.modules").write_text("\n".join(sys.modules.keys() - before))
    with suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    serve()
