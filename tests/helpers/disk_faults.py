"""Commands under disk faults: a preloaded library counts the changes below a folder and fails, or kills, at a chosen one.

control    struct control of disk_faults.c, mapped by every process of a command
zygote.py  forks a process for each command, with the library loaded
"""

import json
import mmap
import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from tests.helpers.product import PROJECT

SOURCE = Path(__file__).with_name("disk_faults.c")
MODES = {None: 0, "kill": 1, "enospc": 2, "eio": 3}
KILLED = -9
_HEAD = struct.Struct("qqqqqq32s992s1024s1024s1024sq")
# No run of these tests takes a tenth of this; SIGALRM ends one that hangs.
_SECONDS = 120


# Changes that count: all, those outside the Dagster history, those outside history and ledger.
SCOPES = ("all", "outside the history", "outside history and ledger")


class Fault(NamedTuple):
    """A fault (`kill`, `enospc` or `eio`) at the change of this number, from 1, among those of a scope."""

    mode: str
    number: int
    scope: str = SCOPES[0]


class Ended(NamedTuple):
    """Exit code, output and changes of a command.

    Attributes:
        code: exit code, or the negative number of a signal.
        text: output.
        changes: number of changes of the disk, by scope.
        at: call and path of the fault.
    """

    code: int
    text: str
    changes: dict[str, int]
    at: str


def build(folder):
    """Compile the library into a folder."""
    library = folder / "disk_faults.so"
    subprocess.run(
        [shutil.which("gcc") or "gcc", "-O2", "-Wall", "-Werror", "-shared", "-fPIC", "-o", library, SOURCE], check=True
    )
    return library


class Product:
    """Commands on one data root, one at a time, each with or without a fault."""

    def __init__(self, folder, root):
        self.root, self.output = root, folder / "output.txt"
        control = folder / "control"
        control.write_bytes(bytes(_HEAD.size))
        with open(control, "r+b") as file:
            self._control = mmap.mmap(file.fileno(), _HEAD.size)
        kept = {k: v for k, v in os.environ.items() if not k.startswith("IMAGEMILL_") and k != "DAGSTER_HOME"}
        self._zygote = subprocess.Popen(
            [sys.executable, "-m", "tests.helpers.zygote"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=PROJECT,
            env={
                **kept, "PYTHONPATH": str(PROJECT), "LD_PRELOAD": str(build(folder)), "IMAGEMILL_FAULTS": str(control),
                "XDG_CONFIG_HOME": str(folder / "user-config"), "TMPDIR": str(folder),
            },
        )  # fmt: skip

    def run(self, *arguments, fault=None, **environment):
        """Run `imagemill ARGUMENTS --data-root ROOT` to its end."""
        self._arm(fault)
        request = {
            "arguments": [*map(str, arguments), "--data-root", str(self.root.path)],
            "environment": environment, "output": str(self.output), "seconds": _SECONDS,
            "learn": fault is None,
        }  # fmt: skip
        assert self._zygote.stdin
        assert self._zygote.stdout
        self._zygote.stdin.write(json.dumps(request) + "\n")
        self._zygote.stdin.flush()
        code = json.loads(self._zygote.stdout.readline())
        _, _, _, *counts, call, path, _, _, _, _ = _HEAD.unpack(self._control[:])
        changes = {scope: sum(counts[n:]) for n, scope in enumerate(SCOPES)}
        at = b" ".join(text.partition(b"\0")[0] for text in (call, path)).decode(errors="replace").strip()
        return Ended(code, self.output.read_text(errors="replace"), changes, at)

    def _arm(self, fault):
        mode, number, scope = fault or (None, 0, SCOPES[0])
        paths = (os.fsencode(path) for path in (self.root.path, self.root.dagster_home, self.root.ledger))
        self._control[:] = _HEAD.pack(MODES[mode], number, 0, 0, 0, 0, b"", b"", *paths, SCOPES.index(scope))

    def close(self):
        """End the process."""
        assert self._zygote.stdin
        assert self._zygote.stdout
        self._zygote.stdin.close()
        self._zygote.stdout.close()
        self._zygote.wait()
        self._control.close()
