"""Selection of the records that are ready to be packed: a valid record and a valid, current file of every kind.

Names and sizes come from one listing per folder. A file is opened only if no ledger row matches it, or if the record's
size differs from the image's. Any Stage 2 layout of the specified form is accepted, also one that another program
wrote.

Spec: docs/spec/shards.md#readiness
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import msgspec

from imagemill.domain.embedding_specs import EmbeddingSpec, Refusal, embedding_specs, mask_length
from imagemill.domain.stage2_records import (
    DECODER,
    INLINE_VECTOR,
    Record,
    Stage2Record,
    is_plain,
    usual_masks,
    violations,
)
from imagemill.domain.violations import Violation
from imagemill.errors import ImagemillError, MissingInput
from imagemill.formats.jsonl import (
    Span,
    SpanReader,
    SpanTable,
    decode_canonical,
    encode_line,
    encode_sorted,
    parse_line,
    read_typed,
)
from imagemill.formats.npy import SUFFIX, NpyStore
from imagemill.fs.fingerprints import fingerprint, signature_bytes
from imagemill.fs.listing import FileListing, start_listing
from imagemill.parts import in_parts
from imagemill.pipeline.shards.kind_files import READ_ERROR, KindFiles, PackingRecord
from imagemill.pipeline.shards.shard_sets import sample_digest
from imagemill.pipeline.stage2.plan import OUTDATED_CAPTION
from imagemill.pipeline.stage2.record_index import has_many, parse_record, read_recorded, unfinished
from imagemill.store.ledger import FileRow, Ledger, Problem, SourceRow
from imagemill.store.provenance import spec_in_force
from imagemill.text.strict_json import NOT_JSON

ASSET = "bucket_shards"
T = TypeVar("T")

_TAKEN_OUT = "taken out by imagemill withdraw"
_KEEP_DUPLICATE = "set near_duplicates.exclude: false, or remove one of them"
_PREVIEW = (
    "preview_caption",
    "its caption is by a preview model, which describes nothing",
    "write a caption beside the image, configure a real captioner, or pack with `imagemill shards --allow-preview`",
)
_OUTDATED = ("missing_caption", OUTDATED_CAPTION, "write a caption beside the image, or configure a captioner")
# Reason codes of invalid records by violated rule; for other rules the code is `bad_<field>`.
_REASONS = {"mask": "bad_mask", "stage1": "stage1"}
# The fields that packing needs, in the order of a PackingRecord.
_PACKED = ("aspect_bucket", "t5_attention_mask", "height", "width", "caption")
# Records whose files are looked up together; more while another process lists the files, so that there is enough to do meanwhile.
LOOKED_AT_ONCE = 8192
LOOKED_AT_MEANWHILE = 65_536

# Malformed lines logged one by one; all of them are counted.
_WARNINGS = 20
_log = logging.getLogger(__name__)


class ReadySample(msgspec.Struct, frozen=True, gc=False):
    """One sample to be packed.

    `record`: the bytes of the json member. `files`: one ledger row per kind, in the order of the kinds; their
    signatures and content fingerprints match the files on disk. `digest`: see `sample_digest`.

    A sample that is not loaded has no record, no mask and no files, only `models`, the model keys of its files, and `size`, their
    bytes. `load_samples` adds the rest.
    """

    image_id: str
    bucket: str
    record: bytes = b""
    mask: tuple[int, ...] = ()
    files: tuple[FileRow, ...] = ()
    digest: str = ""
    models: tuple[str, ...] = ()
    size: int = 0

    @property
    def model_keys(self) -> tuple[str, ...]:
        """The model keys of its files, in the order of the kinds."""
        return self.models or tuple(file.model_key for file in self.files)


class KnownSample(msgspec.Struct, frozen=True, gc=False):
    """A sample of a present set that has not changed since it was packed. `digest`: see `sample_digest`."""

    bucket: str
    digest: str


@dataclass(slots=True)
class Readiness:
    """All records of the file, as ready, filtered or incomplete: these three counts add up to `total_records`."""

    total_records: int = 0
    filtered: int = 0
    skipped_incomplete: int = 0
    ready: list[ReadySample] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    adopted: list[FileRow] = field(default_factory=list)


def find_ready(
    jsonl: Path,
    derived: Path,
    ledger: Ledger,
    *,
    buckets: Sequence[str],
    excluded: Mapping[str, str] | None = None,
    allow_preview: bool = False,
    on_ready: Callable[[Readiness], None] = lambda found: None,
    listed: Mapping[EmbeddingSpec, FileListing] = MappingProxyType({}),
    unchanged: Mapping[EmbeddingSpec, Set[str]] = MappingProxyType({}),
    in_force: Callable[[EmbeddingSpec], EmbeddingSpec] | None = None,
    known: Mapping[str, KnownSample] = MappingProxyType({}),
    loaded: bool = True,
) -> Readiness:
    """Read the records and match them with the files on disk.

    Args:
        jsonl: the Stage 2 record file.
        derived: parent of the npy folders.
        ledger: the ledger.
        buckets: records of other buckets count as filtered.
        excluded: image id → why it is left out as a near duplicate; such a record counts as incomplete.
        allow_preview: pack captions of preview models too.
        on_ready: called after each ready record, for progress.
        listed: files of the kinds whose folder was listed already.
        unchanged: of these kinds, images whose listed files are known to be those that their rows describe.
        in_force: kind as declared → kind with the data root's settings and contract; by default that of the recorded model.
        known: samples of present sets whose records and rows have not changed since; only their files are compared.
        loaded: whether samples are loaded. Otherwise one takes about 300 bytes; a sample with an adopted file is loaded all the
            same, and so are all samples if the file has other lines than plain records.

    Raises:
        MissingInput: if the record file does not exist.
    """
    if not jsonl.is_file():
        raise MissingInput("no Stage 2 records", where=jsonl, do="run `imagemill stage2` first")
    found = Readiness()
    chosen_specs = in_force or partial(spec_in_force, ledger=ledger)
    stores = [NpyStore(derived / spec.folder, chosen_specs(spec)) for spec in embedding_specs()]
    listings = (listed.get(store.spec) or store.listing() for store in stores)
    if in_background := has_many(jsonl) and not listed:
        listings = start_listing([store.folder for store in stores], SUFFIX)
    tokens = mask_length(store.spec for store in stores)
    # In any other file, the lines of the index may be those of an interrupted writer, or without an `image_id`.
    loaded = loaded or not (known or (read_recorded(jsonl).is_plain and not unfinished(jsonl).is_file()))
    lines = _lines(jsonl, found, tokens, known=bool(known), loaded=loaded)
    spans = read_recorded(jsonl).lines if known else SpanTable()
    listing_of = _taken_later(listings)
    kinds = [
        KindFiles(store, partial(listing_of, n), ledger, unchanged.get(store.spec, frozenset()))
        for n, store in enumerate(stores)
    ]
    chosen, left_out = set(buckets), _left_out(ledger, excluded, allow_preview)
    shared: dict[Any, Any] = {}
    with SpanReader() as reader:
        for part in map(dict, in_parts(lines, LOOKED_AT_MEANWHILE if in_background else LOOKED_AT_ONCE)):
            stay = _with_files({i: known[i] for i in part if i in known and i not in left_out}, kinds, shared)
            rest = [item for item in part if item not in stay]
            rows = [kind.rows(rest) for kind in kinds]
            records = {
                item: _read(spans[item], reader, found, tokens) if line is None else line
                for item, line in part.items()
                if item not in stay
            }
            sources = ledger.sources([item for item, record in records.items() if isinstance(record, PackingRecord)])
            for kind, of_kind in zip(kinds, rows, strict=True):
                kind.compare(of_kind)
            for item in part:
                sample = stay.get(item)
                if sample is None and (record := records[item]) is not None:
                    sample = _judged(item, record, sources.get(item), kinds, chosen, left_out, found)
                if sample is not None:
                    found.ready.append(sample if loaded else _unloaded(sample, kinds, shared))
                    on_ready(found)
    for _ in listings:  # without records, too, the process that lists the files is awaited
        pass
    found.adopted = [row for kind in kinds for row in kind.adopted]
    return found


def _taken_later(items: Iterator[T]) -> Callable[[int], T]:
    """Return the function that returns an item by its number, and takes it and those before it when it is first needed."""
    taken: list[T] = []

    def item(number: int) -> T:
        taken.extend(islice(items, number + 1 - len(taken)))
        return taken[number]

    return item


def _judged(
    item: str,
    record: PackingRecord | Violation,
    source: SourceRow | None,
    kinds: Sequence[KindFiles],
    chosen: Set[str],
    left_out: Mapping[str, tuple[str, str, str]],
    found: Readiness,
) -> ReadySample | None:
    """Return the sample of a record; None if it is filtered or skipped, which is counted."""
    if isinstance(record, Violation):
        reason = _REASONS.get(record.rule, f"bad_{record.field}")
        _skip(found, item, reason, record.message, record.remedy)
        return None
    if record.bucket not in chosen:
        found.filtered += 1
        return None
    if item in left_out:
        _skip(found, item, *left_out[item])
        return None
    files = []
    for kind in kinds:
        file = kind.find(record, source)
        if isinstance(file, Refusal):
            _skip(found, record.image_id, *file)
            return None
        files.append(file)
    return ReadySample(item, record.bucket, record.member, record.mask, tuple(files))


def load_samples(samples: Sequence[ReadySample], jsonl: Path, derived: Path, ledger: Ledger) -> list[ReadySample]:
    """Return loaded samples, to be packed from their files.

    Raises:
        ImagemillError: if a record or a file has been changed since the packing was planned.
    """
    ids = [sample.image_id for sample in samples if not sample.files]
    if not ids:
        return list(samples)
    lines, masks = read_recorded(jsonl).lines, usual_masks()
    rows = [_rows_of(NpyStore(derived / spec.folder, spec), ids, ledger) for spec in embedding_specs()]
    with SpanReader() as reader:
        found = [image_id for image_id in ids if image_id in lines]
        raw = dict(zip(found, reader.read_together([lines[image_id] for image_id in found]), strict=True))

    def load(sample: ReadySample) -> ReadySample:
        image_id = sample.image_id
        files = tuple([of_kind.get(image_id) for of_kind in rows])
        if None not in files:
            record, mask = _packed(raw.get(image_id, b""), masks)
            loaded = msgspec.structs.replace(sample, record=record, mask=mask, files=files)
            if digest_of_files(loaded) == sample.digest:
                return loaded
        raise ImagemillError(
            f"the record of {image_id}, or a file of it, was changed while shards were packed",
            where=jsonl,
            do="run the same command again",
        )

    return [sample if sample.files else load(sample) for sample in samples]


def _rows_of(store: NpyStore, ids: Sequence[str], ledger: Ledger) -> dict[str, FileRow]:
    """Return the row of each image's file: if it has several because its file was replaced, that of the present one."""
    rows = list(ledger.file_rows(store.spec.kind, ids))
    found = {row.image_id: row for row in rows}
    if len(found) < len(rows):
        present = store.signatures(found)
        found = {row.image_id: row for row in rows if present.get(row.image_id) == row.stat}
    return found


