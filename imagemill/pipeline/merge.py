"""Bringing ledger and JSONL together: which records the file holds after a run.

    approved_image_dataset.jsonl       what readers see, replaced in one rename
    approved_image_dataset.jsonl.tmp   the next one while it is being written

Records join by `image_id`, of duplicates the last wins, lines stand in order of id. A record that nothing changed keeps its
bytes; records of images we do not know are kept as they are. Nothing is dropped: lines that cannot be read and records that
another replaced go to the quarantine.

Source: seed 000 "Atomic JSONL updates"; CONTRACTS section 0 "JSONL input", section 1 "merge", "record".
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath

from imagemill.atomic import write_bytes_atomic
from imagemill.formats.jsonl import Line, encode_line, encode_sorted, read_jsonl
from imagemill.layout import DataRoot
from imagemill.ledger import CaptionRow, SourceRow
from imagemill.records import INLINE_VECTOR, Record, build_record


@dataclass(slots=True)
class Merge:
    """The file after the merge, and how it came about.

    `lines`: whole lines with their newline, by image id. `quarantined`: (line number, why, raw bytes).
    """

    lines: dict[str, bytes] = field(default_factory=dict)
    added: list[str] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)
    stage1: list[str] = field(default_factory=list)
    quarantined: list[tuple[int, str, bytes]] = field(default_factory=list)

    def ordered(self) -> list[bytes]:
        return [self.lines[image_id] for image_id in sorted(self.lines)]


def plan_merge(
    existing: Iterable[Line], sources: Mapping[str, SourceRow], captions: Mapping[str, CaptionRow], root: DataRoot
) -> Merge:
    """Merge existing lines with what the ledger knows. An image needs a source row and a caption with its mask."""
    merge = Merge()
    records = _join(existing, merge)
    for image_id, source in sources.items():
        caption = captions.get(image_id)
        if caption is None or caption.mask is None:
            continue
        old = records.get(image_id)
        if old and INLINE_VECTOR in old:
            # The inline vector leaves the file only by migration, which takes it along.
            merge.stage1.append(image_id)
            continue
        record = build_record(
            image_id=image_id,
            image_path=root.image_path(source.file_name),
            caption=caption.text,
            mask=caption.mask,
            height=source.height,
            width=source.width,
            base=old,
        )
        # As bytes: Python calls 24.0 and true equal to ints, which a valid record needs.
        if old is None or encode_sorted(record) != encode_sorted(old):
            (merge.changed if old else merge.added).append(image_id)
            merge.lines[image_id] = encode_line(record)
    return merge


def unfinished(jsonl: Path) -> Path:
    """The name under which the next file is written, by us and by other writers of this layout."""
    return jsonl.with_name(f"{jsonl.name}.tmp")


def existing_lines(jsonl: Path) -> Iterator[Line]:
    """The lines of the file, then those an interrupted writer left beside it: they are newer. A torn tail is one bad line."""
    for path in (jsonl, unfinished(jsonl)):
        if path.is_file():
            yield from read_jsonl(path)


def _join(existing: Iterable[Line], merge: Merge) -> dict[str, Record]:
    records: dict[str, Record] = {}
    origin: dict[str, tuple[int, bytes]] = {}
    for line in existing:
        image_id = record_id(line.value) if line.value is not None else None
        if line.value is None or image_id is None:
            merge.quarantined.append((line.number, line.problem or "no image_id and no image_path", line.raw))
            continue
        if image_id in origin:
            merge.quarantined.append((origin[image_id][0], f"replaced by line {line.number}", origin[image_id][1]))
        origin[image_id] = (line.number, line.raw)
        records[image_id] = line.value
        merge.lines[image_id] = line.raw.rstrip(b"\r\n") + b"\n"
    return records


def record_id(record: Record) -> str | None:
    """The record's id; a Stage 1 record has none and takes its image's stem."""
    image_id = record.get("image_id")
    if isinstance(image_id, str) and image_id:
        return image_id
    path = record.get("image_path")
    return PurePath(path).stem or None if isinstance(path, str) else None


def quarantine(folder: Path, name: str, lines: Sequence[tuple[int, str, bytes]]) -> int:
    """Keep the lines that a merge took out, each with its number and why; returns how many were new.

    One file per JSONL: `<name>.quarantine.jsonl`, with the raw bytes as text where they are UTF-8, else in hex.
    """
    path = folder / f"{name}.quarantine.jsonl"
    known = path.read_bytes().splitlines(keepends=True) if path.is_file() else []
    seen = set(known)
    rows = [encode_line({"line": number, "why": why, **_as_text(raw)}) for number, why, raw in lines]
    new = [row for row in dict.fromkeys(rows) if row not in seen]
    if new:
        write_bytes_atomic(path, b"".join([*known, *new]))
    return len(new)


def _as_text(raw: bytes) -> dict[str, str]:
    try:
        return {"text": raw.decode("utf-8")}
    except UnicodeDecodeError:
        return {"hex": raw.hex()}
