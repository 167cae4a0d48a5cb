"""Commands of documentation pages: run in order, and compared with the output that the page prints.

    ```console
    $ imagemill status --data-root data
    images      6 images seen: 6 up to date
    …
    ```

A line `…` matches any number of lines. A block with a title, ```` ```python title="read.py" ````, is written to that file.
Times, run ids, and folders are normalised on both sides. A console block may begin with `<!-- exit code 1 -->` above it.

`python -m tests.docs.console PAGE…` writes the actual output into the pages.
"""

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

from PIL import Image

from tests.helpers.forks import Forks

ROOT = Path(__file__).parents[2]
ANY = "…"
_FENCE = re.compile(
    r'(?:<!-- exit code (?P<code>\d+) -->\n)?^(?P<indent> *)```(?P<kind>\w+)(?: title="(?P<title>[^"]+)")?\n(?P<text>.*?)^ *```$',
    re.MULTILINE | re.DOTALL,
)
_VARIABLE = (
    (re.compile(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:\.\d+)?(?:\+00:00| UTC)?"), "#"),
    (re.compile(r"\b[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b"), "#"),
    (re.compile(r"\bxxh3:[0-9a-f]+\b|\b[0-9a-f]{16}\b|\bbytes \d+"), "#"),  # versions of Pillow and torch differ
    (re.compile(r"\brate=[\d.]+/s"), "rate=#"),
    (re.compile(r"\btime +.*"), "time #"),
    (re.compile(r"\b\d+(?:\.\d+)? (?:s|min|ms|images/s)\b"), "#"),
)
# Lines of progress depend on the speed of the machine; on a terminal they are bars.
_PROGRESS = re.compile(r"^[^:]+: \S+(?: [kMG]?B)? of \S+ ")


# Variables of the test run that a reader does not have.
_UNSET = ("IMAGEMILL_", "DAGSTER_", "PYTEST_")


class Command(NamedTuple):
    """One command of a page, and the output that the page prints."""

    line: int
    text: str
    expected: list[str]
    code: int


class File(NamedTuple):
    """A file that the reader writes."""

    line: int
    name: str
    text: str


def steps(page: str) -> Iterator[Command | File]:
    """Yield the commands and files of a page, in order."""
    for block in _FENCE.finditer(page):
        line, text = page.count("\n", 0, block.start("text")) + 1, block["text"]
        indent = len(block["indent"])
        lines = [row[indent:] for row in text.splitlines()]
        if block["title"]:
            yield File(line, block["title"], "\n".join([*lines, ""]))
        elif block["kind"] == "console":
            yield from _commands(lines, line, int(block["code"] or 0))


def _commands(lines: list[str], first: int, code: int) -> Iterator[Command]:
    begins = [n for n, row in enumerate(lines) if row.startswith("$ ")]
    for begin, end in zip(begins, [*begins[1:], len(lines)], strict=True):
        rows = lines[begin:end]
        command = [rows.pop(0)[2:]]
        while command[-1].endswith("\\"):
            command.append(rows.pop(0).removeprefix("> "))
        yield Command(first + begin, "\n".join(command), rows, code)


def home(folder: Path) -> Path:
    """Make a home folder with six photographs in `Pictures`."""
    from skimage import data

    pictures = folder / "Pictures"
    pictures.mkdir(parents=True)
    photographs = {"astronaut": data.astronaut, "cat": data.chelsea, "coffee": data.coffee, "rocket": data.rocket}
    for name, read in photographs.items():
        Image.fromarray(read()).save(pictures / f"{name}.jpg", quality=90)
    cat = Image.open(pictures / "cat.jpg")
    cat.crop((100, 0, 300, 300)).save(pictures / "cat_portrait.jpg", quality=90)
    Image.open(pictures / "astronaut.jpg").crop((0, 0, 512, 300)).save(pictures / "astronaut_wide.jpg", quality=90)
    return folder


def execute(step: Command, folder: Path, home: Path) -> tuple[int, list[str]]:
    """Run a command in a folder; return its exit code and the lines that it printed."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(_UNSET)}
    environment |= {
        "HOME": str(home),
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        "HF_HUB_OFFLINE": "1",
    }
    done = _in_a_fork(step.text, folder, environment) or subprocess.run(
        ["bash", "-c", step.text],
        cwd=folder,
        env=environment,
        text=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
        timeout=600,
    )
    shown = done.stdout.replace(str(folder), "/home/ana/work").replace(str(home), "/home/ana")
    shown = shown.replace(f"{Path(sys.executable).parent}/", "")
    return done.returncode, [row.rstrip() for row in shown.splitlines() if not _PROGRESS.match(row)]


@cache
def _forks() -> Forks:
    """The process whose forks are the commands, with a home folder of its own."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_UNSET)}
    search = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return Forks({**kept, "HF_HUB_OFFLINE": "1", "PYTHONPATH": search}, ROOT)


def _in_a_fork(text: str, folder: Path, environment: dict[str, str]) -> subprocess.CompletedProcess[str] | None:
    """Run a plain `imagemill` command without another start of Python; None if a shell has to run it."""
    if not re.fullmatch(r"imagemill [\w ./=,:+-]+", text):
        return None
    words = [sys.executable, "-m", "dagster_project.cli.main", *text.split()[1:]]
    return _forks().run(words, environment, folder=folder, merged=True)


def normalised(rows: list[str]) -> list[str]:
    """Return the lines without what differs from run to run."""
    found = []
    for row in rows:
        text = row.rstrip()
        for pattern, instead in _VARIABLE:
            text = pattern.sub(instead, text)
        found.append(text)
    return found


def agrees(expected: list[str], actual: list[str]) -> bool:
    """Return whether the printed lines are the expected ones; `…` matches any number of lines."""
    pattern = "".join(".*" if row.strip() == ANY else re.escape(row) + "\n" for row in normalised(expected))
    text = "".join(row + "\n" for row in normalised(actual))
    return re.fullmatch(pattern, text, re.DOTALL) is not None


def run_page(path: Path, folder: Path, *, update: bool = False) -> list[str]:
    """Follow a page in an empty folder; return what differs from it.

    Args:
        update: write the actual output into the page, where it prints all of a command's output.
    """
    page, differences = path.read_text(encoding="utf-8"), []
    rows, moved = page.split("\n"), 0
    at_home, work = home(folder / "home"), folder / "work"
    work.mkdir()
    for step in list(steps(page)):
        if isinstance(step, File):
            target = work / step.name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(step.text, encoding="utf-8")
            continue
        code, actual = execute(step, work, at_home)
        if code != step.code:
            differences.append(f"{path.name}:{step.line}: exit code {code} of `{step.text}`:\n" + "\n".join(actual))
        if agrees(step.expected, actual):
            continue
        if update and ANY not in step.expected:
            begin = step.line + moved + step.text.count("\n")
            rows[begin : begin + len(step.expected)] = actual
            moved += len(actual) - len(step.expected)
        else:
            differences.append(f"{path.name}:{step.line}: `{step.text}` printed:\n" + "\n".join(actual))
    if update:
        path.write_text("\n".join(rows), encoding="utf-8")
    return differences


if __name__ == "__main__":
    for name in sys.argv[1:]:
        with tempfile.TemporaryDirectory() as scratch:
            print("\n".join(run_page(Path(name), Path(scratch), update=True)) or f"{name}: up to date")
