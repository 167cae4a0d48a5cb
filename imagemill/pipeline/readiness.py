"""Which records are ready to be packed: a valid record and a valid, current file of every kind.

Names and sizes come from one listing per folder; a file is opened only where the ledger does not vouch for it. Any Stage 2
layout of the seed's form is understood, also one that another program wrote.

Source: seed 001 "Load Stage 2 metadata and validate readiness"; CONTRACTS section 2, "Readiness".
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from imagemill.embedding_specs import EmbeddingSpec, embedding_specs
from imagemill.errors import InvalidNpy, MissingInput
from imagemill.files import StatTriple, fingerprint
from imagemill.formats.jsonl import encode_sorted, read_jsonl
from imagemill.formats.npy import NpyStore
from imagemill.ledger import FileRow, Ledger, Problem, SourceRow
from imagemill.provenance import UNKNOWN
from imagemill.records import Record, record_problem

ASSET = "bucket_shards"


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
        if row is None:
            try:
                row = self._unlisted(record, present)
            except InvalidNpy as invalid:
                return invalid.reason, invalid.what
            adopted.append(row)
        if row.source is not None and row.source != self._current_source(record, sources):
            earlier = "image" if self.spec.source == "pixels" else "caption"
            return "stale", f"{self.spec.folder}/{image_id}.npy was made from an earlier {earlier}"
        return row

    def _unlisted(self, record: Record, present: StatTriple) -> FileRow:
        """A file the ledger did not vouch for when the folder was listed: read it, or find that a run has replaced it since."""
        image_id = record["image_id"]
        content = self.store.check(image_id, record["height"], record["width"])
        now = self.store.stat(image_id)
        if now != present:
            known = self.ledger.files(self.spec.kind, [image_id]).get((image_id, now))
            return known or self._unlisted(record, now)
        return FileRow(self.spec.kind, image_id, present, None, content, UNKNOWN)

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
    on_ready: Callable[[Readiness], None] = lambda found: None,
) -> Readiness:
    """Read the records and match them with the files on disk.

    Args:
        buckets: records of other buckets count as filtered. on_ready: called after each ready record, for progress.

    Raises:
        MissingInput: no JSONL there.
    """
    if not jsonl.is_file():
        raise MissingInput("no Stage 2 records", where=jsonl, do="run `imagemill stage2` first")
    found = Readiness()
    latest = _latest_records(jsonl, found)
    sources = ledger.sources()
    kinds = [_Kind(spec, derived, ledger) for spec in embedding_specs()]
    for record in latest:
        problem = record_problem(record)
        if problem:
            _skip(
                found,
                record,
                "bad_mask" if problem.rule == "mask" else f"bad_{problem.field}",
                problem.message,
                problem.remedy,
            )
            continue
        if record["aspect_bucket"] not in buckets:
            found.filtered += 1
            continue
        files = [kind.file(record, sources, found.adopted) for kind in kinds]
        refusal = next((f for f in files if isinstance(f, tuple)), None)
        if refusal:
            _skip(found, record, *refusal, "run `imagemill stage2`")
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


def _latest_records(jsonl: Path, found: Readiness) -> list[Record]:
    """The records in file order, of duplicates the last one; everything else is counted as incomplete."""
    latest: dict[str, tuple[int, Record]] = {}
    rest: list[tuple[int, Record]] = []
    for line in read_jsonl(jsonl):
        if not line.raw.strip():
            continue
        found.total_records += 1
        if line.value is None:
            item = f"{jsonl.name}:{line.number}"
            found.skipped_incomplete += 1
            found.problems.append(
                Problem(item, ASSET, "refused", "malformed", line.problem or "", "repair or remove the line")
            )
            continue
        image_id = line.value.get("image_id")
        if not isinstance(image_id, str):
            rest.append((line.number, line.value))
            continue
        if image_id in latest:
            number, _ = latest.pop(image_id)
            found.skipped_incomplete += 1
            found.problems.append(
                Problem(
                    f"{jsonl.name}:{number}",
                    ASSET,
                    "refused",
                    "duplicate_id",
                    f"{image_id} again in line {line.number}",
                    "keep one of them",
                )
            )
        latest[image_id] = (line.number, line.value)
    return [record for _, record in sorted([*latest.values(), *rest], key=lambda pair: pair[0])]


def _skip(found: Readiness, record: Record, reason: str, detail: str, remedy: str) -> None:
    found.skipped_incomplete += 1
    found.problems.append(Problem(str(record.get("image_id")), ASSET, "refused", reason, detail, remedy))
