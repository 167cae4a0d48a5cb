"""Reconstruction of a damaged or lost ledger from the remaining data of the data root.

    settings, withdrawals   second copy beside the data, else the models of the shard manifests and withdrawn tombstones
    images                  files in approved/ with a record: bytes read, size compared with the record
    npy files               every byte read; if the bytes are packed, the model is that of the manifest

Rows that can still be read from a damaged ledger are not used, because nothing shows which of them are correct. Captions, masks
and everything else that a run recomputes without a model are left to the next run.
"""

import os
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from imagemill.domain.buckets import BUCKETS
from imagemill.domain.embedding_specs import EmbeddingSpec, embedding_specs
from imagemill.domain.inputs import IGNORE
from imagemill.domain.layout import DataRoot
from imagemill.domain.stage2_records import Record
from imagemill.errors import ImagemillError, InvalidNpy, Refused
from imagemill.formats.images import header_size, read_facts
from imagemill.formats.jsonl import encode_sorted
from imagemill.formats.npy import NpyStore
from imagemill.fs.atomic import temporary_path
from imagemill.fs.fingerprints import fingerprint, fingerprint_file
from imagemill.fs.folders import is_folder, on_disk
from imagemill.fs.owners import living
from imagemill.inputs.scan import scan_approved
from imagemill.inputs.sources import SourceFile
from imagemill.pipeline.shards.shard_sets import (
    bucket_folder,
    read_index,
    read_manifest,
    read_tombstones,
    sample_digest,
)
from imagemill.pipeline.stage2.merge import STAGE1, stage1_backup
from imagemill.pipeline.stage2.record_index import Recorded, read_recorded, record_at
from imagemill.store.inputs import COLOR, PixelRule, first_inputs, recorded_inputs
from imagemill.store.ledger import BEGUN, SUPERSEDED, FileRow, Ledger, LedgerDamaged, SourceRow
from imagemill.store.ledger.schema import wal_files
from imagemill.store.locations import nothing_has_run
from imagemill.store.provenance import ModelIdentity, model_key_of_adopted, read_identity
from imagemill.store.second_copy import newest, record_inputs_of_copy, refresh
from imagemill.text.strict_json import decode_json


@dataclass(slots=True)
class Packed:
    """All samples in shards. `model_keys`: digest of a sample → keys of the models that made the files of its set, by kind."""

    model_keys: dict[str, Mapping[str, str]] = field(default_factory=dict)
    identities: dict[str, ModelIdentity] = field(default_factory=dict)
    withdrawn: set[str] = field(default_factory=set)
    unreadable: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Repair:
    """The contents of a rebuilt ledger.

    Attributes:
        damage: description of the damage; None if the ledger is intact.
        copied_at: time of the second copy, None without one.
        invalid: invalid npy files with the reason; the next run makes them again.
    """

    damage: str | None
    copied_at: str | None = None
    settings: dict[str, str] = field(default_factory=dict)
    withdrawn: dict[str, str] = field(default_factory=dict)
    sources: list[SourceRow] = field(default_factory=list)
    files: list[FileRow] = field(default_factory=list)
    invalid: dict[str, str] = field(default_factory=dict)
    unreadable_sets: list[str] = field(default_factory=list)

    def models(self) -> dict[str, str]:
        """Return the recorded model of each kind."""
        found = {name.partition(".")[2]: value for name, value in self.settings.items() if name.startswith("identity.")}
        return {kind: msgspec.json.decode(value, type=ModelIdentity).model for kind, value in found.items()}

    def regenerated(self) -> dict[str, str | None]:
        """Return the kinds whose files are all being replaced, with the key of the new model if it is recorded."""
        kinds = [name.partition(".")[2] for name in self.settings if name.startswith("regenerating.")]
        identities = {kind: self.settings.get(f"identity.{kind}") for kind in kinds}
        return {kind: one and msgspec.json.decode(one, type=ModelIdentity).key for kind, one in identities.items()}

    def model_key_counts(self) -> Counter[tuple[str, str]]:
        """Return how many files of each kind each model made."""
        return Counter((row.kind, row.model_key) for row in self.files)


