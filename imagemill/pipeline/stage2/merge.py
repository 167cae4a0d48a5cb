"""Merge of ledger and JSONL: determines the records of the file after a run.

    ledger, in order of id ───┐
                              ├──> one line per id ──> approved_image_dataset.jsonl.tmp ──rename──> approved_image_dataset.jsonl
    index of the old file ────┘

Records join by `image_id`; the last of several duplicates wins; lines are sorted by id. An unchanged record keeps its bytes, and
so do records of unknown images. No data is dropped: unreadable lines and replaced records go to the quarantine file. Before a
file with Stage 1 records changes for the first time, a backup is made. The record of a renamed image continues under its new id.

Spec: docs/spec/conventions.md#jsonl-input, docs/spec/stage2.md#record-fields, docs/spec/stage2.md#merge,
docs/spec/migration.md#forward
"""

import heapq
from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from importlib.metadata import version
from itertools import groupby
from operator import itemgetter
from pathlib import Path

import msgspec

from imagemill.domain.buckets import is_unusual_ratio
from imagemill.domain.embedding_specs import DINOV3, VAE
from imagemill.domain.inputs import KOHYA, folder_repeats
from imagemill.domain.layout import DataRoot
from imagemill.domain.stage2_records import (
    INLINE_VECTOR,
    Record,
    build_record,
    captions_of,
    is_side,
    is_stage1,
    replaced_extras,
)
from imagemill.errors import ImagemillError
from imagemill.formats.jsonl import SpanReader, encode_line, encode_sorted, replace_lines
from imagemill.fs.atomic import link_or_copy, temporary_path
from imagemill.fs.fingerprints import FileSignature, file_signature
from imagemill.pipeline.stage2.inventory import Inventory
from imagemill.pipeline.stage2.quarantine import BAD_ID, CAPTION, QuarantinedLine, quarantine
from imagemill.pipeline.stage2.quarantine import RENAMED as RENAMED_LINE
from imagemill.pipeline.stage2.record_index import (
    NextIndex,
    Recorded,
    parse_record,
    read_recorded,
    record_at,
    record_id,
    remember,
    state_of,
    unfinished,
)
from imagemill.pipeline.stage2.renames import note_arrivals
from imagemill.store.ledger import ACCEPTED, RECORDED, CaptionRow, Ledger, Problem, Rename, SourceRow
from imagemill.store.second_copy import refresh

ASSET = "stage2_jsonl"

# Ledger setting: records of this data root were migrated from Stage 1, so a rollback without a backup is possible.
STAGE1 = "stage1"

CAPTION_REPLACED = "caption_replaced"

# Recorded one by one in the ledger's journal: a record was added, became version 2, or was corrected.
ADDED, MIGRATED, CHANGED = "added", "migrated", "changed"
# Of a renamed image: its record was written under its new id.
RENAMED = "renamed"
_COUNTS = ("records", ADDED, MIGRATED, CHANGED, RENAMED, "stage1", "quarantined", "rewritten")

# Unchanged lines are copied in pieces of this size.
_PIECE_BYTES = 1 << 20


@dataclass(frozen=True)
class Merge:
    """Parameters of a merge.

    Attributes:
        inventory: contents of the folders.
        kinds: kinds whose refusals the counters include.
        migrate: whether Stage 1 records become version 2; otherwise they stay byte for byte.
        up_to: Stage 1 records whose id sorts after this one wait for another run.
        captioned: whether a captioner is configured.
    """

    inventory: Inventory
    kinds: tuple[str, ...] = ()
    migrate: bool = True
    up_to: str | None = None
    captioned: bool = False

    @cached_property
    def cropped(self) -> bool:
        """Whether the VAE encodes the bucket's crop of each image."""
        return self.inventory.in_force(VAE).contract.get("size") == "bucket"

    @property
    def root(self) -> DataRoot:
        """The data root of the inventory."""
        return self.inventory.root


