"""Line-by-line checks of a file of records: a fast typed decode for canonical lines, strict JSON and rules for all others.

    for each line:  typed record ──accept──> valid
                        └── no record, or not accepted ──> strict JSON ──judge──> findings

`accept` may reject a valid record but never accepts an invalid one. The rules are in stage2.py, presets.py and
stage_a.py.

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
    """The checks of one kind of record, with their state between lines. `decoder`: of its typed records."""

    decoder: msgspec.json.Decoder[Any]

    def accept(self, record: Any, number: int) -> bool:
        """Return whether the typed record of a canonical line is certainly valid; if so, remember it."""
        ...

    def judge(self, record: dict[str, Any], number: int) -> Iterator[Finding]:
        """Yield all findings for a record."""
        ...


def check_lines(path: Path, lines: Lines, parse: Callable[[int, bytes], Line] = parse_line) -> Findings:
    """Check every line to the end of the file; `parse` reads the lines that `accept` does not pass."""
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
        yield finding("duplicate_key", f"{key!r} occurs twice", file=file, line=line.number)
    else:
        yield from lines.judge(line.value, line.number)


def key_given_twice(raw: bytes, value: object) -> str | None:
    """Return a key that occurs twice in an object of this line, which parsers accept. `value`: the parsed line."""
    if msgspec.json.encode(value) == raw:
        return None
    twice: list[str] = []

    def collect_duplicates(pairs: list[tuple[str, Any]]) -> None:
        names = [name for name, _ in pairs]
        twice.extend(name for name in names if names.count(name) > 1)

    try:
        json.loads(raw, object_pairs_hook=collect_duplicates)
    except (ValueError, RecursionError):  # nested deeper than this parser supports
        return None
    return twice[0] if twice else None
