"""JSON lines: a reader that survives any bytes, and writers that leave whole files.

Belongs here: one line, one file of lines.
Belongs elsewhere: what a record must hold (domain/stage2_records.py), merging old and new records (pipeline/stage2/merge.py).
Spec: docs/spec/conventions.md#jsonl-input, docs/spec/stage2.md#merge
"""

import io
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeVar

import msgspec

from imagemill.formats.diff_writer import Draft
from imagemill.fs.atomic import atomic_write, sync_folder
from imagemill.text.strict_json import NOT_JSON, is_too_deep

_decoder = msgspec.json.Decoder()
_encoder = msgspec.json.Encoder()
_sorting_encoder = msgspec.json.Encoder(order="sorted")

# Lines are decoded together in blocks of about this size: a call costs as much as decoding a short line.
_BLOCK_BYTES = 1 << 16

_T = TypeVar("_T")


class Line(NamedTuple):
    """One line of a file, as an object or with the reason why it is none.

    Attributes:
        number: from 1.
        raw: its bytes without the line ending.
        value: the object, None where there is a problem.
        problem: why it is no object (`blank`, `malformed: …`, `null`, `a list`, …), None where it is one.
        torn: the last line, unreadable and without a newline: most likely cut off while it was written.
        offset: where it begins in the file, in bytes.
    """

    number: int
    raw: bytes
    value: dict[str, Any] | None
    problem: str | None
    torn: bool = False
    offset: int = 0


def read_jsonl(path: Path) -> Iterator[Line]:
    """Every line of a file, good or bad, in order; memory flat in the number of lines."""
    with open(path, "rb") as file:
        offset = 0
        for number, whole in enumerate(file, start=1):
            raw = whole.removesuffix(b"\n").removesuffix(b"\r")
            value, problem = _parse(raw)
            yield Line(number, raw, value, problem, value is None and not whole.endswith(b"\n"), offset)
            offset += len(whole)


def read_raw(path: Path) -> Iterator[tuple[int, bytes]]:
    """Every line's number and bytes, unread: for who can tell most of them by a look. `parse_line` gives the verdict."""
    with open(path, "rb") as file:
        for number, whole in enumerate(file, start=1):
            yield number, whole.removesuffix(b"\n").removesuffix(b"\r")


def read_typed(path: Path, decoder: msgspec.json.Decoder[_T]) -> Iterator[_T | bytes]:
    """Yield the record of each canonical line, and the bytes of every other line, its ending included (`decode_canonical`)."""
    with open(path, "rb") as file:
        while block := file.read(_BLOCK_BYTES):
            yield from decode_canonical(block + file.readline(), decoder)


def decode_canonical(block: bytes, decoder: msgspec.json.Decoder[_T]) -> Sequence[_T | bytes]:
    """Decode whole lines. A line that is not the encoding of its own record, ending included, stays bytes.

    A canonical line has no key twice, no field that the record's type lacks, and no other spelling of a value.
    """
    try:
        records = decoder.decode_lines(block)
        if _encoder.encode_lines(records) == block:
            return records
    except NOT_JSON:
        pass
    lines = io.BytesIO(block).readlines()
    return lines if len(lines) == 1 else [found for line in lines for found in decode_canonical(line, decoder)]


def parse_line(number: int, raw: bytes) -> Line:
    """One line, with or without its ending, as `read_jsonl` gives it, but for `torn` and `offset`."""
    raw = raw.removesuffix(b"\n").removesuffix(b"\r")
    return Line(number, raw, *_parse(raw))


def parse_object(data: bytes) -> dict[str, Any] | None:
    """One JSON object, strictly; None where the bytes hold anything else."""
    return _parse(data)[0]


