"""Which records are ready to be packed: a valid record and a valid, current file of every kind.

Names and sizes come from one listing per folder; a file is opened only where the ledger does not vouch for it. Any Stage 2
layout of the seed's form is understood, also one that another program wrote.

Source: seed 001 "Load Stage 2 metadata and validate readiness"; CONTRACTS section 2, "Readiness".
"""

import gc
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import msgspec

from imagemill.embedding_specs import EmbeddingSpec, embedding_specs
from imagemill.errors import InvalidNpy, MissingInput
from imagemill.files import StatTriple
from imagemill.formats.jsonl import parse_line, read_raw
from imagemill.formats.npy import SUFFIX, NpyStore, check_npy_header
from imagemill.ledger import FileRow, Ledger, Problem, SourceFacts
from imagemill.listing import Triple, begin_listing
from imagemill.pipeline.plan import row_of_bytes
from imagemill.pipeline.regenerate import refuse_regenerating
from imagemill.pipeline.slim import SlimRecord, slim_of, slim_record
from imagemill.provenance import UNKNOWN
from imagemill.records import INLINE_VECTOR, Record, RecordProblem, record_problem

ASSET = "bucket_shards"

# Reason code of a file that the disk did not give: ours to answer for, not the record's.
_READ_ERROR = "read_error"
_TAKEN_OUT = "taken out by imagemill withdraw"
_KEEP_DUPLICATE = "set near_duplicates.exclude: false, or remove one of them"
_PREVIEW = (
    "preview_caption",
    "its caption is by a preview model, which describes nothing",
    "write a caption beside the image, configure a real captioner, or pack with --allow-preview",
)
# Reason codes of what is wrong with a record, by its rule; of other rules `bad_<field>`.
_REASONS = {"mask": "bad_mask", "stage1": "stage1"}
# Malformed lines that are told one by one; all of them are counted.
_WARNINGS = 20
_log = logging.getLogger(__name__)


class ReadySample(msgspec.Struct, frozen=True, gc=False):
    """One sample on its way into a tar.

    `record`: the json member's bytes. `files`: one ledger row per kind, in the order of the kinds; its stat triple and
    content fingerprint are those of the file on disk.
    """

    image_id: str
    bucket: str
    record: bytes
    mask: tuple[int, ...]
    files: tuple[FileRow, ...]


@dataclass(slots=True)
class Readiness:
    """Every record of the file, sorted into ready, filtered and incomplete: the three add up to `total_records`."""

    total_records: int = 0
    filtered: int = 0
    skipped_incomplete: int = 0
    ready: list[ReadySample] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    adopted: list[FileRow] = field(default_factory=list)


class _Refusal(NamedTuple):
    reason: str
    detail: str


