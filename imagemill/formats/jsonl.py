"""JSON lines: a reader that accepts any bytes, and writers that replace files atomically.

Contents of records are checked in domain/stage2_records.py; old and new records are merged in pipeline/stage2/merge.py.
Spec: docs/spec/conventions.md#jsonl-input, docs/spec/stage2.md#merge
"""

import io
import itertools
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Self, TypeVar

import msgspec

from imagemill.formats.diff_writer import Draft
from imagemill.fs.atomic import atomic_write, sync_folder
from imagemill.packed import PackedMapping
from imagemill.text.strict_json import NOT_JSON, is_too_deep

_decoder = msgspec.json.Decoder()
_encoder = msgspec.json.Encoder()
_sorting_encoder = msgspec.json.Encoder(order="sorted")

# Lines are decoded in blocks of about this size, because a call costs as much as decoding a short line.
_BLOCK_BYTES = 1 << 16
# Bytes between two lines that are read rather than skipped.
_GAP_BYTES = 1 << 14

_T = TypeVar("_T")


class Line(NamedTuple):
    """One line of a file: an object, or the reason why it is not one.

    Attributes:
        number: line number, from 1.
        raw: its bytes without the line ending.
        value: the object, None if there is a problem.
        problem: why it is not an object (`blank`, `malformed: …`, `null`, `a list`, …), None if it is one.
        offset: position of its first byte in the file.
    """

    number: int
    raw: bytes
    value: dict[str, Any] | None
    problem: str | None
    offset: int = 0


class Span(NamedTuple):
    """Position of a line in a file: its number from 1, its offset in bytes, its length in bytes without the line ending."""

    path: Path
    number: int
    offset: int
    length: int

    def read(self) -> bytes:
        """Return the line's bytes; fewer if the file has been replaced. Raises OSError if the file is gone."""
        with SpanReader() as reader:
            return reader.read(self)


class SpanTable(PackedMapping[int, Span], MutableMapping[str, Span]):
    """Spans by key, in the order of their first assignment. Each takes 50 bytes instead of 170, and is made at its access.

    Args:
        spans: the first ones.
    """

    def __init__(self, spans: Iterable[tuple[str, Span]] = ()) -> None:
        self._paths: list[Path] = []
        # Path, offset, length and number, from the highest bits to the lowest.
        self._packed = {}
        self.update(spans)

    def _unpacked(self, key: str, packed: int) -> Span:
        place = packed >> (_LENGTH_BITS + _NUMBER_BITS)
        path, offset = place >> _OFFSET_BITS, place & (1 << _OFFSET_BITS) - 1
        return Span(self._paths[path], packed & (1 << _NUMBER_BITS) - 1, offset, self.length(key))

    def __setitem__(self, key: str, span: Span) -> None:
        self.put(key, *span)

    def put(self, key: str, path: Path, number: int, offset: int, length: int) -> None:
        """Assign the span with these values."""
        if path not in self._paths:
            self._paths.append(path)
        place = self._paths.index(path) << _OFFSET_BITS | offset
        self._packed[sys.intern(key)] = (place << _LENGTH_BITS | length) << _NUMBER_BITS | number

    def length(self, key: str) -> int:
        """Return the length of a span."""
        return self._packed[key] >> _NUMBER_BITS & (1 << _LENGTH_BITS) - 1

    def __delitem__(self, key: str) -> None:
        del self._packed[key]


# More than any file has: 64 PiB, and lines of 64 TiB.
_OFFSET_BITS, _LENGTH_BITS, _NUMBER_BITS = 56, 46, 46


class SpanReader:
    """A reader of many lines, which opens each file once. A file that is replaced meanwhile is read as it was."""

    def __init__(self) -> None:
        self._files: dict[Path, BinaryIO] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files.values():
            file.close()

    def read(self, span: Span) -> bytes:
        """Return `Span.read`."""
        file = self._files.get(span.path)
        if file is None:
            file = self._files[span.path] = open(span.path, "rb", buffering=0)  # noqa: SIM115
        return os.pread(file.fileno(), span.length, span.offset)

    def read_together(self, spans: Sequence[Span]) -> Iterator[bytes]:
        """Yield `read` of each span. Spans near each other, in this order, are read in one piece."""
        for near in _near(spans):
            first, last = near[0], near[-1]
            piece = self.read(first._replace(length=last.offset + last.length - first.offset))
            for span in near:
                begin = span.offset - first.offset
                yield piece[begin : begin + span.length]


def _near(spans: Iterable[Span]) -> Iterator[list[Span]]:
    """Yield runs of ascending spans of one file, with short gaps, which are no longer than `_BLOCK_BYTES` together."""
    near: list[Span] = []
    for span in spans:
        if near and not (
            span.path == near[-1].path
            and 0 <= span.offset - near[-1].offset - near[-1].length < _GAP_BYTES
            and span.offset + span.length - near[0].offset <= _BLOCK_BYTES
        ):
            yield near
            near = []
        near.append(span)
    if near:
        yield near


