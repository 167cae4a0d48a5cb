"""Summaries that are finished, kept from run to run: an image that was summarised once is not summarised again.

    .imagemill/stage_a/<mission>/summaries.jsonl    one line per summary, without those that newer ones replaced
                                 rank0.jsonl        what rank 0 has appended since

A summary is known by the fingerprint of file name, file bytes and summarizer, so it does not matter which rank, world size or
mode made it. Lines also say at which size, time and inode a file had which bytes: such a file is not read again.

Belongs here: finding a summary, keeping one, and keeping the folder small.
Belongs elsewhere: rank files (rank_files.py), which are looked into too in case this folder was lost.
Source: CONTRACTS section 5, "Resume"; section 0, "Completion is validity".
"""

import time
from array import array
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, BinaryIO, Self

import msgspec
import numpy as np
import xxhash

from imagemill.atomic import atomic_write
from imagemill.files import FileSignature, StoredSignature, fingerprint, stored_signature
from imagemill.pipeline.stage_a.rank_files import LineAppender, rank_files, read_rank_lines
from imagemill.pipeline.stage_a.summaries import is_summary

COMPACTED = "summaries.jsonl"

# Summaries of one image by several summarizers, or of several states of its file, that outlive compaction.
KEPT_PER_IMAGE = 4
# Appended lines of less than this are not worth a compaction.
SMALL_BYTES = 1 << 20

ADOPTED = 1

# Where a line is: the number of its file above, its offset below.
_OFFSET_BITS = 44


