"""Files that a rank writes: lines, a mark, and the images in flight.

    <output>/<mission>_stage_a.images.rank0.jsonl    {"group_seq":0,"group_id":…,"ok":true,"summary":…,"fingerprint":…}
    <output>/<mission>_stage_a.images.rank0.json     {"plan":…,"launch":…,"ended":true}
    .imagemill/stage_a/<mission>/rank0.at_work       "审核通过/a/1.jpg"

Lines are appended as images are finished, so a kill costs at most the current batch; it may cut the last line short, and readers
skip that line. The mark identifies the plan that the lines belong to: lines of another plan are never merged.

Which lines are merged is decided in merge.py; how finished summaries are used again, in summaries.py.
Spec: docs/spec/conventions.md#refused-and-failed, docs/spec/stage-a.md#rank-files
"""

import os
import re
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

import msgspec
from msgspec import UNSET, UnsetType

from imagemill.formats.jsonl import LineAppender, encode_line
from imagemill.fs.atomic import write_bytes_atomic
from imagemill.fs.fingerprints import FileSignature
from imagemill.text.strict_json import NOT_JSON

# Reason code of images whose rank's process ended before they had a summary.
RANK_DIED = "rank_died"


class RankLine(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The result of one image: a summary if `ok`, else an error, `reason: detail`.

    Attributes:
        group_seq: from 0, in the order of the run's groups.
        image_index: from 1, in the group.
        fingerprint: of file name, file bytes and summarizer; empty if the file could not be read.
        image, stat, content, at: of a summary, as in `FinishedSummary`; rank files of earlier releases lack them.
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
    image: str | UnsetType = UNSET
    stat: FileSignature | UnsetType = UNSET
    content: str | UnsetType = UNSET
    at: int | UnsetType = UNSET


class RankMark(msgspec.Struct, frozen=True):
    """End mark of a rank's file: the plan of its lines, the start of the ranks that wrote it, and whether the rank has ended."""

    plan: str
    launch: str
    ended: bool


def output_file(folder: Path, mission: str) -> Path:
    """Return the path of a mission's output."""
    return folder / f"{mission}_stage_a.jsonl"


def rank_file(folder: Path, mission: str, rank: int) -> Path:
    """Return the path of a rank's lines."""
    return folder / f"{mission}_stage_a.images.rank{rank}.jsonl"


def mark_file(folder: Path, mission: str, rank: int) -> Path:
    """Return the path of a rank's mark."""
    return folder / f"{mission}_stage_a.images.rank{rank}.json"


def rank_files(folder: Path, mission: str) -> dict[int, Path]:
    """Return the existing files of lines by rank, from any run."""
    return _by_rank(folder, mission, ".jsonl")


def remove_rank_files(folder: Path, mission: str) -> int:
    """Remove the lines and marks of all ranks; return how many files of lines."""
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


def new_rank_file(path: Path) -> LineAppender:
    """Start an empty rank file. The old file is replaced, not truncated, so processes that have it open keep its content."""
    write_bytes_atomic(path, b"")
    return LineAppender(path)


_DECODER = msgspec.json.Decoder(RankLine)


def parse_rank_line(raw: bytes) -> RankLine | None:
    """Parse one line; None if it is truncated or of another form."""
    try:
        return _DECODER.decode(raw)
    except NOT_JSON:
        return None


def read_rank_lines(path: Path) -> Iterator[RankLine]:
    """Yield every line that can be parsed."""
    with open(path, "rb") as file:
        for raw in file:
            if (line := parse_rank_line(raw)) is not None:
                yield line


# ---- marks


def write_mark(folder: Path, mission: str, rank: int, mark: RankMark) -> None:
    """Write a rank's mark atomically."""
    write_bytes_atomic(mark_file(folder, mission, rank), encode_line(mark))


def read_mark(folder: Path, mission: str, rank: int) -> RankMark | None:
    """Return a rank's mark; None if it is missing or cannot be parsed."""
    try:
        return msgspec.json.decode(mark_file(folder, mission, rank).read_bytes(), type=RankMark)
    except (FileNotFoundError, *NOT_JSON):
        return None


def unfinished_ranks(folder: Path, mission: str, ranks: Sequence[int], plan: str, launch: str | None) -> list[int]:
    """Return the ranks that have not ended on this plan, in this start; `launch` None: in any start."""
    marks = {rank: read_mark(folder, mission, rank) for rank in ranks}
    return [
        rank for rank, mark in marks.items()
        if not (mark and mark.ended and mark.plan == plan and launch in {None, mark.launch})
    ]  # fmt: skip


# ---- images in flight

_IN_FLIGHT = ".at_work"
_IMAGES = msgspec.json.Decoder(str | None)


class InFlight(LineAppender):
    """The images that a rank is decoding or has passed to the summarizer, for the case that its process dies.

    The file contains the images that an earlier process left, then `null`, then those of this process. If an exception ends the
    process, the images are removed. SystemExit counts as a death: a model raised it.
    """

    def __init__(self, store: Path, rank: int) -> None:
        self._path = _in_flight_file(store, rank)
        super().__init__(self._path)
        self._left_behind = self._file.tell()
        self.append(None)
        self.flush()
        self._empty = self._file.tell()

    def __exit__(self, *raised: object) -> None:
        if isinstance(raised[1], SystemExit):
            self._file.close()
        else:
            self.close()

    def begin(self, image: str) -> None:
        """Add an image, named relative to the mission's folder."""
        self.append(image)
        self.flush()

    def done(self) -> None:
        """Remove all images: their lines are written."""
        self._file.truncate(self._empty)

    def close(self) -> None:
        """Remove this process's images, and the file if it contains no others."""
        self.done()
        super().close()
        if not self._left_behind:
            self._path.unlink(missing_ok=True)


def left_behind(store: Path) -> list[str]:
    """Return the images in flight of processes that died, the latest last; also those of ranks that are running."""
    # An image that is in flight again moves to the end: it has ended more processes than those before it.
    latest: dict[str, None] = {}
    for path in sorted(store.glob(f"*{_IN_FLIGHT}")):
        for image in _read_in_flight(path):
            if image is not None:
                latest.pop(image, None)
                latest[image] = None
    return list(latest)


def in_flight(store: Path, rank: int) -> list[str]:
    """Return the images that were in flight when this rank died."""
    lines = list(_read_in_flight(_in_flight_file(store, rank)))
    if None not in lines:
        return []  # it died before it began: these were left by an earlier process
    begun = len(lines) - lines[::-1].index(None)
    return [image for image in lines[begun:] if image is not None]


def forget(store: Path, but: Collection[str]) -> None:
    """Forget all images in flight except these. No rank may be running."""
    kept = [image for image in left_behind(store) if image in but]
    for path in store.glob(f"*{_IN_FLIGHT}"):
        path.unlink()
    if kept:
        write_bytes_atomic(_in_flight_file(store, 0), b"".join(map(encode_line, kept)))


def _in_flight_file(store: Path, rank: int) -> Path:
    return store / f"rank{rank}{_IN_FLIGHT}"


def _read_in_flight(path: Path) -> Iterator[str | None]:
    try:
        lines = path.read_bytes().splitlines()
    except FileNotFoundError:
        return
    for line in lines:
        try:
            yield _IMAGES.decode(line)
        except NOT_JSON:  # cut short by the death
            continue
