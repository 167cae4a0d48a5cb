"""Index of the records by their positions in the file, so that a file of gigabytes is never held in memory.

    approved_image_dataset.jsonl       the file
    approved_image_dataset.jsonl.tmp   left by an interrupted writer: newer than the file

Parsing a line is in formats/jsonl.py, the next content of the file in pipeline/stage2/merge.py.

Spec: docs/spec/conventions.md#jsonl-input, docs/spec/stage2.md#merge, docs/spec/migration.md#forward
"""

from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any, TypeGuard

import msgspec

from imagemill.domain.ids import id_problem
from imagemill.domain.stage2_records import (
    DECODER,
    INLINE_VECTOR,
    OPTIONAL_FIELDS,
    RECORD_FIELDS,
    Record,
    Stage2Record,
    captions_of,
    is_plain,
    is_stage1,
    usual_masks,
)
from imagemill.formats.jsonl import (
    Line,
    Span,
    SpanTable,
    decode_canonical,
    encode_line,
    encode_sorted,
    parse_line,
    parse_tolerating,
    read_mentions,
    read_typed_spans,
    tolerate,
)
from imagemill.fs.fingerprints import FileSignature, FingerprintTable, file_signature, fingerprint
from imagemill.pipeline.stage2.quarantine import BAD_ID, DUPLICATE, MALFORMED
from imagemill.store.ledger import Ledger, fingerprint_texts

# Most characters of a refused id in messages.
_SHOWN = 80

# Size in bytes of about 10,000 records.
_MANY_BYTES = 4 * 1024 * 1024

# The last index, by its file and the state of the file.
_LAST: dict[tuple[Path, tuple[FileSignature | None, FileSignature | None]], "Recorded"] = {}


@dataclass(slots=True)
class Recorded:
    """The existing records.

    `lines`: the last record of each id. `vectors`: for ids with an inline vector in any of their records, the last such record.
    `stage1`: ids whose record is of Stage 1. `set_aside`: lines that do not count, each with a reason code of quarantine.py
    and the reason in words. `captions`: fingerprint of the caption of each record that has one. `several`: `fingerprint_texts` of
    those that have several. `is_usual`: whether every line is known to be a valid record of Stage 2, each of another image.
    """

    lines: SpanTable = field(default_factory=SpanTable)
    vectors: SpanTable = field(default_factory=SpanTable)
    stage1: set[str] = field(default_factory=set)
    set_aside: list[tuple[str, str, Span]] = field(default_factory=list)
    captions: FingerprintTable = field(default_factory=FingerprintTable)
    several: dict[str, str] = field(default_factory=dict)
    is_usual: bool = field(default=True, compare=False)

    @property
    def is_plain(self) -> bool:
        """Whether every line is the record of an image: none is of Stage 1, contains its vector, or does not count."""
        return not (self.vectors or self.stage1 or self.set_aside)

    def texts_of(self, ids: Iterable[str]) -> dict[str, str]:
        """Return `fingerprint_texts` of the captions of each of these images whose record has one."""
        return {i: texts for i in ids if (texts := self.several.get(i) or self.captions.get(i))}

    def without(self, ids: Set[str]) -> "Recorded":
        """Return the records of the other images; all of them, without a copy, if there are no ids."""
        if not ids:
            return self
        lines, vectors = (
            SpanTable((i, span) for i, span in spans.items() if i not in ids) for spans in (self.lines, self.vectors)
        )
        captions = FingerprintTable((i, text) for i, text in self.captions.items() if i not in ids)
        several = {i: texts for i, texts in self.several.items() if i not in ids}
        return Recorded(lines, vectors, self.stage1 - ids, self.set_aside, captions, several, self.is_usual)


def has_many(jsonl: Path) -> bool:
    """Return whether there are so many records that other folders are listed in another process: docs/decisions/0030."""
    return jsonl.is_file() and jsonl.stat().st_size > _MANY_BYTES


def known_images(ledger: Ledger, recorded: Recorded) -> set[str]:
    """Return the ids of all images that were ever opened, withdrawn or recorded."""
    return {*ledger.ids("sources"), *ledger.ids("withdrawn"), *recorded.lines}


def unfinished(jsonl: Path) -> Path:
    """Return the temporary path of the next file, shared with other writers of this layout."""
    return jsonl.with_name(f"{jsonl.name}.tmp")


def read_recorded(jsonl: Path) -> Recorded:
    """Index the file and an interrupted writer's temporary file. Cached in this process until one of the two changes.

    Returns:
        about 200 bytes per record, with the fingerprint of its caption; treat it as read-only.
    """
    key = jsonl, state_of(jsonl)
    found = _LAST.get(key)
    if found is None:
        _LAST.clear()  # before the next one is read, because two take twice the memory
        found = _LAST[key] = _index(jsonl, _take_all)
    return found


def last_index(jsonl: Path) -> Recorded | None:
    """Return what `read_recorded` would return, if this process has it."""
    return _LAST.get((jsonl, state_of(jsonl)))


def remember(jsonl: Path, state: FileSignature | None, index: Recorded) -> None:
    """Let `read_recorded` return the index of a file that this process has written, as long as the file has this state."""
    _LAST.clear()
    _LAST[jsonl, (state, None)] = index


def state_of(jsonl: Path) -> tuple[FileSignature | None, FileSignature | None]:
    """Return the signatures of the file and of the temporary file, None for one that does not exist."""
    main, left = (file_signature(path) if path.is_file() else None for path in (jsonl, unfinished(jsonl)))
    return main, left


