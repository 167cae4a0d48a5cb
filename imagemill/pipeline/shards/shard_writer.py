"""Atomic writing of a planned set of shards: in a temporary folder, then published in one step.

A reader sees either the complete old set or the complete new one. Appending does the same; tars that are kept are
hard-linked.

Which samples are packed, and why, is decided in shard_plan.py. The bytes of a tar are written in formats/tar.py,
Energon's index in formats/energon.py.

Spec: docs/spec/shards.md#updating-a-set
"""

import functools
import itertools
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from imagemill.domain.embedding_specs import embedding_specs
from imagemill.domain.ids import member_key
from imagemill.errors import disk_full_reported
from imagemill.formats.energon import is_energon, write_energon
from imagemill.formats.jsonl import write_jsonl
from imagemill.formats.manifest import write_json
from imagemill.formats.npy import npy_header, split_npy
from imagemill.formats.tar import DamagedFile, IndexEntry, KnownFile, Sample, StoredSample, read_known, write_shard
from imagemill.fs.atomic import sync_folder, temporary_path
from imagemill.fs.fingerprints import RunningFingerprint, fingerprint_file, signature_bytes
from imagemill.fs.swap import remove_folder, replace_folder
from imagemill.pipeline.shards.conflicts import stays
from imagemill.pipeline.shards.readiness import ReadySample
from imagemill.pipeline.shards.rotten_files import FileKey, RottenFiles, find_rotten, without
from imagemill.pipeline.shards.shard_manifest import (
    FORMAT,
    CropStatistics,
    Manifest,
    ModelEntry,
    SetStatistics,
    ShardEntry,
    document_of,
    empty_caption_name,
    is_empty_caption,
    latent_size,
    sealed,
)
from imagemill.pipeline.shards.shard_plan import BucketPlan, PackPlan, digest_of
from imagemill.pipeline.shards.shard_sets import (
    INDEX,
    JSON_MEMBER,
    MANIFEST,
    MASK_MEMBER,
    TOMBSTONES,
    IndexLine,
    bucket_folder,
    entries_by_shard,
    read_index,
    read_manifest,
    set_members,
    shard_name,
)
from imagemill.pipeline.shards.shard_statistics import crop_statistics, measures_of, statistics_of
from imagemill.store.provenance import UNKNOWN, UNKNOWN_PREVIEW, ModelIdentity, empty_caption_file

# Files of a set besides its tars.
OURS = {INDEX, TOMBSTONES, MANIFEST}


@dataclass(slots=True)
class BucketResult:
    """The outcome for one bucket.

    `samples`, `shards`, `bytes`: of its whole set. `new_samples`, `new_shards`: written by this run. `rotten`: npy
    files that were not packed because their bytes differ from the recorded ones.
    """

    bucket: str
    status: Literal["written", "unchanged", "removed", "empty"]
    new_samples: int = 0
    new_shards: int = 0
    tombstones: int = 0
    samples: int = 0
    shards: int = 0
    bytes: int = 0
    rotten: RottenFiles = field(default_factory=RottenFiles)


def write_bucket(
    shard_set: PackPlan,
    plan: BucketPlan,
    derived: Path,
    identities: Mapping[str, ModelIdentity],
    *,
    on_sample: Callable[[int], None] = lambda size: None,
) -> BucketResult:
    """Write one bucket's set to a temporary folder and publish it in one step. Call `refuse_conflicts` first.

    A damaged file is never packed. Its recorded bytes are taken from a tar that contains them, else its sample is left
    out.

    Args:
        shard_set: the plans of the run.
        plan: the bucket's plan.
        derived: parent of the npy folders.
        identities: recorded model of each kind.
        on_sample: called with each sample's size in bytes, from several threads.

    Raises:
        DiskFull: if the disk is full; the old set stays in place.
    """
    folder = bucket_folder(shard_set.output, plan.bucket)
    manifest = read_manifest(folder)
    if manifest and stays(shard_set, plan):
        return _result(plan, "unchanged", manifest)
    if not plan.live:
        return _remove(folder, plan)
    if manifest is None and shard_set.existing == "withdraw":
        return BucketResult(plan.bucket, "empty")
    writer = _SetWriter(shard_set, derived, identities, on_sample)
    try:
        return writer.publish(plan)
    except DamagedFile:
        rotten = find_rotten(plan, derived, shard_set.output)
    rest = without(plan, rotten.lost)
    if rest.live:
        writer.copies = rotten.copies
        result = writer.publish(rest)
    else:  # an existing set may contain the last good bytes
        result = _result(plan, "unchanged", manifest) if manifest else BucketResult(plan.bucket, "empty")
    result.rotten = rotten
    return result