class _Kind:
    """The files of one kind, on disk and in the ledger."""

    def __init__(
        self, spec: EmbeddingSpec, store: NpyStore, listing: Future[Mapping[str, Triple]], ledger: Ledger
    ) -> None:
        self.spec, self.store, self.ledger = spec, store, ledger
        known = ledger.files_of(spec.kind)  # while the folders are being listed
        self.listing = listing.result()
        self.rows = {row.image_id: row for row in known if self.listing.get(row.image_id) == row.stat}
        self.of_caption = spec.source == "caption"

    def vouched(self, record: SlimRecord, source: SourceFacts) -> FileRow | None:
        """The row of this record's file where nothing needs a closer look: the image is known, and of the record's size."""
        row = self.rows.get(record.image_id)
        if row is None or row.source is None:
            return row
        return row if row.source == (record.caption if self.of_caption else source.fingerprint) else None

    def file(self, record: SlimRecord, source: SourceFacts | None, adopted: list[FileRow]) -> FileRow | _Refusal:
        """The row of this record's file, or why there is none to pack."""
        row = self.rows.get(record.image_id)
        try:
            if row is None:
                present = self.listing.get(record.image_id)
                if present is None:
                    return _Refusal("missing_file", f"no {self.spec.folder}/{record.image_id}.npy")
                row = self._unlisted(record, StatTriple._make(present), source)
                adopted.append(row)
            else:
                self._check_shape(record, source)
        except InvalidNpy as invalid:
            return _Refusal(invalid.reason, invalid.what)
        except OSError as error:
            return _Refusal(_READ_ERROR, str(error))
        if row.source is not None and row.source != self._wanted(record, source):
            earlier = "caption" if self.of_caption else "image"
            return _Refusal("stale", f"{self.spec.folder}/{record.image_id}.npy was made from an earlier {earlier}")
        return row

    def _wanted(self, record: SlimRecord, source: SourceFacts | None) -> str | None:
        """Fingerprint of what a current file is made from."""
        return record.caption if self.of_caption else (source.fingerprint if source else None)

    def _check_shape(self, record: SlimRecord, source: SourceFacts | None) -> None:
        """A file the ledger vouches for is whole; whether it is of this record's size is for the record to show.

        Raises:
            InvalidNpy: it is not.
        """
        shape = self.spec.shape(record.height, record.width)
        if source is None or self.spec.shape(source.height, source.width) != shape:
            check_npy_header(self.store.path(record.image_id), shape, self.spec.dtype)

    def _unlisted(self, record: SlimRecord, present: StatTriple, source: SourceFacts | None) -> FileRow:
        """A file the ledger did not vouch for when the folder was listed: read it, or find that a run has replaced it since."""
        image_id = record.image_id
        content = self.store.check(image_id, record.height, record.width)
        now, known = self.store.stat(image_id), self.ledger.files(self.spec.kind, [image_id])
        if now != present:
            return known.get((image_id, now)) or self._unlisted(record, now, source)
        same = row_of_bytes(known.values(), content, present, self._wanted(record, source))
        return same or FileRow(self.spec.kind, image_id, present, None, content, UNKNOWN)


def find_ready(
    jsonl: Path,
    derived: Path,
    ledger: Ledger,
    *,
    buckets: Sequence[str],
    excluded: Mapping[str, str] | None = None,
    allow_preview: bool = False,
    on_ready: Callable[[Readiness], None] = lambda found: None,
) -> Readiness:
    """Read the records and match them with the files on disk.

    Args:
        buckets: records of other buckets count as filtered. excluded: image id → why it is a near duplicate to leave out; such
            a record counts as incomplete. allow_preview: pack captions of preview models too.
        on_ready: called after each ready record, for progress.

    Raises:
        MissingInput: no JSONL there. ImagemillError: a kind is being regenerated.
    """
    refuse_regenerating(ledger)
    with _no_collector():
        return _find_ready(jsonl, derived, ledger, buckets, excluded, allow_preview, on_ready)