def parse_tolerating(raw: bytes, field: str) -> dict[str, Any] | None:
    """Parse an object whose `field` may contain NaN and infinity, as Python's `json` writes them.

    Everything else is strict. Returns None if the bytes hold anything else.
    """
    value = parse_object(raw)
    if value is not None or field.encode() not in raw:
        return value
    try:
        loose = json.loads(raw.decode("utf-8"))
        if not isinstance(loose, dict) or field not in loose or is_too_deep(raw, loose):
            return None
        _encoder.encode(loose[field])  # raises for what JSON cannot hold, such as a lone surrogate
        rest = parse_object(json.dumps({key: loose[key] for key in loose if key != field}).encode())
    except (ValueError, RecursionError):
        return None
    return None if rest is None else {key: loose[key] if key == field else rest[key] for key in loose}


def tolerate(line: Line, field: str) -> Line:
    """Return the line as an object if nothing but NaN or infinity in `field` makes it malformed; else as it is."""
    value = parse_tolerating(line.raw, field) if line.value is None else None
    return line if value is None else line._replace(value=value, problem=None, torn=False)


def _parse(raw: bytes) -> tuple[dict[str, Any] | None, str | None]:
    """The object or the problem. Strict: no NaN or infinity, no lone surrogate, no number out of range."""
    try:
        value = _decoder.decode(raw)
    except NOT_JSON as error:
        return None, _problem(raw, error)
    if is_too_deep(raw, value):
        return None, _TOO_DEEP
    return (value, None) if isinstance(value, dict) else (None, _KINDS[type(value)])


_TOO_DEEP = "malformed: nested too deeply"
_KINDS: Mapping[type, str] = {
    type(None): "null",
    list: "a list",
    str: "a string",
    bool: "true or false",
    int: "a number",
    float: "a number",
}


def _problem(raw: bytes, error: Exception) -> str:
    if not raw.strip():
        return "blank"
    if raw.startswith(b"\xef\xbb\xbf"):
        return "malformed: a byte order mark before the object"
    if isinstance(error, UnicodeDecodeError):
        return "malformed: invalid UTF-8"
    if isinstance(error, RecursionError):
        return _TOO_DEEP
    if "truncated" in str(error) and b"\\ud" in raw.lower():
        return "malformed: cut off, or an unpaired surrogate"  # to the parser both lack what should follow
    return f"malformed: {str(error).removeprefix('JSON is malformed: ')}"


def encode_line(obj: Any) -> bytes:
    """UTF-8 JSON in the given order of keys, with one newline. JSON has no NaN and no infinity: they become null."""
    return _encoder.encode(obj) + b"\n"


def encode_sorted(obj: Any) -> bytes:
    """`encode_line` with keys in order of their code points, at every level: equal objects give equal bytes."""
    return _sorting_encoder.encode(obj) + b"\n"


def write_jsonl(path: Path, rows: Iterable[Any]) -> int:
    """Replace a file by these rows, whole or not at all; returns how many. Memory flat in the number of rows."""
    count = 0
    with atomic_write(path) as file:
        for row in rows:
            file.write(encode_line(row))
            count += 1
    return count


class LineAppender:
    """Appends lines to a file. A last line that a kill cut short is closed off first; flushed lines survive the process."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(path, "a+b")  # noqa: SIM115
        if self._file.tell():
            self._file.seek(-1, os.SEEK_END)
            if self._file.read(1) != b"\n":
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
        """Flush the lines to the disk and close the file."""
        try:
            self._file.flush()
            os.fsync(self._file.fileno())
        finally:
            self._file.close()


def replace_lines(
    path: Path, lines: Iterable[bytes], *, temporary: Path | None = None, before: Callable[[], None] = lambda: None
) -> bool:
    """Make a file hold exactly these lines, each with its newline; one that already does keeps its bytes and mtime.

    Memory flat in the number of lines. Up to the first difference nothing is written at all.

    Args:
        temporary: the name the file has until it is whole, in the same folder; it is gone afterwards.
        before: called when the new file is whole and the old one still has its name.

    Returns:
        whether the file was rewritten.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = Draft(path.parent, path.name, temporary)
    try:
        for line in lines:
            draft.write(line)
        changed = draft.finish()
        if changed:
            before()
            draft.publish()
            sync_folder(path.parent)
    finally:
        draft.discard()
    return changed