@dataclass(slots=True)
class Merged:
    """Result of a merge: counters, rows of the journal, problems, and replaced lines.

    `vectors`: ids with a valid DINOv3 file; only their inline vectors may be removed from records.
    `written`: signature of the new file, None if the old one stays. `bases`: by new id of a renamed image, its earlier lines.
    """

    vectors: Set[str] = frozenset()
    counts: Counter[str] = field(default_factory=lambda: Counter(dict.fromkeys(_COUNTS, 0)))
    changes: list[tuple[str, str]] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    replaced: list[QuarantinedLine] = field(default_factory=list)
    written: FileSignature | None = None
    bases: dict[str, list[bytes]] = field(default_factory=dict)


def write_records(merge: Merge, ledger: Ledger) -> Merged:
    """Replace the file of records in one rename, only if a byte changed. Memory: the index of the old file."""
    # The images of this run are known now; a withdrawal or another move may follow before the next listing.
    note_arrivals(merge.inventory.scan, ledger)
    jsonl = merge.root.stage2_jsonl
    began, seen = state_of(jsonl), ledger.last_row_change()
    whole = read_recorded(jsonl)
    merged = Merged(_with_vector_file(whole.vectors, merge.inventory, ledger))
    renamed = _ready_renames(whole, ledger)
    recorded = whole.without(frozenset(each.former for each in renamed))
    _take_bases(renamed, whole, merged)
    merged.counts["quarantined"] = quarantine(
        merge.root.quarantine,
        jsonl.name,
        [QuarantinedLine(span.number, reason, why, span.read()) for reason, why, span in recorded.set_aside],
    )
    left, index = unfinished(jsonl), NextIndex(jsonl, recorded)
    changed = None if renamed or index.index is None or began[1] else _changed(merge, recorded, began[0], ledger)
    # Lines of an interrupted writer's file are still being read: the next file must then use another temporary name.
    temporary = temporary_path(jsonl.parent) if left.exists() else left
    rewritten = replace_lines(
        jsonl,
        merged_lines(merge, recorded, ledger, merged, index, changed),
        temporary=temporary,
        before=lambda: _make_way(merge.root, temporary, began, merged, ledger),
    )
    if state := merged.written or began[0]:
        ledger.record_verified(jsonl, state)
    ledger.advance_renames([each.former for each in renamed], RECORDED)
    left.unlink(missing_ok=True)
    if index.index is not None:
        remember(jsonl, merged.written or began[0], index.index)
    merged.counts["rewritten"] = int(rewritten)
    with ledger.transaction():
        now = read_recorded(jsonl)
        ids = now.captions if changed is None else changed
        ledger.record_recorded_captions(ids, now.texts_of, are_all=changed is None)
        if state:
            ledger.record_merged(jsonl, state, _parameters(merge), seen, compared_all=changed is None)
    if stage1_backup(jsonl).is_file() and ledger.setting(STAGE1) is None:  # migrated by a release without this setting
        ledger.record_setting(STAGE1, "migrated")
    return merged


def _with_vector_file(ids: Collection[str], inventory: Inventory, ledger: Ledger) -> set[str]:
    """Return those of these images that have a valid DINOv3 file."""
    if not ids:
        return set()
    files, listing = ledger.files(DINOV3.kind, list(ids)), inventory.files(DINOV3)
    return {image_id for image_id in ids if image_id in listing and (image_id, listing[image_id]) in files}


def _parameters(merge: Merge) -> str:
    """Return everything but the ledger's rows that new lines are made from, unless there are records of Stage 1."""
    given = (version("imagemill"), merge.root.image_path(""), merge.cropped, merge.inventory.inputs.repeats)
    return " ".join(map(str, given))


def _changed(merge: Merge, recorded: Recorded, state: FileSignature | None, ledger: Ledger) -> list[str] | None:
    """Return the images whose lines may differ from those of the file, in order; None to compare all lines.

    All lines are compared if most images have changed, which takes less time than to look up their rows.

    Spec: docs/spec/stage2.md#merge
    """
    last = ledger.merged(merge.root.stage2_jsonl, state)
    if last is None or last.parameters != _parameters(merge):
        return None
    changed = ledger.row_changes_after(last.seen)
    return None if changed is None or 2 * len(changed) > len(recorded.lines) else sorted(changed)


