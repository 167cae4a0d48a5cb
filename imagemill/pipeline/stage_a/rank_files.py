"""What a rank leaves beside the output: one line per image, and a mark of what it worked on.

    <mission>_stage_a.images.rank0.jsonl    {"group_seq":0,"group_id":…,"image_index":1,…,"ok":true,"summary":…,"fingerprint":…}
    <mission>_stage_a.images.rank0.json     {"plan":…,"launch":…,"ended":true}

Lines are appended as images are finished, so a kill costs at most the batch at hand; it may cut the last line short, and readers
pass over that. The mark says of which plan the lines are: those of another one are never merged.

Belongs here: names, lines, marks.
Belongs elsewhere: whose lines are merged (stage_a_merge.py), which are used again (finished.py).
Source: CONTRACTS section 5, "Rank files", "waits a bounded time for the other ranks' end marks".
"""

import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Self

import msgspec
from msgspec import UNSET, UnsetType

from imagemill.atomic import write_bytes_atomic
from imagemill.formats.jsonl import encode_line
from imagemill.strict_json import NOT_JSON

POLL_SECONDS = 0.5


class RankLine(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What became of one image: a summary where `ok`, else an error, `reason: detail`.

    Attributes:
        group_seq: from 0, in the order of the run's groups.
        image_index: from 1, in the group.
        fingerprint: of file name, file bytes and summarizer; empty where the file could not be read.
    """

    group_seq: int
    group_id: str
    label: str
    image_index: int
    image_name: str
    ok: bool
    summary: str | UnsetType = UNSET
    error: str | UnsetType = UNSET
    fingerprint: str


class RankMark(msgspec.Struct, frozen=True):
    """Which plan a rank's file is of, which start of the ranks wrote it, and whether the rank came to its end."""

    plan: str
    launch: str
    ended: bool


def output_file(folder: Path, mission: str) -> Path:
    return folder / f"{mission}_stage_a.jsonl"


def rank_file(folder: Path, mission: str, rank: int) -> Path:
    return folder / f"{mission}_stage_a.images.rank{rank}.jsonl"


def mark_file(folder: Path, mission: str, rank: int) -> Path:
    return folder / f"{mission}_stage_a.images.rank{rank}.json"


def rank_files(folder: Path, mission: str) -> dict[int, Path]:
    """Every rank's file of lines that is there, whichever run left it."""
    return _by_rank(folder, mission, ".jsonl")


def remove_rank_files(folder: Path, mission: str) -> int:
    """Remove the lines and marks of all ranks; returns how many files of lines."""
    files = rank_files(folder, mission)
    for path in [*files.values(), *_by_rank(folder, mission, ".json").values()]:
        path.unlink(missing_ok=True)
    return len(files)


def _by_rank(folder: Path, mission: str, suffix: str) -> dict[int, Path]:
    name = re.compile(re.escape(f"{mission}_stage_a.images.rank") + "(0|[1-9][0-9]*)" + re.escape(suffix))
    present = os.listdir(folder) if folder.is_dir() else []
    found = {int(match[1]): folder / match[0] for each in present if (match := name.fullmatch(each))}
    return dict(sorted(found.items()))


# ---- lines


class LineAppender:
    """Appends lines to a file; what was flushed survives the process. A last line that a kill cut short is closed off first."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file: BinaryIO = open(path, "a+b")  # noqa: SIM115
        if self._file.tell() and not self._ends_with_newline():
            self._file.write(b"\n")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def append(self, row: Any) -> None:
        self._file.write(encode_line(row))

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        """Durable from here on."""
        try:
            self._file.flush()
            os.fsync(self._file.fileno())
        finally:
            self._file.close()

    def _ends_with_newline(self) -> bool:
        self._file.seek(-1, os.SEEK_END)
        return self._file.read(1) == b"\n"


def new_rank_file(path: Path) -> LineAppender:
    """Begin a rank's file anew. The old one is replaced, not emptied: whoever reads or still writes it keeps its own."""
    write_bytes_atomic(path, b"")
    return LineAppender(path)


_DECODER = msgspec.json.Decoder(RankLine)


def parse_rank_line(raw: bytes) -> RankLine | None:
    """One line; None where it is none, cut short or of another form."""
    try:
        return _DECODER.decode(raw)
    except NOT_JSON:
        return None


def read_rank_lines(path: Path) -> Iterator[RankLine]:
    """Every line that can be read."""
    with open(path, "rb") as file:
        for raw in file:
            if (line := parse_rank_line(raw)) is not None:
                yield line


# ---- marks


def write_mark(folder: Path, mission: str, rank: int, mark: RankMark) -> None:
    write_bytes_atomic(mark_file(folder, mission, rank), encode_line(mark))


def read_mark(folder: Path, mission: str, rank: int) -> RankMark | None:
    """None where there is none, or nothing that can be read."""
    try:
        return msgspec.json.decode(mark_file(folder, mission, rank).read_bytes(), type=RankMark)
    except (FileNotFoundError, *NOT_JSON):
        return None


def unfinished_ranks(folder: Path, mission: str, ranks: Sequence[int], plan: str, launch: str | None) -> list[int]:
    """Ranks that have not come to the end of this plan; `launch` None: in whichever start."""
    marks = {rank: read_mark(folder, mission, rank) for rank in ranks}
    return [rank for rank, mark in marks.items() if not mark or not _is_end(mark, plan, launch)]


def wait_for_ranks(
    folder: Path,
    mission: str,
    ranks: Sequence[int],
    plan: str,
    launch: str | None,
    *,
    seconds: float,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> list[int]:
    """Wait until each rank has come to its end, `seconds` at most; returns those that have not."""
    until = clock() + seconds
    while (missing := unfinished_ranks(folder, mission, ranks, plan, launch)) and clock() < until:
        sleep(POLL_SECONDS)
    return missing


def _is_end(mark: RankMark, plan: str, launch: str | None) -> bool:
    return mark.ended and mark.plan == plan and launch in {None, mark.launch}