def plan_repair(root: DataRoot) -> Repair:
    """Read all data that a new ledger can be built from; write nothing."""
    damage = damage_of(root)
    if damage is None:
        return Repair(None)
    found, packed = newest(root), read_packed(root)
    copy = found.copy if found else None
    if not (root.ledger.exists() or copy or packed.model_keys or root.derived.is_dir()):
        raise nothing_has_run(root)
    repair = Repair(
        damage, f"{found.written_at:%Y-%m-%d %H:%M:%S} UTC" if found else None, unreadable_sets=packed.unreadable
    )
    now = datetime.now(UTC).isoformat(timespec="seconds")
    repair.withdrawn = dict.fromkeys(sorted(packed.withdrawn), now) | (copy.withdrawn if copy else {})
    repair.settings = {
        f"identity.{kind}": msgspec.json.encode(identity, order="sorted").decode()
        for kind, identity in packed.identities.items()
    } | (copy.settings if copy else {})
    if stage1_backup(root.stage2_jsonl).is_file():
        repair.settings.setdefault(STAGE1, "migrated")
    _read_files(root, packed, repair)
    return repair


def damage_of(root: DataRoot) -> str | None:
    """Return a description of the ledger's damage, None if every page, table and identity can be read."""
    if not root.ledger.exists():
        return "the ledger does not exist"
    try:
        with Ledger(root.ledger, read_only=True) as ledger:
            problem = ledger.check()
            if problem is None and ledger.setting(BEGUN) is None and root.derived.is_dir():
                problem = "the ledger is empty"
            for spec in embedding_specs():
                read_identity(ledger, spec.kind)
            return problem
    except LedgerDamaged as damaged:
        return damaged.what
    except ImagemillError as error:
        if "recorded model cannot be read" in error.what:
            return error.what
        raise


def read_packed(root: DataRoot) -> Packed:
    """Read samples, models and withdrawals from the shard sets."""
    packed, live = Packed(), set[str]()
    for bucket in BUCKETS:
        folder = bucket_folder(root.shards, bucket)
        manifest = read_manifest(folder)
        if manifest is None:
            continue
        try:
            lines, tombstones = read_index(folder), read_tombstones(folder)
        except ImagemillError:
            packed.unreadable.append(folder.name)
            continue
        model_keys = {}
        for kind, entry in manifest.provenance.items():
            if entry.key and entry.facts is not None:
                identity = ModelIdentity(
                    kind=kind,
                    model=entry.model or "",
                    revision=entry.revision,
                    preview=bool(entry.preview),
                    facts=entry.facts,
                )
                packed.identities.setdefault(kind, identity)
                if not entry.unknown_maker:
                    model_keys[kind] = entry.key
        packed.model_keys.update((line.digest, model_keys) for line in lines)
        dead = {tombstone.place for tombstone in tombstones}
        live |= {line.image_id for line in lines if line.place not in dead}
        packed.withdrawn |= {tombstone.image_id for tombstone in tombstones if tombstone.why == "withdrawn"}
    packed.withdrawn -= live
    return packed


def _read_files(root: DataRoot, packed: Packed, repair: Repair) -> None:
    recorded = read_recorded(root.stage2_jsonl)
    otherwise = first_inputs(root, copied=repair.copied_at is not None)
    inputs = recorded_inputs(repair.settings.get, otherwise)
    # Files count as made in the way that the second copy records.
    rule = PixelRule(inputs.color, inputs.color if COLOR in repair.settings else IGNORE)
    scan = scan_approved(root.approved, inputs, own=root.other_folders) if is_folder(root.approved) else None
    stores = [NpyStore(root.derived / spec.folder, _in_force(spec, repair)) for spec in embedding_specs()]
    listings = {store: store.listing() for store in stores}
    regenerated = repair.regenerated()
    for image_id, span in recorded.lines.items():
        record = record_at(span)
        source = _source(root, scan.sources.get(image_id) if scan else None, record)
        if source:
            repair.sources.append(source)
        found = [
            row for store in stores if image_id in listings[store]
            for row in _file(store, image_id, record, source, recorded, repair, rule)
        ]  # fmt: skip
        repair.files.extend(_with_makers(record, found, packed, regenerated))
    # Files without a record are left to the next run, which adopts or replaces them.
    for store, listing in listings.items():
        if others := sum(1 for image_id in listing if image_id not in recorded.lines):
            repair.invalid[f"{store.spec.folder}: {others} files without a record"] = "looked at by the next run"