def _ready_renames(recorded: Recorded, ledger: Ledger) -> list[Rename]:
    """Return the accepted renames whose records can be written now, or that have none to continue."""
    renames = ledger.renames(ACCEPTED)
    if not renames:
        return []
    ids = [each.image_id for each in renames]
    opened, captions = ledger.sources(ids), ledger.captions(ids)
    return [
        each
        for each in renames
        if each.former not in recorded.lines
        or each.image_id in recorded.lines
        or (each.image_id in opened and (row := captions.get(each.image_id)) and row.mask is not None)
    ]


def _take_bases(renames: Iterable[Rename], recorded: Recorded, merged: Merged) -> None:
    """Take the records of earlier ids as the bases of the new ones; their lines are quarantined."""
    for each in renames:
        if span := recorded.lines.get(each.former):
            raw = span.read()
            why = f"renamed to {each.image_id}"
            merged.replaced.append(QuarantinedLine(span.number, RENAMED_LINE, why, raw))
            merged.bases.setdefault(each.image_id, []).append(raw)


def _make_way(root: DataRoot, new: Path, began: Sequence[FileSignature | None], merged: Merged, ledger: Ledger) -> None:
    """Save the content that exists only in the old file, before the new one replaces it."""
    jsonl, merged.written = root.stage2_jsonl, file_signature(new)
    if state_of(jsonl)[0] != began[0]:
        raise _meanwhile(jsonl)
    quarantine(root.quarantine, jsonl.name, merged.replaced)
    if merged.counts[MIGRATED] or merged.counts["stage1"]:
        _back_up(jsonl)
        ledger.record_setting(STAGE1, "migrated")
        refresh(root, ledger)


def merged_lines(
    merge: Merge,
    recorded: Recorded,
    ledger: Ledger,
    merged: Merged,
    index: NextIndex,
    changed: Sequence[str] | None = None,
) -> Iterator[bytes]:
    """Yield every line of the next file, in order of id, several at once if they stay; fill `merged` and `index` meanwhile.

    `changed`: the only images whose lines may differ, in order; the lines of the file are in order of id then. None: all images.
    """
    outdated = ledger.outdated_captions()
    ids = recorded.lines if changed is None else (i for i in changed if i in recorded.lines)
    old: Iterator[tuple[str, tuple[SourceRow | None, CaptionRow] | None]] = ((i, None) for i in sorted(ids))
    known = ((image_id, (source, caption)) for image_id, source, caption in ledger.facts(changed))
    with SpanReader() as reader:
        others = None if changed is None else _LinesBetween(recorded, reader, merged, index)
        # If both contain an id, the ledger's row comes last.
        for image_id, found in groupby(heapq.merge(old, known, key=itemgetter(0)), key=itemgetter(0)):
            *_, (_, facts) = found
            source, caption = facts or (None, None)
            if image_id not in recorded.lines and (
                source is None or caption is None or caption.mask is None or image_id in outdated
            ):
                continue  # no record yet, and not enough metadata for one
            if others:
                yield from others.up_to(image_id)
            before = len(merged.changes)
            raw = reader.read(recorded.lines[image_id]) if image_id in recorded.lines else b""
            line = _line(image_id, raw, source, caption, merge, recorded, merged)
            index.add(image_id, line, unchanged=len(merged.changes) == before)
            yield line
        if others:
            yield from others.up_to(None)