def _result(plan: BucketPlan, status: Literal["written", "unchanged"], manifest: Manifest) -> BucketResult:
    new = (plan.samples, len(plan.shards)) if status == "written" else (0, 0)
    return BucketResult(
        plan.bucket, status, *new, manifest.tombstones, manifest.samples, len(manifest.shards), manifest.bytes
    )


def _discard(folder: Path) -> None:
    """Remove a temporary folder, which another command may be removing or may have removed."""
    with suppress(OSError):
        remove_folder(folder)


def _remove(folder: Path, plan: BucketPlan) -> BucketResult:
    """Remove the set of a bucket without samples, in one step."""
    if not folder.is_dir():
        return BucketResult(plan.bucket, "empty")
    staging = temporary_path(folder.parent)
    staging.mkdir()
    _carry_foreign(folder, staging)
    if any(staging.iterdir()):
        replace_folder(staging, folder)
    else:
        staging.rmdir()
        folder.rename(staging)
        sync_folder(folder.parent)
    _discard(staging)
    return BucketResult(plan.bucket, "removed")


def _carry_foreign(folder: Path, staging: Path) -> None:
    """Link foreign files and folders into the new set; tars that are not in the set's manifest are dropped."""
    for path in folder.iterdir() if folder.is_dir() else ():
        if path.name in OURS or path.suffix == ".tar" or is_energon(path.name) or is_empty_caption(path.name):
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.copytree(path, staging / path.name, symlinks=True, copy_function=_link)
        else:
            _link(path, staging / path.name)


def _link(source: str | Path, target: str | Path) -> None:
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:  # a file system without hard links
        shutil.copy2(source, target, follow_symlinks=False)


class _Written(NamedTuple):
    """One new tar. `entry`: its entry in the manifest."""

    entries: list[IndexEntry]
    lines: list[IndexLine]
    entry: ShardEntry


@dataclass(slots=True)
class _SetWriter:
    """Writer of one run's sets. `copies`: samples that contain the recorded bytes of damaged files."""

    shard_set: PackPlan
    derived: Path
    identities: Mapping[str, ModelIdentity]
    on_sample: Callable[[int], None]
    copies: Mapping[FileKey, StoredSample] = field(default_factory=dict)

    def publish(self, plan: BucketPlan) -> BucketResult:
        """Write one set and publish it. Raises DamagedFile, in which case the old set stays in place."""
        folder = bucket_folder(self.shard_set.output, plan.bucket)
        staging = temporary_path(self.shard_set.output)
        try:
            with disk_full_reported(folder):
                staging.mkdir(parents=True)
                _carry_foreign(folder, staging)
                manifest = self._write_set(staging, folder, plan)
                replace_folder(staging, folder)
        finally:
            _discard(staging)
        return _result(plan, "written", manifest)

    def _write_set(self, folder: Path, old: Path, plan: BucketPlan) -> Manifest:
        """Write all files of a set: kept tars, new tars, index, tombstones, and the manifest last."""
        before = read_manifest(old) if plan.overlay else None
        kept = before.shards if before else []
        for shard in kept:
            _link(old / shard.name, folder / shard.name)
        first = 1 + max((int(shard.name[len("shard-") : -len(".tar")]) for shard in kept), default=-1)
        paths = (folder / shard_name(number) for number in itertools.count(first))
        with ThreadPoolExecutor(self.shard_set.workers, "pack") as pool:
            written = list(pool.map(self._write_one, paths, plan.shards))
        earlier = read_index(old) if before else []
        index = [*earlier, *(line for shard in written for line in shard.lines)]
        write_jsonl(folder / INDEX, index)
        tombstones = plan.overlay.tombstones if plan.overlay else ()
        if tombstones:
            write_jsonl(folder / TOMBSTONES, tombstones)
        dead = {tombstone.place for tombstone in tombstones}
        shards = [*entries_by_shard(kept, earlier), *((shard.entry.name, shard.entries) for shard in written)]
        write_energon(folder, shards, bucket=plan.bucket, dead=dead, earlier=old if before else None)
        # A withdrawal keeps samples whose model may have been replaced since: the earlier manifest describes their
        # tars.
        inherited = before if self.shard_set.existing == "withdraw" else None
        provenance = inherited.provenance if inherited else _provenance(plan, self.identities, before)
        empty = dict(_write_empty_captions(self.shard_set.empty_captions, old, folder, provenance))
        live = [line for line in index if line.place not in dead]
        crop = crop_statistics(live, plan.bucket, latent_size(provenance))
        manifest = Manifest(
            format=FORMAT,
            bucket=plan.bucket,
            digest=plan.digest,
            samples=plan.live,
            tombstones=len(tombstones),
            appended=before is not None,
            members=inherited.members if inherited else set_members(),
            shards=[*kept, *(shard.entry for shard in written)],
            empty_captions=empty,
            statistics=msgspec.convert(statistics_of(live), SetStatistics),
            crop=msgspec.convert(crop, CropStatistics | None),
            parameters=plan.parameters,
            provenance=provenance,
        )
        document = document_of(manifest)
        # A digest would make the unverified provenance of an earlier release look verified.
        unproven = inherited is not None and not inherited.sealed
        write_json(folder / MANIFEST, document if unproven else sealed(document))
        return manifest

    def _write_one(self, path: Path, samples: Sequence[ReadySample]) -> _Written:
        checksum = RunningFingerprint()
        entries = write_shard(path, self._members(samples), checksum=checksum)
        lines = [
            IndexLine(
                sample.image_id, entry.key, path.name, entry.offset, entry.size, digest_of(sample),
                *measures_of(sample.record, sample.mask),
            )
            for sample, entry in zip(samples, entries, strict=True)
        ]  # fmt: skip
        return _Written(entries, lines, ShardEntry(path.name, len(samples), path.stat().st_size, str(checksum)))

    def _members(self, samples: Sequence[ReadySample]) -> Iterator[Sample]:
        """Yield the members of each sample: files by their recorded bytes, or from `copies` if the file is damaged."""
        kinds = [(spec, f"{self.derived / spec.folder}{os.sep}") for spec in embedding_specs()]
        for sample in samples:
            name = f"{sample.image_id}.npy"
            files: list[tuple[str, bytes | KnownFile]] = []
            for (spec, folder), file in zip(kinds, sample.files, strict=True):
                known = KnownFile(folder + name, file.stat, file.content)
                copy = self.copies.get((file.kind, file.image_id))
                data = copy.file(spec, file.content) if copy else None
                if spec.parts:
                    files.extend(split_npy(read_known(known) if data is None else data, spec))
                else:
                    files.append((spec.member, known if data is None else data))
            members = [(JSON_MEMBER, sample.record), *files, (MASK_MEMBER, mask_npy(sample.mask))]
            yield member_key(sample.image_id), members
            self.on_sample(sample_bytes(sample))