def lines_with_offsets(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Yield offset and bytes of every line of a file, with its ending. `line_at` reads it again."""
    offset = 0
    for whole in file:
        yield offset, whole
        offset += len(whole)


def line_at(file: BinaryIO, offset: int) -> bytes:
    """Return the line that begins at this offset, with its ending."""
    file.seek(offset)
    return file.readline()


def read_jsonl(path: Path) -> Iterator[Line]:
    """Yield every line of a file, good or bad, in order. Memory does not grow with the number of lines."""
    with open(path, "rb") as file:
        for number, (offset, whole) in enumerate(lines_with_offsets(file), start=1):
            raw = _without_ending(whole)
            yield Line(number, raw, *_parse(raw), offset)


def read_mentions(path: Path, text: str) -> Iterator[Line]:
    """Yield, as `read_jsonl` does, every line with a string that contains `text`, and possibly others.

    Lines with neither these characters nor a backslash, which may begin an escaped spelling of them, are skipped undecoded.
    """
    wanted = text.encode("utf-8", "surrogatepass")
    with open(path, "rb") as file:
        for number, (offset, whole) in enumerate(lines_with_offsets(file), start=1):
            if wanted in whole or b"\\" in whole:
                raw = _without_ending(whole)
                yield Line(number, raw, *_parse(raw), offset)


def read_raw(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the number and the bytes of every line, undecoded, for callers with a fast check. `parse_line` decodes a line."""
    with open(path, "rb") as file:
        for number, whole in enumerate(file, start=1):
            yield number, _without_ending(whole)


def read_typed(path: Path, decoder: msgspec.json.Decoder[_T]) -> Iterator[_T | bytes]:
    """Yield the record of each canonical line, and the bytes (with line ending) of every other line. See `decode_canonical`."""
    return itertools.chain.from_iterable(decode_canonical(block, decoder) for block in read_blocks(path))


def read_typed_spans(path: Path, decoder: msgspec.json.Decoder[_T]) -> Iterator[tuple[Span, _T | bytes]]:
    """Yield what `read_typed` does, each with its position."""
    start, numbers = 0, itertools.count(1)
    for block in read_blocks(path):
        begin = 0
        for found, number in zip(decode_canonical(block, decoder), numbers, strict=False):
            end = block.find(b"\n", begin)
            # Canonical lines end in a newline alone.
            length = len(_without_ending(found)) if isinstance(found, bytes) else end - begin
            yield Span(path, number, start + begin, length), found
            begin = end + 1
        start += len(block)


def read_blocks(path: Path) -> Iterator[bytes]:
    """Yield the whole lines of a file, many at once."""
    with open(path, "rb") as file:
        while block := file.read(_BLOCK_BYTES):
            yield block + file.readline()


def _without_ending(line: bytes) -> bytes:
    return line.removesuffix(b"\n").removesuffix(b"\r")


def decode_canonical(block: bytes, decoder: msgspec.json.Decoder[_T]) -> Sequence[_T | bytes]:
    """Decode whole lines. A line that is not the encoding of its own record, including the ending, stays bytes.

    A canonical line has no duplicate keys, no field that the record's type lacks, and no other spelling of a value.
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
    """Decode one line, with or without its ending, as `read_jsonl` does, but without `offset`."""
    raw = _without_ending(raw)
    return Line(number, raw, *_parse(raw))


def parse_object(data: bytes) -> dict[str, Any] | None:
    """Decode one JSON object strictly; return None if the bytes hold anything else."""
    return _parse(data)[0]


def parse_tolerating(raw: bytes, field: str) -> dict[str, Any] | None:
    """Decode an object whose `field` may contain NaN and infinity, as Python's `json` writes them.

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
    """Return the line as an object if only NaN or infinity in `field` makes it malformed; otherwise unchanged."""
    value = parse_tolerating(line.raw, field) if line.value is None else None
    return line if value is None else line._replace(value=value, problem=None)


def _parse(raw: bytes) -> tuple[dict[str, Any] | None, str | None]:
    """Return the object or the problem. Strict: no NaN or infinity, no lone surrogate, no number out of range."""
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
    """Encode an object as one line of UTF-8 JSON with unsorted keys. NaN and infinity become null, because JSON has neither."""
    return _encoder.encode(obj) + b"\n"


def encode_sorted(obj: Any) -> bytes:
    """Encode an object like `encode_line`, with keys sorted by code point at every level: equal objects give equal bytes."""
    return _sorting_encoder.encode(obj) + b"\n"


def write_jsonl(path: Path, rows: Iterable[Any]) -> int:
    """Replace a file with these rows atomically; return their number. Memory does not grow with the number of rows."""
    count = 0
    with atomic_write(path) as file:
        for row in rows:
            file.write(encode_line(row))
            count += 1
    return count


class LineAppender:
    """Appender of lines to a file. It first ends a last line that a kill cut off. Flushed lines survive a kill of the process."""

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
        """Write one row to the buffer."""
        self._file.write(encode_line(row))

    def flush(self) -> None:
        """Pass the buffered lines to the operating system."""
        self._file.flush()

    def close(self) -> None:
        """Flush the lines to disk and close the file."""
        try:
            self._file.flush()
            os.fsync(self._file.fileno())
        finally:
            self._file.close()


def replace_lines(
    path: Path, lines: Iterable[bytes], *, temporary: Path | None = None, before: Callable[[], None] = lambda: None
) -> bool:
    """Replace a file with these lines, each with its newline. If it already holds them, its bytes and mtime stay unchanged.

    Memory does not grow with the number of lines. Nothing is written before the first difference.

    Args:
        path: the file.
        lines: its new content.
        temporary: name of the file until it is complete, in the same folder; it does not exist afterwards.
        before: called when the new file is complete and the old one still has its name.

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
