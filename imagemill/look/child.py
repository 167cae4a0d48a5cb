"""The command that the viewer starts to withdraw images, or to bring them back.

It is `imagemill withdraw`, so that its history, leases and checks are those of the command. One runs at a time.
"""

import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import msgspec

from imagemill.errors import ImagemillError

COMMAND = (sys.executable, "-P", "-m", "imagemill")


class Task(msgspec.Struct):
    """A command that was started.

    Attributes:
        title: what it does, for people.
        items: images that it works on.
        code: its exit code, None while it runs.
        output: what it printed.
    """

    title: str
    items: list[str]
    code: int | None = None
    output: str = ""
    restores: bool = False


class Tasks:
    """Commands over one data root.

    Args:
        root: the data root.
        command: words that start imagemill.
    """

    def __init__(self, root: Path, command: Sequence[str] = COMMAND) -> None:
        self._root, self._command = root, tuple(command)
        self._lock = threading.Lock()
        self.last: Task | None = None

    def withdraw_marked(self, items: list[str]) -> None:
        """Start `imagemill withdraw --marked`. Raises ImagemillError if a command runs."""
        self._start(Task("withdraw", items), ["--marked"], None)

    def restore(self, items: list[str]) -> None:
        """Start `imagemill withdraw --restore` for these images. Raises ImagemillError if a command runs."""
        self._start(Task("restore", items, restores=True), ["--restore", "--from", "-"], "\n".join(items))

    def _start(self, task: Task, options: list[str], given: str | None) -> None:
        with self._lock:
            if self.last and self.last.code is None:
                raise ImagemillError(
                    f"`imagemill {self.last.title}` is running", where=self._root, do="wait until it has ended"
                )
            self.last = task
        words = [*self._command, "withdraw", *options, "--data-root", str(self._root)]
        threading.Thread(target=_run, args=(task, words, given), name="withdraw", daemon=True).start()


def _run(task: Task, words: list[str], given: str | None) -> None:
    try:
        ended = subprocess.run(
            words, input=given or "", stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
            encoding="utf-8", errors="surrogateescape", start_new_session=True,
        )  # fmt: skip
        task.output, task.code = ended.stdout.encode("utf-8", "backslashreplace").decode(), ended.returncode
    except OSError as error:
        task.output, task.code = str(error), 1