def sample_bytes(sample: ReadySample) -> int:
    """Return the bytes that a sample adds to a tar, without headers."""
    return sum([signature_bytes(file.stat) for file in sample.files]) + len(sample.record)


@functools.lru_cache(maxsize=1024)
def mask_npy(mask: tuple[int, ...]) -> bytes:
    """Return the mask as an npy file of dtype uint8, shape (77,).

    Spec: docs/spec/shards.md#members
    """
    return npy_header((len(mask),), "uint8") + bytes(mask)


def _write_empty_captions(
    made: Path | None, old: Path, folder: Path, provenance: Mapping[str, ModelEntry]
) -> Iterator[tuple[str, str]]:
    """Put the state of the empty caption of each text kind into a set's folder; yield kind and fingerprint.

    `made`: folder of the states. One that is missing is taken from the set that is being replaced, if the same model made it.
    """
    before = read_manifest(old)
    for kind, entry in provenance.items():
        name, known = empty_caption_name(kind), before.empty_captions.get(kind) if before else None
        new = made / empty_caption_file(kind, entry.key) if made and entry.key else None
        kept = old / name if before and known and before.provenance[kind].key == entry.key else None
        with suppress(FileNotFoundError):
            source = new if new and new.is_file() else kept
            if source is None or (content := fingerprint_file(source)) != (known if source == kept else content):
                continue
            _link(source, folder / name)
            yield kind, content


def _provenance(
    plan: BucketPlan, identities: Mapping[str, ModelIdentity], before: Manifest | None
) -> dict[str, ModelEntry]:
    """Return the provenance by kind; `unknown_maker` counts samples with an adopted file, including those in earlier tars."""
    by_kind = {}
    for n, spec in enumerate(embedding_specs()):
        keys = [sample.files[n].model_key for shard in plan.shards for sample in shard]
        earlier = before.provenance.get(spec.kind, ModelEntry()) if before else ModelEntry()
        unknown = earlier.unknown_maker + keys.count(UNKNOWN) + keys.count(UNKNOWN_PREVIEW)
        entry = ModelEntry(unknown_maker=unknown, declared_as=spec.declared_as or msgspec.UNSET)
        if made := identities.get(spec.kind):
            named = {name: getattr(made, name) for name in ("model", "revision", "key", "preview", "facts")}
            entry = msgspec.structs.replace(entry, **named, libraries=made.libraries or msgspec.UNSET)
        if earlier.preview or UNKNOWN_PREVIEW in keys:
            entry = msgspec.structs.replace(entry, preview=True)
        by_kind[spec.kind] = entry
    return by_kind
