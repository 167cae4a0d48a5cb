"""Which records are ready to be packed: a valid record and a valid, current file of every kind.

Names and sizes come from one listing per folder; a file is opened only where the ledger does not vouch for it. Any Stage 2
layout of the seed's form is understood, also one that another program wrote.

Source: seed 001 "Load Stage 2 metadata and validate readiness"; CONTRACTS section 2, "Readiness".
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from imagemill.embedding_specs import EmbeddingSpec, embedding_specs
from imagemill.errors import InvalidNpy, MissingInput
from imagemill.files import StatTriple, fingerprint
from imagemill.formats.jsonl import encode_sorted, read_jsonl
from imagemill.formats.npy import NpyStore, check_npy_header
from imagemill.ledger import FileRow, Ledger, Problem, SourceRow
from imagemill.pipeline.plan import row_of_bytes
from imagemill.pipeline.regenerate import refuse_regenerating
from imagemill.provenance import UNKNOWN
from imagemill.records import Record, record_problem

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


class _Kind:
    """The files of one kind, on disk and in the ledger."""

    def __init__(self, spec: EmbeddingSpec, derived: Path, ledger: Ledger) -> None:
        self.spec, self.ledger = spec, ledger
        self.store = NpyStore(derived / spec.folder, spec)
        self.listing: Mapping[str, StatTriple] = self.store.listing()
        self.rows = ledger.files(spec.kind)

    def file(
        self, record: Record, sources: Mapping[str, SourceRow], adopted: list[FileRow]
    ) -> FileRow | tuple[str, str]:
        """The row of this record's file, or (reason, detail) why there is none to pack."""
        image_id = record["image_id"]
        present = self.listing.get(image_id)
        if present is None:
            return "missing_file", f"no {self.spec.folder}/{image_id}.npy"
        row = self.rows.get((image_id, present))
        try:
            if row is None:
                row = self._unlisted(record, present, sources)
                adopted.append(row)
            else:
                self._check_shape(record, sources.get(image_id))
        except InvalidNpy as invalid:
            return invalid.reason, invalid.what
        except OSError as error:
            return _READ_ERROR, str(error)
        if row.source is not None and row.source != self._current_source(record, sources):
            earlier = "image" if self.spec.source == "pixels" else "caption"
            return "stale", f"{self.spec.folder}/{image_id}.npy was made from an earlier {earlier}"
        return row

    def _check_shape(self, record: Record, source: SourceRow | None) -> None:
        """A file the ledger vouches for is whole; whether it is of this record's size is for the record to show.

        Raises:
            InvalidNpy: it is not.
        """
        shape = self.spec.shape(record["height"], record["width"])
        if source is None or self.spec.shape(source.height, source.width) != shape:
            check_npy_header(self.store.path(record["image_id"]), shape, self.spec.dtype)

    def _unlisted(self, record: Record, present: StatTriple, sources: Mapping[str, SourceRow]) -> FileRow:
        """A file the ledger did not vouch for when the folder was listed: read it, or find that a run has replaced it since."""
        image_id = record["image_id"]
        content = self.store.check(image_id, record["height"], record["width"])
        now, known = self.store.stat(image_id), self.ledger.files(self.spec.kind, [image_id])
        if now != present:
            return known.get((image_id, now)) or self._unlisted(record, now, sources)
        same = row_of_bytes(known.values(), content, present, self._current_source(record, sources))
        return same or FileRow(self.spec.kind, image_id, present, None, content, UNKNOWN)

    def _current_source(self, record: Record, sources: Mapping[str, SourceRow]) -> str | None:
        if self.spec.source == "caption":
            return fingerprint(record["caption"].encode("utf-8"))
        source = sources.get(record["image_id"])
        return source.fingerprint if source else None


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
        buckets: records of other buckets count as filtered. on_ready: called after each ready record, for progress.
        excluded: near duplicates to leave out, with what stands for each (`near_duplicates.excluded_images`).

    Raises:
        MissingInput: no JSONL there. ImagemillError: a kind is being regenerated.
    """
    refuse_regenerating(ledger)
    if not jsonl.is_file():
        raise MissingInput("no Stage 2 records", where=jsonl, do="run `imagemill stage2` first")
    found = Readiness()
    latest = _latest_records(jsonl, found)
    sources, withdrawn = ledger.sources(), ledger.ids("withdrawn")
    kinds = [_Kind(spec, derived, ledger) for spec in embedding_specs()]
    for item, record in latest:
        problem = record_problem(record)
        if problem:
            _skip(
                found,
                item,
                "bad_mask" if problem.rule == "mask" else f"bad_{problem.field}",
                problem.message,
                problem.remedy,
            )
            continue
        if record["aspect_bucket"] not in buckets:
            found.filtered += 1
            continue
        if item in withdrawn:
            _skip(found, item, "withdrawn", "taken out by imagemill withdraw", f"imagemill withdraw --restore {item}")
            continue
        if excluded and item in excluded:
            _skip(found, item, "near_duplicate", excluded[item], _KEEP_DUPLICATE)
            continue
        files = [kind.file(record, sources, found.adopted) for kind in kinds]
        refusal = next((f for f in files if isinstance(f, tuple)), None)
        if refusal:
            _skip(found, item, *refusal, "run `imagemill stage2`")
            continue
        found.ready.append(
            ReadySample(
                record["image_id"],
                record["aspect_bucket"],
                encode_sorted(record),
                tuple(record["t5_attention_mask"]),
                tuple(f for f in files if isinstance(f, FileRow)),
            )
        )
        on_ready(found)
    return found


def progress_lines(every: int) -> Callable[[Readiness], None]:
    """A plain line every so many ready records. Source: seed 001, "Progress during scan"."""

    def say(found: Readiness) -> None:
        if len(found.ready) % every == 0:
            counts = f"total_records={found.total_records} ready_records={len(found.ready)}"
            print(f"{counts} skipped_incomplete={found.skipped_incomplete}", flush=True)

    return say


def _latest_records(jsonl: Path, found: Readiness) -> list[tuple[str, Record]]:
    """The records in file order, of duplicates the last one, each with its id, or its line where it has none.

    Everything else is counted as incomplete.
    """
    # In the order of the lines that count: a later record of the same id is put in anew.
    latest: dict[str, tuple[int, Record]] = {}
    for line in read_jsonl(jsonl):
        if not line.raw.strip():
            continue
        found.total_records += 1
        place = f"{jsonl.name}:{line.number}"
        if line.value is None:
            _skip(found, place, "malformed", line.problem or "", "repair or remove the line")
            _warn(found, line.problem)
            continue
        image_id = line.value.get("image_id")
        item = image_id if isinstance(image_id, str) and image_id else place
        if item in latest:
            number, _ = latest.pop(item)
            detail = f"{item} again in line {line.number}"
            _skip(found, f"{jsonl.name}:{number}", "duplicate_id", detail, "keep one of them")
        latest[item] = (line.number, line.value)
    return [(item, record) for item, (_, record) in latest.items()]


def _skip(found: Readiness, item: str, reason: str, detail: str, remedy: str) -> None:
    found.skipped_incomplete += 1
    outcome = "failed" if reason == _READ_ERROR else "refused"
    found.problems.append(Problem(item, ASSET, outcome, reason, detail, remedy))


def _warn(found: Readiness, problem: str | None) -> None:
    """Source: seed 001, "Malformed JSONL line is skipped gracefully"."""
    if found.skipped_incomplete <= _WARNINGS:
        _log.warning("%s is skipped: %s", found.problems[-1].item, problem)