def _packed(raw: bytes, masks: Mapping[bytes, tuple[int, ...]]) -> tuple[bytes, tuple[int, ...]]:
    """Return the json member and the mask of a record, from its line without ending; empty if it is not one record."""
    found = decode_canonical(raw + b"\n", DECODER)
    if len(found) == 1 and not isinstance(record := found[0], bytes):
        mask = bytes(record.t5_attention_mask)
        return encode_sorted(record), masks.get(mask) or tuple(msgspec.json.decode(mask))
    value = parse_record(raw) or {}
    return encode_sorted(value), tuple(value.get("t5_attention_mask", ()))


def _unloaded(sample: ReadySample, kinds: Sequence[KindFiles], shared: dict[Any, Any]) -> ReadySample:
    """Return a sample without record, mask and files, if the ledger has the rows of its files. `shared`: see `_light`."""
    files = sample.files
    if not files or not all(kind.unchanged(sample.image_id) is file for kind, file in zip(kinds, files, strict=True)):
        return sample
    models = [(signature_bytes(file.stat), file.model_key) for file in files]
    return _light(sample.image_id, sample.bucket, digest_of_files(sample), models, shared)


def _light(
    image_id: str, bucket: str, digest: str, files: Sequence[tuple[int, str]], shared: dict[Any, Any]
) -> ReadySample:
    """Return a sample that is not loaded.

    `files`: size in bytes and model key of each. `shared`: values of other samples, of which equal ones are in memory once.
    """
    keys = tuple([model_key for _, model_key in files])
    size = sum([size for size, _ in files])
    return ReadySample(
        image_id, bucket, digest=digest, models=shared.setdefault(keys, keys), size=shared.setdefault(size, size)
    )