def find_record(jsonl: Path, image_id: str) -> Span | None:
    """Return the position of one image's record as in `read_recorded`, without decoding the records of other images."""

    def take(found: Recorded, path: Path) -> None:
        for line in read_mentions(path, image_id):
            _take(found, path, line)

    return _index(jsonl, take).lines.get(image_id)


def _index(jsonl: Path, take: Callable[[Recorded, Path], None]) -> Recorded:
    found = Recorded()
    for path in (jsonl, unfinished(jsonl)):
        if path.is_file():
            take(found, path)
    return found


def _take_all(found: Recorded, path: Path) -> None:
    """Add all lines of a file. Records that are certainly valid, with one caption, take half of the time of others."""
    masks = usual_masks()
    for span, record in read_typed_spans(path, DECODER):
        if not _is_usual(record, found, masks):
            found.is_usual = False
        elif record.captions is msgspec.UNSET:
            found.lines[record.image_id] = span
            found.captions[record.image_id] = fingerprint(record.caption.encode("utf-8"))
            continue
        raw = record if isinstance(record, bytes) else encode_line(record)
        _take(found, path, parse_line(span.number, raw)._replace(offset=span.offset))


def _is_usual(record: Stage2Record | bytes, found: Recorded, masks: Mapping[bytes, Any]) -> TypeGuard[Stage2Record]:
    """Return whether a line is certainly a valid record, of an image that no earlier line is of."""
    return not isinstance(record, bytes) and record.image_id not in found.lines and is_plain(record, masks)


class NextIndex:
    """The index of the next file, made while its lines are written.

    Attributes:
        index: the lines so far; None if a record contains its vector, is of Stage 1, or is in quarantine. The file is then read.

    Args:
        jsonl: the file.
        old: the index of the present file.
    """

    def __init__(self, jsonl: Path, old: Recorded) -> None:
        self.index = Recorded(is_usual=old.is_usual) if old.is_plain else None
        self._jsonl, self._old, self._offset, self._masks = jsonl, old, 0, usual_masks()

    def add(self, image_id: str, line: bytes, *, unchanged: bool) -> None:
        """Add the next line, with its ending. `unchanged`: whether it is the image's line in the present file."""
        if self.index is None:
            return
        if unchanged:
            self._keep(self.index, image_id, len(line) - 1)
        else:
            number = len(self.index.lines) + 1
            if self.index.is_usual:
                self.index.is_usual = _is_usual(decode_canonical(line, DECODER)[0], self.index, self._masks)
            _take(self.index, self._jsonl, parse_line(number, line)._replace(offset=self._offset))
            self._offset += len(line)

    def keep(self, ids: Iterable[str]) -> None:
        """Add the lines that these images have in the present file, in this order."""
        if self.index is not None:
            for image_id in ids:
                self._keep(self.index, image_id, self._old.lines.length(image_id))

    def _keep(self, index: Recorded, image_id: str, length: int) -> None:
        index.lines.put(image_id, self._jsonl, len(index.lines) + 1, self._offset, length)
        index.captions.take(image_id, self._old.captions)
        if texts := self._old.several.get(image_id):
            index.several[image_id] = texts
        self._offset += length + len(b"\n")


def record_at(span: Span) -> Record:
    """Return a record; empty if it can no longer be parsed because the file has been replaced."""
    return parse_record(span.read()) or {}


def parse_record(raw: bytes) -> Record | None:
    """Parse a record of either stage; only an inline vector may contain NaN and infinity."""
    return parse_tolerating(raw, INLINE_VECTOR)


def _take(found: Recorded, path: Path, line: Line) -> None:
    # A Stage 1 record may have NaN in its vector: the vector is recomputed, the other fields are kept.
    line = tolerate(line, INLINE_VECTOR)
    span = Span(path, line.number, line.offset, len(line.raw))
    image_id = record_id(line.value) if line.value is not None else None
    if line.value is None or image_id is None:
        found.set_aside.append((MALFORMED, line.problem or "no image_id and no image_path", span))
        return
    if problem := id_problem(image_id):
        found.set_aside.append((BAD_ID, f"bad image id {image_id[:_SHOWN]!r}: {problem}", span))
        return
    earlier = found.lines.get(image_id)
    if earlier and not (earlier.path != path and _holds_all_of(record_at(earlier), line.value)):
        found.set_aside.append((DUPLICATE, f"replaced by line {line.number}", earlier))
    found.lines[image_id] = span
    caption = line.value.get("caption")
    if isinstance(caption, str) and caption.strip():
        found.captions[image_id] = fingerprint(caption.encode("utf-8"))
    else:
        found.captions.pop(image_id, None)
    if image_id in found.captions and len(texts := captions_of(line.value)) > 1:
        found.several[image_id] = fingerprint_texts(texts)
    else:
        found.several.pop(image_id, None)
    if INLINE_VECTOR in line.value:
        found.vectors[image_id] = span
    if is_stage1(line.value):
        found.stage1.add(image_id)
    else:
        found.stage1.discard(image_id)


def _holds_all_of(old: Record, new: Record) -> bool:
    """Return True if an interrupted merge wrote this line from that record: all fields not derived from the image are equal."""
    derived = {*RECORD_FIELDS, *OPTIONAL_FIELDS, INLINE_VECTOR} - {"caption", "image_path"}
    kept = {key: value for key, value in old.items() if key not in derived}
    return encode_sorted(kept) == encode_sorted({key: new.get(key) for key in kept})


def record_id(record: Record) -> str | None:
    """Return the record's id; a Stage 1 record without one takes the stem of its image path."""
    image_id = record.get("image_id")
    if isinstance(image_id, str) and image_id:
        return image_id
    path = record.get("image_path")
    return PurePath(path).stem or None if isinstance(path, str) else None
