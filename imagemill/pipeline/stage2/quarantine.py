"""Lines removed from a JSONL file, kept with the reason: `.imagemill/quarantine/<name>.quarantine.jsonl`.

    {"line": 5, "reason": "malformed_line", "why": "malformed: …", "text": "…"}      `hex` instead of `text` if not UTF-8

A line stays there until the user removes it; until then it counts as an input that did not reach the output.

Spec: docs/spec/conventions.md#jsonl-input
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from imagemill.formats.jsonl import encode_line, read_jsonl
from imagemill.fs.atomic import write_bytes_atomic

SUFFIX = ".quarantine.jsonl"

MALFORMED, BAD_ID, DUPLICATE, CAPTION = "malformed_line", "bad_id", "duplicate_id", "caption_replaced"
RENAMED = "renamed"

# Reasons of lines that another source, or the record of another name, replaced: they are kept, but no input is missing because
# of them.
REPLACED_TEXTS = frozenset({CAPTION, RENAMED})


class QuarantinedLine(NamedTuple):
    """A line of a JSONL file and why it was removed. `number`: from 1, at the time of removal."""

    number: int
    reason: str
    why: str
    raw: bytes


class KeptLine(NamedTuple):
    """A line of a quarantine file. `origin`: name of the JSONL file that it was taken from; `number`: its line there."""

    kept_in: Path
    origin: str
    number: int
    reason: str
    why: str


def quarantine(folder: Path, name: str, lines: Sequence[QuarantinedLine]) -> int:
    """Add lines to the quarantine file of the JSONL file `name`; return how many were not there yet."""
    if not lines:
        return 0
    from filelock import FileLock

    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}{SUFFIX}"
    with FileLock(folder / f".{path.name}.lock"):
        known = path.read_bytes().splitlines(keepends=True) if path.is_file() else []
        seen = set(known)
        rows = [
            encode_line({"line": line.number, "reason": line.reason, "why": line.why, **_as_text(line.raw)})
            for line in lines
        ]
        new = [row for row in dict.fromkeys(rows) if row not in seen]
        if new:
            write_bytes_atomic(path, b"".join([*known, *new]))
        return len(new)


def quarantined(folder: Path) -> Iterator[KeptLine]:
    """Yield the lines of all quarantine files of a folder, including those of earlier releases; skip lines of another form."""
    for path in quarantine_files(folder):
        for line in read_jsonl(path):
            row = line.value or {}
            number, why, reason = row.get("line"), row.get("why"), row.get("reason")
            if isinstance(number, int) and isinstance(why, str):
                reason = reason if isinstance(reason, str) else _reason(why)
                yield KeptLine(path, path.name.removesuffix(SUFFIX), number, reason, why)


def quarantine_files(folder: Path) -> list[Path]:
    """Return the quarantine files of a folder."""
    return sorted(folder.glob(f"*{SUFFIX}"))


def _reason(why: str) -> str:
    """Return the reason code of a line that an earlier release removed."""
    codes = {"replaced by line": DUPLICATE, "caption replaced": CAPTION, "bad image id": BAD_ID}
    return next((code for start, code in codes.items() if why.startswith(start)), MALFORMED)


def _as_text(raw: bytes) -> dict[str, str]:
    try:
        return {"text": raw.decode("utf-8")}
    except UnicodeDecodeError:
        return {"hex": raw.hex()}