def digest_of_files(sample: ReadySample) -> str:
    """Return the digest of a sample from its record and its files, see `sample_digest`."""
    return sample_digest(sample.record, ((file.kind, file.content) for file in sample.files))


def _left_out(
    ledger: Ledger, excluded: Mapping[str, str] | None, allow_preview: bool
) -> dict[str, tuple[str, str, str]]:
    """Return image id → (reason, detail, remedy) of the samples excluded by configuration, caption state or withdrawal."""
    left_out = dict.fromkeys(() if allow_preview else ledger.preview_captions(), _PREVIEW)
    left_out |= dict.fromkeys(ledger.outdated_captions(), _OUTDATED)
    left_out |= {i: ("near_duplicate", detail, _KEEP_DUPLICATE) for i, detail in (excluded or {}).items()}
    # Withdrawal is merged last, so that it takes precedence over other reasons; its remedy contains the id.
    return left_out | {
        i: ("withdrawn", _TAKEN_OUT, f"imagemill withdraw --restore {i}") for i in ledger.ids("withdrawn")
    }


def progress_lines(every: int) -> Callable[[Readiness], None]:
    """Return a callback that prints one line per `every` ready records.

    Spec: docs/spec/shards.md#progress
    """

    def print_counts(found: Readiness) -> None:
        if len(found.ready) % every == 0:
            counts = f"total_records={found.total_records} ready_records={len(found.ready)}"
            print(f"{counts} skipped_incomplete={found.skipped_incomplete}", flush=True)

    return print_counts