class _LinesBetween:
    """The lines of the present file between those of changed images. They are in order of id."""

    def __init__(self, recorded: Recorded, reader: SpanReader, merged: Merged, index: NextIndex) -> None:
        self._lines, self._ids, self._begin = recorded.lines, list(recorded.lines), 0
        self._reader, self._merged, self._index = reader, merged, index

    def up_to(self, image_id: str | None) -> Iterator[bytes]:
        """Yield the lines before that of an image, in pieces; None: the rest. The next call begins after its line, if any."""
        end = len(self._ids) if image_id is None else bisect_left(self._ids, image_id, self._begin)
        ids, self._begin = self._ids[self._begin : end], end + (image_id in self._lines)
        if not ids:
            return
        first, last = self._lines[ids[0]], self._lines[ids[-1]]
        self._merged.counts["records"] += len(ids)
        self._index.keep(ids)
        stop = last.offset + last.length + len(b"\n")
        for offset in range(first.offset, stop, _PIECE_BYTES):
            yield self._reader.read(first._replace(offset=offset, length=min(_PIECE_BYTES, stop - offset)))


def _line(
    image_id: str,
    raw: bytes,
    source: SourceRow | None,
    caption: CaptionRow | None,
    merge: Merge,
    recorded: Recorded,
    merged: Merged,
) -> bytes:
    """Return the next line of one id: the old bytes, which are `raw`, if nothing changes."""
    merged.counts["records"] += 1
    bases = merged.bases.get(image_id, ())
    unusual = bases or image_id in recorded.vectors
    if raw and not unusual and _is_written_again(raw, source, caption, merge):
        return raw + b"\n"
    old = _old_record(image_id, raw, recorded)
    pending = image_id in recorded.vectors and image_id not in merged.vectors
    if old is not None and (pending or image_id in recorded.stage1):
        why = _stays(image_id, old, source, caption, merge)
        if why is None and pending:
            why = "missing_vector"
        if why is not None:
            merged.counts["stage1"] += 1
            if why:
                detail, remedy = _WHY[why]
                outcome, remedy = "failed" if why == "missing_vector" else "refused", remedy.format(id=image_id)
                merged.problems.append(Problem(image_id, ASSET, outcome, why, detail, remedy))
            return _with_vector(image_id, old, recorded, raw)
    record = _record(_continued(bases, old, source) if bases else old, source, caption, merge)
    # Compare bytes: Python considers 24.0 and True equal to ints, but a valid record needs ints.
    if record is None or (old is not None and encode_sorted(record) == encode_sorted(old)):
        return raw + b"\n"
    what = (RENAMED if bases else ADDED) if old is None else MIGRATED if is_stage1(old) else CHANGED
    merged.counts[what] += 1
    merged.changes.append((image_id, what))
    corrections = list(_corrections(old, record))
    merged.counts.update(corrections)
    if CAPTION_REPLACED in corrections:
        why = f"caption replaced by the {caption.origin if caption else 'ledger'}"
        merged.replaced.append(QuarantinedLine(recorded.lines[image_id].number, CAPTION, why, raw))
    return encode_line(record)


def _is_written_again(raw: bytes, source: SourceRow | None, caption: CaptionRow | None, merge: Merge) -> bool:
    """Return whether a line is the one that a new record would have. Without parsing the line, this takes half the time."""
    record = _record(None, source, caption, merge, encoded=True)
    return record is not None and encode_line(record)[:-1] == raw


@lru_cache(maxsize=1024)
def _encoded(mask: str) -> msgspec.Raw:
    return msgspec.Raw(f"[{','.join(mask)}]".encode())


def _continued(lines: Iterable[bytes], old: Record | None, source: SourceRow | None) -> Record:
    """Return the record to build on, of an image that was renamed: the earlier record with the fields of its own, if any.

    The part of its path before `approved/` stays.
    """
    base: Record = {}
    for line in lines:
        base |= parse_record(line) or {}
    before, folder, _ = str(base.get("image_path", "")).partition("/approved/")
    path = f"{before}{folder}{source.file_name}" if folder and source else ""
    return base | {"image_path": path} | (old or {})


def _old_record(image_id: str, raw: bytes, recorded: Recorded) -> Record | None:
    if image_id not in recorded.lines:
        return None
    old = parse_record(raw)
    if old is None or record_id(old) != image_id:
        raise _meanwhile(recorded.lines[image_id].path)
    return old