def _in_force(spec: EmbeddingSpec, repair: Repair) -> EmbeddingSpec:
    """Return a kind with the contract of its recorded model, which determines the shape of its files."""
    identity = repair.settings.get(f"identity.{spec.kind}")
    return spec.recorded(decode_json(identity.encode(), ModelIdentity).facts) if identity else spec


def _source(root: DataRoot, source: SourceFile | None, record: Record) -> SourceRow | None:
    """Return the row of an image whose size equals its record's; None for one that the next run has to open."""
    if source is None:
        return None
    path = root.approved / source.file_name
    try:
        with on_disk(path) as copy:
            size, content, facts = header_size(copy), fingerprint_file(copy), read_facts(copy)
    except (Refused, OSError):
        return None
    if size != (record.get("height"), record.get("width")):
        return None
    return SourceRow(source.image_id, source.file_name, source.stat, content, *size, *facts.columns)


def _file(
    store: NpyStore,
    image_id: str,
    record: Record,
    source: SourceRow | None,
    recorded: Recorded,
    repair: Repair,
    rule: PixelRule,
) -> Iterator[FileRow]:
    spec, height, width = store.spec, record.get("height"), record.get("width")
    if not isinstance(height, int) or not isinstance(width, int):
        return
    try:
        signature, content = store.stat(image_id), store.check(image_id, height, width)
    except (InvalidNpy, OSError) as error:
        repair.invalid[f"{spec.folder}/{image_id}.npy"] = getattr(error, "what", str(error))
        return
    made_from = recorded.captions.get(image_id) if spec.source == "caption" else source and rule.made_from(None, source)
    yield FileRow(spec.kind, image_id, signature, made_from, content, model_key_of_adopted(store, image_id))


def _with_makers(
    record: Record, rows: list[FileRow], packed: Packed, regenerated: Mapping[str, str | None]
) -> Iterator[FileRow]:
    """Yield rows with their models: files that are packed byte for byte were made by the models of their set's manifest.

    Args:
        record: the image's record.
        rows: of its files.
        packed: samples in shards.
        regenerated: kinds whose files are all being replaced, with the key of the new model; all others are superseded.
    """
    digest = sample_digest(encode_sorted(record), ((row.kind, row.content) for row in rows))
    model_keys = packed.model_keys.get(digest, {})
    for row in rows:
        model_key = model_keys.get(row.kind, row.model_key)
        if row.kind in regenerated and model_key != regenerated[row.kind]:
            yield msgspec.structs.replace(row, model_key=SUPERSEDED, source=None)
        else:
            yield msgspec.structs.replace(row, model_key=model_key)


def apply_repair(root: DataRoot, repair: Repair) -> Path | None:
    """Replace the damaged ledger by a new one.

    Returns:
        folder in quarantine with the damaged files, None if there were none.
    """
    if others := living(root.owners):
        raise ImagemillError(
            f"another process works on this data root: {others[0].pid} on {others[0].host}",
            where=root.path,
            do="end it, then run the same command again",
        )
    root.state.mkdir(parents=True, exist_ok=True)
    fresh = temporary_path(root.state)
    try:
        with Ledger(fresh) as ledger, ledger.transaction():
            ledger.record_setting(BEGUN, "1")
            for name, value in repair.settings.items():
                ledger.record_setting(name, value)
            record_inputs_of_copy(root, ledger, repair.settings, copied=repair.copied_at is not None)
            ledger.record_withdrawals(repair.withdrawn)
            ledger.record_sources(repair.sources, seen=False)
            ledger.record_files(repair.files, made=False)
        kept = _quarantine(root)
        os.replace(fresh, root.ledger)
    finally:
        for path in wal_files(fresh):
            path.unlink(missing_ok=True)
        fresh.with_name(f".{fresh.name}.lock").unlink(missing_ok=True)
    with Ledger(root.ledger) as ledger:
        refresh(root, ledger)
    return kept


def _quarantine(root: DataRoot) -> Path | None:
    damaged = wal_files(root.ledger)
    if not damaged:
        return None
    folder = root.quarantine / f"ledger-{datetime.now(UTC):%Y%m%dT%H%M%S}-{fingerprint(os.urandom(8))[-6:]}"
    folder.mkdir(parents=True)
    for path in damaged:
        os.replace(path, folder / path.name)
    return folder
