"""A file of records, line by line: a fast look accepts what is surely right, a slow one gives every verdict.

    with a kind of record (`Lines`):  raw line ──accept──> nothing to say
                                         └─────no──> strict JSON ──judge──> findings

Whatever `accept` takes, `judge` has nothing to say about: the fast look may refuse good lines, never pass a bad one.

Belongs here: walking the file, strict JSON, keys that come twice.
Belongs elsewhere: what a record must hold (stage2.py, presets.py, stage_a.py).
Source: CONTRACTS section 0 "JSONL input of any kind", section 4.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import msgspec

from imagemill.formats.jsonl import Line, parse_line
from imagemill.strict_json import NOT_JSON
from imagemill.validation.catalogue import finding
from imagemill.validation.findings import Finding

Findings = Iterator[Finding | int]

NOT_OF_THE_TYPE = NOT_JSON


class Lines(Protocol):
    """One kind of record, with what has to be remembered from line to line."""

    def accept(self, raw: bytes, number: int) -> bool:
        """Whether a line, its ending included, is surely right. True: it is remembered; False: nothing is known."""
        ...

    def judge(self, record: dict[str, Any], number: int) -> Iterator[Finding]:
        """Everything to say about a record."""
        ...


def check_lines(path: Path, lines: Lines, parse: Callable[[int, bytes], Line] = parse_line) -> Findings:
    """Check every line to the end of the file, however many are bad; `parse` reads those that are not accepted at once."""
    number, accept = 0, lines.accept
    try:
        with open(path, "rb") as file:
            for number, raw in enumerate(file, start=1):
                if not accept(raw, number):
                    yield from _judged(path.name, parse(number, _without_ending(raw)), lines)
    except OSError as error:
        yield finding("read_error", str(error), file=path.name, line=number)
    yield number


def _without_ending(raw: bytes) -> bytes:
    return raw.removesuffix(b"\n").removesuffix(b"\r")


def _judged(file: str, line: Line, lines: Lines) -> Iterator[Finding]:
    if line.value is None:
        yield finding("strict_json", line.problem or "no record", file=file, line=line.number)
    elif key := key_given_twice(line.raw, line.value):
        yield finding("duplicate_key", f"{key!r} is there twice", file=file, line=line.number)
    else:
        yield from lines.judge(line.value, line.number)


def key_given_twice(raw: bytes, value: object) -> str | None:
    """A key that an object of this line, the line of this value, has twice: parsers keep one and say nothing."""
    # Every name and text has two quotes. Of the same objects, a line with no more of them holds no more keys; \u0022 is a quote
    # that looks like none.
    if rb"\u0022" not in raw and raw.count(b'"') == msgspec.json.encode(value).count(b'"'):
        return None
    twice: list[str] = []

    def look(pairs: list[tuple[str, Any]]) -> None:
        names = [name for name, _ in pairs]
        twice.extend(name for name in names if names.count(name) > 1)

    try:
        json.loads(raw, object_pairs_hook=look)
    except (ValueError, RecursionError):  # nested deeper than this parser follows
        return None
    return twice[0] if twice else None
