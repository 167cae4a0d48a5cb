"""Check a file of records line by line: lines as this program writes them by a typed decode, others by strict JSON and rules.

    for each line:  typed record ──accept──> valid
                        └── none, or no ──> strict JSON ──judge──> findings

`accept` may refuse a good record and never passes a bad one. What a record must hold is in stage2.py, presets.py and stage_a.py.
Spec: docs/spec/conventions.md#jsonl-input
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import msgspec

from imagemill.formats.jsonl import Line, encode_line, parse_line, read_typed
from imagemill.validation.catalogue import finding
from imagemill.validation.findings import Finding

Findings = Iterator[Finding | int]


class Lines(Protocol):
    """One kind of record, with what has to be remembered from line to line. `decoder`: of its typed records."""

    decoder: msgspec.json.Decoder[Any]

    def accept(self, record: Any, number: int) -> bool:
        """Return whether the typed record of a canonical line is surely valid; if so, it is remembered."""
        ...

    def judge(self, record: dict[str, Any], number: int) -> Iterator[Finding]:
        """Everything to say about a record."""
        ...


def check_lines(path: Path, lines: Lines, parse: Callable[[int, bytes], Line] = parse_line) -> Findings:
    """Check every line to the end of the file, however many are bad; `parse` reads those that are not accepted at once."""
    number, accept = 0, lines.accept
    try:
        for number, found in enumerate(read_typed(path, lines.decoder), start=1):
            if isinstance(found, bytes):
                yield from _judged(path.name, parse(number, found), lines)
            elif not accept(found, number):
                yield from _judged(path.name, parse(number, encode_line(found)), lines)
    except OSError as error:
        yield finding("read_error", str(error), file=path.name, line=number)
    yield number


def _judged(file: str, line: Line, lines: Lines) -> Iterator[Finding]:
    if line.value is None:
        yield finding("strict_json", line.problem or "no record", file=file, line=line.number)
    elif key := key_given_twice(line.raw, line.value):
        yield finding("duplicate_key", f"{key!r} is there twice", file=file, line=line.number)
    else:
        yield from lines.judge(line.value, line.number)


def key_given_twice(raw: bytes, value: object) -> str | None:
    """Return a key that an object of this line has twice, which parsers accept. `value`: what the line was parsed to."""
    if msgspec.json.encode(value) == raw:
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
