"""Which records are ready to be packed: a valid record and a valid, current file of every kind.

Names and sizes come from one listing per folder; a file is opened only where the ledger does not vouch for it. Any Stage 2
layout of the seed's form is understood, also one that another program wrote.

Source: seed 001 "Load Stage 2 metadata and validate readiness"; CONTRACTS section 2, "Readiness".
"""

import gc
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from imagemill.embedding_specs import EmbeddingSpec, embedding_specs
from imagemill.errors import InvalidNpy, MissingInput
from imagemill.files import StatTriple
from imagemill.formats.jsonl import parse_line, read_raw
from imagemill.formats.npy import NpyStore, check_npy_header
from imagemill.ledger import FileRow, Ledger, Problem
from imagemill.pipeline.plan import row_of_bytes
from imagemill.pipeline.regenerate import refuse_regenerating
from imagemill.pipeline.slim import SlimRecord, slim_of, slim_record
from imagemill.provenance import UNKNOWN
from imagemill.records import RecordProblem, record_problem

ASSET = "bucket_shards"

# Reason code of a file that the disk did not give: ours to answer for, not the record's.
_READ_ERROR = "read_error"
_KEEP_DUPLICATE = "set near_duplicates.exclude: false, or remove one of them"
# Malformed lines that are told one by one; all of them are counted.
_WARNINGS = 20
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ReadySample:
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


# Fingerprint, height and width of an image as last read.
_Source = tuple[str, int, int]


class _Kind:
    """The files of one kind, on disk and in the ledger."""

    def __init__(self, spec: EmbeddingSpec, derived: Path, ledger: Ledger) -> None:
        self.spec, self.ledger = spec, ledger
        self.store = NpyStore(derived / spec.folder, spec)
        self.listing: Mapping[str, StatTriple] = self.store.listing()
        self.rows = ledger.present_files(spec.kind, self.listing)

    def file(self, record: SlimRecord, source: _Source | None, adopted: list[FileRow]) -> FileRow | tuple[str, str]:
        """The row of this record's file, or (reason, detail) why there is none to pack."""
        image_id = record.image_id
        row = self.rows.get(image_id)
        try:
            if row is None:
                present = self.listing.get(image_id)
                if present is None:
                    return "missing_file", f"no {self.spec.folder}/{image_id}.npy"
                row = self._unlisted(record, present, source)
                adopted.append(row)
            elif source is None or source[1] != record.height or source[2] != record.width:
                self._check_shape(record, source)
        except InvalidNpy as invalid:
            return invalid.reason, invalid.what
        except OSError as error:
            return _READ_ERROR, str(error)
        if row.source is not None and row.source != self._wanted(record, source):
            earlier = "image" if self.spec.source == "pixels" else "caption"
            return "stale", f"{self.spec.folder}/{image_id}.npy was made from an earlier {earlier}"
        return row

    def _wanted(self, record: SlimRecord, source: _Source | None) -> str | None:
        """Fingerprint of what a current file is made from."""
        return record.caption if self.spec.source == "caption" else (source[0] if source else None)

    def _check_shape(self, record: SlimRecord, source: _Source | None) -> None:
        """A file the ledger vouches for is whole; whether it is of this record's size is for the record to show.

        Raises:
            InvalidNpy: it is not.
        """
        shape = self.spec.shape(record.height, record.width)
        if source is None or self.spec.shape(*source[1:]) != shape:
            check_npy_header(self.store.path(record.image_id), shape, self.spec.dtype)

    def _unlisted(self, record: SlimRecord, present: StatTriple, source: _Source | None) -> FileRow:
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
    on_ready: Callable[[Readiness], None] = lambda found: None,
) -> Readiness:
    """Read the records and match them with the files on disk.

    Args:
        buckets: records of other buckets count as filtered. excluded: image id → why it is a near duplicate to leave out; such
            a record counts as incomplete. on_ready: called after each ready record, for progress.

    Raises:
        MissingInput: no JSONL there. ImagemillError: a kind is being regenerated.
    """
    refuse_regenerating(ledger)
    with _no_collector():
        return _find_ready(jsonl, derived, ledger, buckets, excluded, on_ready)


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
    on_ready: Callable[[Readiness], None],
) -> Readiness:
    if not jsonl.is_file():
        raise MissingInput("no Stage 2 records", where=jsonl, do="run `imagemill stage2` first")
    found = Readiness()
    latest = _latest_records(jsonl, found)
    sources: dict[str, _Source] = {row[0]: row[1:] for row in ledger.source_facts()}
    withdrawn = ledger.ids("withdrawn")
    kinds = [_Kind(spec, derived, ledger) for spec in embedding_specs()]
    for item, record in latest:
        if isinstance(record, RecordProblem):
            reason = "bad_mask" if record.rule == "mask" else f"bad_{record.field}"
            _skip(found, item, reason, record.message, record.remedy)
            continue
        if record.bucket not in buckets:
            found.filtered += 1
            continue
        if item in withdrawn:
            _skip(found, item, "withdrawn", "taken out by imagemill withdraw", f"imagemill withdraw --restore {item}")
            continue
        if excluded and item in excluded:
            _skip(found, item, "near_duplicate", excluded[item], _KEEP_DUPLICATE)
            continue
        files = [kind.file(record, sources.get(item), found.adopted) for kind in kinds]
        refusal = next((f for f in files if isinstance(f, tuple)), None)
        if refusal:
            _skip(found, item, *refusal, "run `imagemill stage2`")
            continue
        found.ready.append(ReadySample(item, record.bucket, record.member, record.mask, tuple(files)))  # type: ignore[arg-type]
        on_ready(found)
    return found


