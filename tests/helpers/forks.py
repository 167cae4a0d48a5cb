"""Commands in forks of a process that has imported the libraries they need, whose imports take half of a small command's time.

    Forks.run(...)  ──a JSON line──>  python -m tests.helpers.forks ──fork──> the command, to its end
                    <─its exit code──

Of the product, only `imagemill` is imported before the fork, because importing it reads no variable. A command imports the other
packages with its own environment, as in a new interpreter.
"""

import atexit
import gc
import importlib
import json
import os
import runpy
import subprocess
import sys
import tempfile
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

# Imported by each command for itself.
_PRODUCT = {"assets", "checks", "dagster_project", "io_managers", "resources", "tests", "__main__"}

# Variables that differ between commands, and that libraries do not read when they are imported; some are set by libraries.
_OF_A_COMMAND = (
    "IMAGEMILL_", "AWS_", "DAGSTER_", "XDG_CONFIG_HOME", "PYTEST_", "PYTHONPATH", "LOCAL_RANK",
    "KMP_", "PYARROW_", "RAY_", "SPARK_", "TORCHINDUCTOR_",
)  # fmt: skip


# ---- in the test run


class Forks:
    """The process whose forks are the commands. `environment` is that of its libraries."""

    def __init__(self, environment, folder):
        self._shared, self._search_path = _of_libraries(environment), _search_path(environment)
        self._files, self._folder = tempfile.TemporaryDirectory(), folder
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.helpers.forks"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=folder, env=environment,
        )  # fmt: skip
        atexit.register(self._close)

    def can_run(self, environment):
        """Return whether the libraries of a command would be imported with the same environment, from the same folders."""
        added = [path for path in _search_path(environment) if path not in self._search_path]
        return (
            _of_libraries(environment) == self._shared
            and set(self._search_path) <= set(_search_path(environment))
            and not any(_replaces_modules(Path(path)) for path in added)
        )

    def run(self, command, environment, *, folder=None, merged=False):
        """Run a command to its end, as `subprocess.run` does.

        Args:
            command: an interpreter, then a file or `-m` and a module, then arguments.
            environment: all variables.
            folder: the current folder; None for that of this object.
            merged: let standard output have the lines of standard error too, in the order in which they were written.
        """
        output, errors, modules = (Path(self._files.name, name) for name in ("output", "errors", "modules"))
        errors = output if merged else errors
        asked = {"command": command, "environment": environment, "output": str(output), "errors": str(errors)}
        asked["folder"] = str(folder or self._folder)
        for file in (output, errors):
            file.write_bytes(b"")
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(json.dumps({**asked, "modules": str(modules)}) + "\n")
        self._process.stdin.flush()
        code = json.loads(self._process.stdout.readline())
        return subprocess.CompletedProcess(command, code, output.read_text(), "" if merged else errors.read_text())

    def _close(self):
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait()


def _of_libraries(environment):
    return {name: value for name, value in environment.items() if not name.startswith(_OF_A_COMMAND)}


def _replaces_modules(folder):
    """Return whether a folder has `sitecustomize`, or another form of a module that may have been imported already."""
    names = {path.stem for path in folder.iterdir()} if folder.is_dir() else set()
    return any(name == "sitecustomize" or (name.isidentifier() and find_spec(name)) for name in names)


def _search_path(environment):
    return [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]


# ---- in the process


def serve():
    """Answer requests until stdin ends. In a fork, return the request instead."""
    answers = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        asked = json.loads(line)
        child = os.fork()
        if child == 0:
            return asked
        _, status = os.waitpid(child, 0)
        _import_libraries(Path(asked["modules"]))
        answers.write(json.dumps(os.waitstatus_to_exitcode(status)) + "\n")
        answers.flush()
    return None


def _import_libraries(listed):
    """Import the libraries that a command has imported, so that the next one finds them."""
    known = len(sys.modules)
    for name in listed.read_text().split() if listed.exists() else ():
        if name.partition(".")[0] not in _PRODUCT and name not in sys.modules:
            with suppress(Exception):  # names that only their own package can import
                importlib.import_module(name)
    listed.unlink(missing_ok=True)
    if len(sys.modules) > known:
        gc.freeze()  # the pages of imported modules stay shared


def execute(asked):
    """Run the command in this process, which ends as an interpreter does."""
    for target, file, flags in (
        (0, os.devnull, os.O_RDONLY),
        (1, asked["output"], os.O_WRONLY | os.O_APPEND),
        (2, asked["errors"], os.O_WRONLY | os.O_APPEND),
    ):
        opened = os.open(file, flags)
        os.dup2(opened, target)
        os.close(opened)
    os.environ.clear()
    os.environ.update(asked["environment"])
    os.chdir(asked["folder"])
    sys.path[1:1] = [path for path in _search_path(asked["environment"]) if path not in sys.path]
    before = set(sys.modules)
    atexit.register(lambda: Path(asked["modules"]).write_text("\n".join(n for n in sys.modules if n not in before)))
    _, program, *arguments = asked["command"]
    if program == "-m":
        module, *arguments = arguments
        sys.argv = [module, *arguments]
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    else:
        sys.argv = [program, *arguments]
        sys.path.insert(0, os.path.dirname(program))
        runpy.run_path(program, run_name="__main__")


if __name__ == "__main__" and (request := serve()):
    execute(request)