def _latest_records(jsonl: Path, found: Readiness, tokens: int) -> dict[str, PackingRecord | Violation]:
    """Return the last record of each id, or the violation found in it, in file order.

    Lines without an id are keyed by their place in the file. All other records are counted as incomplete.
    """
    # Ordered by the lines that count: a later record of the same id is removed and inserted again.
    latest: dict[str, PackingRecord | Violation] = {}
    lines: dict[str, int] = {}
    for number, item, record in _records(jsonl, found, tokens):
        found.total_records += 1
        if record is None:
            continue
        if item in latest:
            del latest[item]
            detail = f"{item} again in line {number}"
            _skip(found, f"{jsonl.name}:{lines[item]}", "duplicate_id", detail, "keep one of them")
        latest[item], lines[item] = record, number
    return latest


def _with_files(
    known: Mapping[str, KnownSample], kinds: Sequence[KindFiles], shared: dict[Any, Any]
) -> dict[str, ReadySample]:
    """Return those of these known samples whose files are the ones of their rows."""
    if not known:
        return {}
    models = [kind.models(known.keys()) for kind in kinds]
    found = {}
    for image_id, sample in known.items():
        files = [of_kind.get(image_id) for of_kind in models]
        if None not in files:
            found[image_id] = _light(image_id, sample.bucket, sample.digest, files, shared)  # type: ignore[arg-type]
    return found