class Finished(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One summary. `image`: its place below the mission's folder; `content`: fingerprint of the file's bytes.

    `at`: when it was made, in nanoseconds since 1970; of a rank file's line 0, and `ADOPTED` once the store has it.
    """

    fingerprint: str
    summary: str
    image: str = ""
    stat: StoredSignature | None = None
    content: str = ""
    at: Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)] = 0

    def __post_init__(self) -> None:
        if self.stat is not None:
            msgspec.structs.force_setattr(self, "stat", stored_signature(self.stat))


def summary_fingerprint(image_name: str, content: str, identity: str) -> str:
    """What a summary is known by: file name, fingerprint of the file's bytes, summarizer."""
    return fingerprint("\0".join((image_name, content, identity)).encode())


def store_folder(state: Path, mission: str) -> Path:
    """`state`: the data root's `.imagemill/`."""
    return state / "stage_a" / mission


class FinishedIndex:
    """Where each summary stands; a few dozen bytes of memory per line. Use as a context manager.

    The files stay open: one that is replaced meanwhile is still read as it was.
    """

    def __init__(self) -> None:
        self._files: list[BinaryIO] = []
        self._stack = ExitStack()
        self._by_fingerprint, self._by_glance = _Table(), _Table()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def read_all(self, store: Path, folder: Path, mission: str) -> None:
        """Everything known: the rank files' lines first, for a rank moves them into the store before it replaces its file."""
        self.read(rank_files(folder, mission).values())
        self.read(_parts(store))

    def read(self, paths: Iterable[Path]) -> None:
        for path in paths:
            try:
                file = self._stack.enter_context(open(path, "rb"))  # noqa: SIM115
            except FileNotFoundError:  # removed since the folder was listed
                continue
            base = len(self._files) << _OFFSET_BITS
            self._files.append(file)
            for raw in file:
                if line := _parse(raw):
                    self._by_fingerprint.add(_hash(line.fingerprint), base, line.at)
                    if line.stat and line.content:
                        self._by_glance.add(_hash(_glance(line.image, line.stat)), base, line.at)
                base += len(raw)

    def content(self, image: str, stat: FileSignature) -> str | None:
        """Fingerprint of a file's bytes, by what the file system says of it."""
        line = self._line(self._by_glance.find(_hash(_glance(image, stat))))
        return line.content if line and (line.image, line.stat) == (image, stat) else None

    def summary(self, wanted: str) -> str | None:
        """The newest summary of this fingerprint."""
        line = self._of(wanted)
        return line.summary if line else None

    def only_in_rank_files(self, wanted: str) -> bool:
        line = self._of(wanted)
        return line is not None and not line.at

    def _of(self, wanted: str) -> Finished | None:
        line = self._line(self._by_fingerprint.find(_hash(wanted)))
        return line if line and line.fingerprint == wanted else None

    def _line(self, place: int | None) -> Finished | None:
        if place is None:
            return None
        file = self._files[place >> _OFFSET_BITS]
        file.seek(place & ((1 << _OFFSET_BITS) - 1))
        return _parse(file.readline())


class _Table:
    """Of each hash the place with the highest time; numbers in arrays instead of objects in a dict."""

    def __init__(self) -> None:
        self._columns = array("Q"), array("Q"), array("Q")
        self._sorted: tuple[np.ndarray, np.ndarray] | None = None

    def add(self, key: int, place: int, at: int) -> None:
        for column, value in zip(self._columns, (key, place, at), strict=True):
            column.append(value)
        self._sorted = None

    def find(self, key: int) -> int | None:
        if self._sorted is None:
            keys, places, times = (np.frombuffer(column, np.uint64) for column in self._columns)
            order = np.lexsort((times, keys))
            self._sorted = keys[order], places[order]
        keys, places = self._sorted
        last = int(np.searchsorted(keys, np.uint64(key), side="right")) - 1
        return int(places[last]) if last >= 0 and int(keys[last]) == key else None


class Keeper(LineAppender):
    """Appends one rank's finished summaries."""

    def __init__(self, store: Path, rank: int) -> None:
        super().__init__(store / f"rank{rank}.jsonl")

    def keep(self, image: str, stat: FileSignature, content: str, known_by: str, summary: str) -> None:
        now = time.time_ns()
        self.append(Finished(fingerprint=known_by, summary=summary, image=image, stat=stat, content=content, at=now))

    def adopt(self, path: Path, index: FinishedIndex) -> None:
        """Bring in what only a rank's file tells of."""
        for line in read_rank_lines(path):
            if line.ok and is_summary(line.summary) and index.only_in_rank_files(line.fingerprint):
                image = f"{line.label}/{line.group_id}/{line.image_name}"
                self.append(Finished(fingerprint=line.fingerprint, summary=str(line.summary), image=image, at=ADOPTED))


def compact(store: Path) -> bool:
    """Rewrite the store without what newer lines replaced, once as much was appended as it held. No rank may be at work.

    Of each image at most `KEPT_PER_IMAGE` summaries are kept, the newest. A kill leaves lines twice, which harms nobody.
    """
    parts = _parts(store)
    held = sum(path.stat().st_size for path in parts if path.name == COMPACTED)
    appended = sum(path.stat().st_size for path in parts) - held
    if appended <= max(held, SMALL_BYTES):
        return False
    places = _newest(parts)
    with ExitStack() as stack:
        files = [stack.enter_context(open(path, "rb")) for path in parts]
        into = stack.enter_context(atomic_write(store / COMPACTED))
        for place in places:
            file = files[place >> _OFFSET_BITS]
            file.seek(place & ((1 << _OFFSET_BITS) - 1))
            into.write(file.readline().rstrip(b"\n") + b"\n")
    for path in parts:
        if path.name != COMPACTED:
            path.unlink()
    return True


def _newest(parts: Sequence[Path]) -> list[int]:
    """Where the lines to keep stand, file by file."""
    columns = array("Q"), array("Q"), array("Q"), array("Q")
    for number, path in enumerate(parts):
        place = number << _OFFSET_BITS
        with open(path, "rb") as file:
            for raw in file:
                if line := _parse(raw):
                    values = _hash(line.fingerprint), _hash(line.image or line.fingerprint), line.at, place
                    for column, value in zip(columns, values, strict=True):
                        column.append(value)
                place += len(raw)
    known_by, image, at, places = (np.frombuffer(column, np.uint64) for column in columns)
    newest_first = np.argsort(at, kind="stable")[::-1]
    _, first = np.unique(known_by[newest_first], return_index=True)
    order = newest_first[np.sort(first)]
    order = order[np.argsort(image[order], kind="stable")]  # image by image, still the newest first
    begins = np.r_[True, image[order][1:] != image[order][:-1]] if len(order) else np.zeros(0, bool)
    counted = np.arange(len(order))
    nth = counted - np.maximum.accumulate(np.where(begins, counted, 0))
    return np.sort(places[order[nth < KEPT_PER_IMAGE]]).tolist()


def _parts(store: Path) -> list[Path]:
    return sorted(store.glob("*.jsonl"))


class _AnyLine(Finished, frozen=True, kw_only=True, gc=False):
    """A line of the store or of a rank file; the latter may tell of a failure."""

    ok: bool = True


_DECODER = msgspec.json.Decoder(_AnyLine)


def _parse(raw: bytes) -> Finished | None:
    """A finished summary; None for every other line."""
    try:
        line = _DECODER.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return line if line.ok and line.fingerprint and is_summary(line.summary) else None


def _glance(image: str, stat: StoredSignature) -> str:
    return f"{image}\0{stat}"


def _hash(text: str) -> int:
    return xxhash.xxh3_64_intdigest(text.encode())
