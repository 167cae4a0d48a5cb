"""Which images a rank has in its hands, written down before they are decoded and asked about: all that is left of it if it dies.

    .imagemill/stage_a/<mission>/rank0.at_work    "审核通过/a/1.jpg"    left behind by a process that died
                                                  null                 from here on: in the hands of the rank at work
                                                  "审核通过/b/2.jpg"

What a dead process left is done last, image by image, in a process of its own: an image that kills whoever looks at it costs
itself alone, however often the command is run.

Belongs here: writing it down, finding it again, forgetting what was overcome.
Belongs elsewhere: the order of a rank's work (rank_worker.py), what becomes of a dead rank's images (dead_rank.py).
Source: CONTRACTS section 0, "One bad item never stops the others"; section 5, "A rank's finished images survive its death".
"""

from collections.abc import Collection, Iterator
from pathlib import Path

import msgspec

from imagemill.atomic import write_bytes_atomic
from imagemill.formats.jsonl import encode_line
from imagemill.pipeline.stage_a.rank_files import LineAppender
from imagemill.strict_json import NOT_JSON

# Why an image has no summary whose rank's process ended before it had one.
RANK_DIED = "rank_died"

_SUFFIX = ".at_work"
_DECODER = msgspec.json.Decoder(str | None)


class AtWork(LineAppender):
    """One rank's hands. A process that an exception ends leaves them empty; to exit from within a model is a death."""

    def __init__(self, store: Path, rank: int) -> None:
        self._path = _path(store, rank)
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

    def begin(self, place: str) -> None:
        """`place`: the image, relative to the mission's folder. Seen by whoever looks, from here on."""
        self.append(place)
        self.flush()

    def done(self) -> None:
        """All of them are written down elsewhere."""
        self._file.truncate(self._empty)

    def close(self) -> None:
        self.done()
        super().close()
        if not self._left_behind:
            self._path.unlink(missing_ok=True)


def left_behind(store: Path) -> list[str]:
    """Images that a process was at work on when it died, the latest last; of ranks at work now, what they have at hand too."""
    # A place that comes again goes to the end: it has killed once more than those before it.
    latest: dict[str, None] = {}
    for path in sorted(store.glob(f"*{_SUFFIX}")):
        for place in _read(path):
            if place is not None:
                latest.pop(place, None)
                latest[place] = None
    return list(latest)


def in_hands(store: Path, rank: int) -> list[str]:
    """What a rank that has died was at work on."""
    lines = list(_read(_path(store, rank)))
    if None not in lines:
        return []  # it died before it began: these are of an earlier one
    begun = len(lines) - lines[::-1].index(None)
    return [place for place in lines[begun:] if place is not None]


def forget(store: Path, but: Collection[str]) -> None:
    """Forget what was left behind but these images. No rank may be at work."""
    kept = [place for place in left_behind(store) if place in but]
    for path in store.glob(f"*{_SUFFIX}"):
        path.unlink()
    if kept:
        write_bytes_atomic(_path(store, 0), b"".join(map(encode_line, kept)))


def _path(store: Path, rank: int) -> Path:
    return store / f"rank{rank}{_SUFFIX}"


def _read(path: Path) -> Iterator[str | None]:
    try:
        lines = path.read_bytes().splitlines()
    except FileNotFoundError:
        return
    for line in lines:
        try:
            yield _DECODER.decode(line)
        except NOT_JSON:  # cut short by the death
            continue