def _meanwhile(path: Path) -> ImagemillError:
    return ImagemillError("the file of records changed while it was merged", where=path, do="run imagemill again")


def _stays(
    image_id: str, old: Record, source: SourceRow | None, caption: CaptionRow | None, merge: Merge
) -> str | None:
    """Return why a Stage 1 record stays: None if it may become version 2, blank if its migration was not requested."""
    if not merge.migrate or (merge.up_to is not None and image_id > merge.up_to):
        return ""
    if caption is None:
        return "missing_caption"
    if caption.mask is None:
        return ""  # the run stopped before tokenising it
    if source is None and not (is_side(old.get("height")) and is_side(old.get("width"))):
        return "missing_size"
    return None


_WHY = {
    "missing_caption": ("the Stage 1 record has no caption", "write one line of text to {id}.txt beside the image"),
    "missing_size": ("the image is gone and the record lacks its height or width", "restore the image"),
    "missing_vector": (
        "its inline vector is not in a valid npy file yet, so it stays in the record",
        "run imagemill stage2 --pass dinov3",
    ),
}


# Reasons that each merge determines again. Refused ids are in the quarantine file; earlier releases recorded them here too.
UNMIGRATED = frozenset(_WHY) - {"missing_caption"} | {BAD_ID}


def _with_vector(image_id: str, old: Record, recorded: Recorded, raw: bytes) -> bytes:
    """Return the line unchanged, or with the vector of a replaced record that is not in an npy file yet."""
    span = recorded.vectors.get(image_id)
    if INLINE_VECTOR in old or span is None:
        return raw + b"\n"
    return encode_line({**old, INLINE_VECTOR: record_at(span).get(INLINE_VECTOR)})


def _record(
    old: Record | None, source: SourceRow | None, caption: CaptionRow | None, merge: Merge, *, encoded: bool = False
) -> Record | None:
    """Build the record from the ledger's rows; None if they are not sufficient, or if a version 2 record's image is gone.

    `encoded`: to be encoded as it is, which takes less time with a mask that is JSON already.
    """
    if caption is None or caption.mask is None or (source is None and (old is None or not is_stage1(old))):
        return None
    old = old or {}
    height, width = (source.height, source.width) if source else (old["height"], old["width"])
    return build_record(
        image_id=caption.image_id,
        image_path=merge.root.image_path(source.file_name) if source else old.get("image_path", ""),
        caption=caption.text,
        mask=_encoded(caption.mask) if encoded else caption.tokens,
        height=height,
        width=width,
        cropped=merge.cropped,
        captions=caption.texts,
        repeats=folder_repeats(source.file_name) if source and merge.inventory.inputs.repeats == KOHYA else None,
        base=old,
    )


def _corrections(old: Record | None, new: Record) -> Iterator[str]:
    """Yield a counter name for each field that differs from the old record, and for an unusual aspect ratio."""
    if is_unusual_ratio(new["width"], new["height"]):
        yield "unusual_ratio"
    for name in ("height", "width"):
        if old and name in old and old[name] != new[name]:
            yield f"{name}_corrected"
    for name in replaced_extras(old or {}, new):
        yield f"{name}_replaced"
    if old and "caption" in old and (old["caption"] != new["caption"] or {*captions_of(old)} - {*captions_of(new)}):
        yield CAPTION_REPLACED
    elif old and "t5_attention_mask" in old and old["t5_attention_mask"] != new["t5_attention_mask"]:
        yield "mask_corrected"


# ---- backup of the old file


def stage1_backup(jsonl: Path) -> Path:
    """Return the path of the Stage 1 backup."""
    return jsonl.with_name(f"{jsonl.name}.stage1.backup")


def _back_up(jsonl: Path) -> None:
    """Link the Stage 1 file to its backup name before the merged file replaces it. Made once, never overwritten."""
    backup = stage1_backup(jsonl)
    if not backup.exists():
        link_or_copy(jsonl, backup)