def _read(span: Span, reader: SpanReader, found: Readiness, tokens: int) -> PackingRecord | Violation | None:
    """Return the record at a position, or the violation found in it; None if there is no JSON object, which is counted."""
    return _verdict(span.path, span.number, reader.read(span), found, tokens)[1]


def _lines(
    jsonl: Path, found: Readiness, tokens: int, *, known: bool, loaded: bool
) -> Iterator[tuple[str, PackingRecord | Violation | None]]:
    """Return the last record of each id, or the violation found in it, in file order; None in its place if samples are `known`.

    Unless samples are to be loaded, the file consists of plain records with different ids.
    """
    if loaded and not known:
        return iter(_latest_records(jsonl, found, tokens).items())
    lines = read_recorded(jsonl).lines
    found.total_records = len(lines)
    if known:
        return ((image_id, None) for image_id in lines)
    # The ids of the index, so that each is in memory once.
    records = zip(lines, _records(jsonl, found, tokens), strict=False)
    return ((known_id if known_id == item else item, record) for known_id, (_, item, record) in records if record)


def _records(jsonl: Path, found: Readiness, tokens: int) -> Iterator[tuple[int, str, PackingRecord | Violation | None]]:
    """Yield line number, id and record of each line that is not blank; the record is None if the line is not a JSON object."""
    masks = usual_masks(tokens)
    for number, line in enumerate(read_typed(jsonl, DECODER), start=1):
        record = _respelled(line) if isinstance(line, bytes) else line
        if record is not None and is_plain(record, masks):
            mask = masks[bytes(record.t5_attention_mask)]
            caption = fingerprint(record.caption.encode())
            sizes = record.height, record.width
            yield (
                number,
                record.image_id,
                PackingRecord(record.image_id, record.aspect_bucket, mask, *sizes, caption, encode_sorted(record)),
            )
        elif (raw := line if isinstance(line, bytes) else encode_line(line)).strip():
            yield number, *_verdict(jsonl, number, raw, found, tokens)


def _respelled(line: bytes) -> Stage2Record | None:
    """Return the record of a line that is spelled otherwise than this program does; None if it has other fields or types.

    Its mask has no white space, so that `is_plain` finds a usual one.
    """
    try:
        record = DECODER.decode(line)
    except NOT_JSON:
        return None
    mask = bytes(record.t5_attention_mask).translate(None, b" \t\r\n")
    return msgspec.structs.replace(record, t5_attention_mask=msgspec.Raw(mask))


def _verdict(
    jsonl: Path, number: int, raw: bytes, found: Readiness, tokens: int
) -> tuple[str, PackingRecord | Violation | None]:
    place, line = f"{jsonl.name}:{number}", parse_line(number, raw)
    if line.value is None:
        _skip(found, place, "malformed", line.problem or "", "repair or remove the line")
        if found.skipped_incomplete <= _WARNINGS:
            _log.warning("%s is skipped: %s", place, line.problem)
        return place, None
    image_id = line.value.get("image_id")
    item = image_id if isinstance(image_id, str) and image_id else place
    if wrong := _stage1_problem(line.value) or next(iter(violations(line.value, tokens)), None):
        return item, wrong
    bucket, mask, height, width, caption = (line.value[name] for name in _PACKED)
    content = fingerprint(caption.encode())
    return item, PackingRecord(item, bucket, tuple(mask), height, width, content, encode_sorted(line.value))


def _stage1_problem(record: Record) -> Violation | None:
    """Return a violation for an unmigrated Stage 1 record, which needs a migration rather than one missing field."""
    unmigrated = "image_path" in record and not {"image_id", "format_version"} & record.keys()
    if unmigrated or INLINE_VECTOR in record:
        message = "a Stage 1 record, not migrated yet"
        return Violation("format_version", "stage1", message, "run `imagemill run`: it migrates them")
    return None


def _skip(found: Readiness, item: str, reason: str, detail: str, remedy: str) -> None:
    found.skipped_incomplete += 1
    outcome = "failed" if reason == READ_ERROR else "refused"
    found.problems.append(Problem(item, ASSET, outcome, reason, detail, remedy))