@contextmanager
def _no_collector() -> Iterator[None]:
    """Half a million small objects, none in a circle: looking for circles among them took a fifth of the time."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def _find_ready(
    jsonl: Path,
    derived: Path,
    ledger: Ledger,
    buckets: Sequence[str],
    excluded: Mapping[str, str] | None,
    allow_preview: bool,
    on_ready: Callable[[Readiness], None],
) -> Readiness:
    if not jsonl.is_file():
        raise MissingInput("no Stage 2 records", where=jsonl, do="run `imagemill stage2` first")
    found = Readiness()
    stores = {spec: NpyStore(derived / spec.folder, spec) for spec in embedding_specs()}
    with ThreadPoolExecutor(len(stores), "list") as pool:
        listings = begin_listing(pool, [store.folder for store in stores.values()], SUFFIX)
        latest = _latest_records(jsonl, found)
        sources = ledger.source_facts()
        kinds = [_Kind(*of_kind, listing, ledger) for of_kind, listing in zip(stores.items(), listings, strict=True)]
    previews = () if allow_preview else ledger.preview_captions()
    left_out = dict.fromkeys(previews, _PREVIEW)
    left_out |= {i: ("near_duplicate", detail, _KEEP_DUPLICATE) for i, detail in (excluded or {}).items()}
    # Last, so that it is what counts of a sample that is left out for several reasons; the remedy names the id.
    left_out |= {i: ("withdrawn", _TAKEN_OUT, f"imagemill withdraw --restore {i}") for i in ledger.ids("withdrawn")}
    chosen, adopted = set(buckets), found.adopted
    for item, record in latest.items():
        if isinstance(record, RecordProblem):
            reason = _REASONS.get(record.rule, f"bad_{record.field}")
            _skip(found, item, reason, record.message, record.remedy)
            continue
        if record.bucket not in chosen:
            found.filtered += 1
            continue
        if item in left_out:
            _skip(found, item, *left_out[item])
            continue
        files = _files(record, sources.get(item), kinds, adopted)
        if isinstance(files, _Refusal):
            _skip(found, item, *files, "run `imagemill stage2`")
            continue
        found.ready.append(ReadySample(item, record.bucket, record.member, record.mask, files))
        on_ready(found)
    return found


def _files(
    record: SlimRecord, source: SourceFacts | None, kinds: Sequence[_Kind], adopted: list[FileRow]
) -> tuple[FileRow, ...] | _Refusal:
    """A row per kind, or why a kind has none to pack."""
    if source is not None and source.height == record.height and source.width == record.width:
        rows = tuple([row for kind in kinds if (row := kind.vouched(record, source))])
        if len(rows) == len(kinds):
            return rows
    files: list[FileRow] = []
    for kind in kinds:
        file = kind.file(record, source, adopted)
        if isinstance(file, _Refusal):
            return file
        files.append(file)
    return tuple(files)


def progress_lines(every: int) -> Callable[[Readiness], None]:
    """A plain line every so many ready records. Source: seed 001, "Progress during scan"."""

    def say(found: Readiness) -> None:
        if len(found.ready) % every == 0:
            counts = f"total_records={found.total_records} ready_records={len(found.ready)}"
            print(f"{counts} skipped_incomplete={found.skipped_incomplete}", flush=True)

    return say


def _latest_records(jsonl: Path, found: Readiness) -> dict[str, SlimRecord | RecordProblem]:
    """The records in file order, of duplicates the last one, by id, or by line where it has none; or what is wrong with it.

    Everything else is counted as incomplete.
    """
    # In the order of the lines that count: a later record of the same id is put in anew.
    latest: dict[str, SlimRecord | RecordProblem] = {}
    lines: dict[str, int] = {}
    for number, raw in read_raw(jsonl):
        record: SlimRecord | RecordProblem | None = slim_record(raw)
        if record is None:
            if not raw.strip():
                continue
            item, record = _slowly(jsonl, number, raw, found)
        else:
            item = record.image_id
        found.total_records += 1
        if record is None:
            continue
        if item in latest:
            del latest[item]
            detail = f"{item} again in line {number}"
            _skip(found, f"{jsonl.name}:{lines[item]}", "duplicate_id", detail, "keep one of them")
        latest[item], lines[item] = record, number
    return latest


def _slowly(jsonl: Path, number: int, raw: bytes, found: Readiness) -> tuple[str, SlimRecord | RecordProblem | None]:
    """The verdict on a line that cannot be told by a look; None where it is no record at all."""
    place, line = f"{jsonl.name}:{number}", parse_line(number, raw)
    if line.value is None:
        _skip(found, place, "malformed", line.problem or "", "repair or remove the line")
        _warn(found, line.problem)
        return place, None
    image_id = line.value.get("image_id")
    item = image_id if isinstance(image_id, str) and image_id else place
    return item, _stage1_problem(line.value) or record_problem(line.value) or slim_of(line.value)


def _stage1_problem(record: Record) -> RecordProblem | None:
    """What Stage 1 wrote lacks no single field: it waits for its migration."""
    unmigrated = "image_path" in record and not {"image_id", "format_version"} & record.keys()
    if unmigrated or INLINE_VECTOR in record:
        message = "a Stage 1 record, not migrated yet"
        return RecordProblem("format_version", "stage1", message, "run `imagemill stage2`: it migrates them")
    return None


def _skip(found: Readiness, item: str, reason: str, detail: str, remedy: str) -> None:
    found.skipped_incomplete += 1
    outcome = "failed" if reason == _READ_ERROR else "refused"
    found.problems.append(Problem(item, ASSET, outcome, reason, detail, remedy))


def _warn(found: Readiness, problem: str | None) -> None:
    """Source: seed 001, "Malformed JSONL line is skipped gracefully"."""
    if found.skipped_incomplete <= _WARNINGS:
        _log.warning("%s is skipped: %s", found.problems[-1].item, problem)