def progress_lines(every: int) -> Callable[[Readiness], None]:
    """A plain line every so many ready records. Source: seed 001, "Progress during scan"."""

    def say(found: Readiness) -> None:
        if len(found.ready) % every == 0:
            counts = f"total_records={found.total_records} ready_records={len(found.ready)}"
            print(f"{counts} skipped_incomplete={found.skipped_incomplete}", flush=True)

    return say


def _latest_records(jsonl: Path, found: Readiness) -> list[tuple[str, SlimRecord | RecordProblem]]:
    """The records in file order, of duplicates the last one, each with its id, or its line where it has none; or what is wrong.

    Everything else is counted as incomplete.
    """
    # In the order of the lines that count: a later record of the same id is put in anew.
    latest: dict[str, tuple[int, SlimRecord | RecordProblem]] = {}
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
            earlier, _ = latest.pop(item)
            detail = f"{item} again in line {number}"
            _skip(found, f"{jsonl.name}:{earlier}", "duplicate_id", detail, "keep one of them")
        latest[item] = (number, record)
    return [(item, record) for item, (_, record) in latest.items()]


def _slowly(jsonl: Path, number: int, raw: bytes, found: Readiness) -> tuple[str, SlimRecord | RecordProblem | None]:
    """The verdict on a line that cannot be told by a look; None where it is no record at all."""
    place, line = f"{jsonl.name}:{number}", parse_line(number, raw)
    if line.value is None:
        _skip(found, place, "malformed", line.problem or "", "repair or remove the line")
        _warn(found, line.problem)
        return place, None
    image_id = line.value.get("image_id")
    item = image_id if isinstance(image_id, str) and image_id else place
    return item, record_problem(line.value) or slim_of(line.value)


def _skip(found: Readiness, item: str, reason: str, detail: str, remedy: str) -> None:
    found.skipped_incomplete += 1
    outcome = "failed" if reason == _READ_ERROR else "refused"
    found.problems.append(Problem(item, ASSET, outcome, reason, detail, remedy))


def _warn(found: Readiness, problem: str | None) -> None:
    """Source: seed 001, "Malformed JSONL line is skipped gracefully"."""
    if found.skipped_incomplete <= _WARNINGS:
        _log.warning("%s is skipped: %s", found.problems[-1].item, problem)
