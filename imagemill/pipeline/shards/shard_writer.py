"""Atomic writing of a planned set of shards: in a temporary folder, then published in one step.

A reader sees either the complete old set or the complete new one. Appending does the same; tars that are kept are
hard-linked.

Which samples are packed, and why, is decided in shard_plan.py. The bytes of a tar are written in formats/tar.py,
Energon's index in formats/energon.py.

Spec: docs/spec/shards.md#updating-a-set
"""

import functools
import os
import shutil
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

from imagemill.domain.embedding_specs import embedding_specs
from imagemill.domain.ids import member_key
from imagemill.errors import ImagemillError, disk_full_reported
from imagemill.formats.energon import Earlier, is_energon, write_energon
from imagemill.formats.jsonl import write_jsonl
from imagemill.formats.manifest import write_json
from imagemill.formats.npy import npy_header, split_npy
from imagemill.formats.tar import (
    DamagedFile,
    IndexEntry,
    KnownFile,
    Sample,
    StoredSample,
    read_known,
    read_sample,
    write_shard,
)
from imagemill.fs.atomic import sync_folder, temporary_path
from imagemill.fs.fingerprints import RunningFingerprint, fingerprint_file, signature_bytes
from imagemill.fs.swap import remove_folder, replace_folder
from imagemill.pipeline.shards.conflicts import stays
from imagemill.pipeline.shards.readiness import ReadySample
from imagemill.pipeline.shards.rotten_files import FileKey, RottenFiles, find_rotten
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
from imagemill.pipeline.shards.shard_plan import BucketPlan, PackPlan
from imagemill.pipeline.shards.shard_sets import (
    INDEX,
    JSON_MEMBER,
    MANIFEST,
    MASK_MEMBER,
    TOMBSTONES,
    IndexLine,
    bucket_folder,
    read_manifest,
    set_members,
    shard_name,
    sharing,
)
from imagemill.pipeline.shards.shard_statistics import (
    Measures,
    crop_statistics,
    measures_of,
    repeats_in,
    statistics_of,
    summed_repeats,
)
from imagemill.pipeline.shards.update import PlannedSample, SetChange, TarPlan, digest_of
from imagemill.pipeline.turns import Turns
from imagemill.store.provenance import UNKNOWN, UNKNOWN_PREVIEW, ModelIdentity, empty_caption_file

# Files of a set besides its tars.
OURS = {INDEX, TOMBSTONES, MANIFEST}


@dataclass(slots=True)
class BucketResult:
    """The outcome for one bucket.

    Attributes:
        bucket: the bucket.
        status: `written`, `unchanged`, `removed` or `empty`.
        samples: samples of its whole set, as are `shards` and `bytes`.
        shards: tars.
        bytes: size of the tars.
        written_samples: samples in the tars that this run wrote.
        written: names of these tars; the other tars are those of the earlier set.
        written_bytes: their size.
        change: samples that the run added, changed and removed.
        updates: whether a present set was changed.
        scratch: reason for packing an earlier set from scratch, see `SCRATCH`.
        rotten: npy files that were not packed because their bytes differ from the recorded ones.
    """

    bucket: str
    status: Literal["written", "unchanged", "removed", "empty"]
    samples: int = 0
    shards: int = 0
    bytes: int = 0
    written_samples: int = 0
    written: tuple[str, ...] = ()
    written_bytes: int = 0
    change: SetChange = field(default_factory=SetChange)
    updates: bool = False
    scratch: str = ""
    rotten: RottenFiles = field(default_factory=RottenFiles)


class DamagedTar(ImagemillError):
    """A present tar whose samples were to be copied does not have the bytes that the manifest records; `tar` is its name."""

    def __init__(self, path: Path, why: str) -> None:
        self.tar = path.name
        super().__init__(
            "a tar is damaged",
            where=path,
            why=why,
            do="run `imagemill shards --overwrite`, which packs the set again from the npy files",
        )


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
    out. Samples of a damaged tar are packed from their files.

    Args:
        shard_set: the plans of the run.
        plan: the bucket's plan.
        derived: parent of the npy folders.
        identities: recorded model of each kind.
        on_sample: called with each sample's size in bytes, from several threads.

    Raises:
        DiskFull: if the disk is full; the old set stays in place.
        DamagedTar: if a damaged tar is to be copied for a withdrawal, which packs no files.
    """
    folder = bucket_folder(shard_set.output, plan.bucket)
    manifest = read_manifest(folder)
    if manifest and stays(shard_set, plan):
        return _result(plan, "unchanged", manifest)
    if manifest is None and shard_set.existing == "withdraw":
        return BucketResult(plan.bucket, "empty")
    if not plan.total:
        return _remove(folder, plan)
    writer = _SetWriter(shard_set, derived, identities, on_sample)
    while True:
        try:
            return writer.publish(plan)
        except DamagedTar as damage:
            if plan.ready is None:
                raise
            plan = plan.from_files(damage.tar)
        except DamagedFile:
            break
    packed = (sample for tar in plan.shards for sample in shard_set.loaded(tar, derived))
    rotten = find_rotten((each for each in packed if isinstance(each, ReadySample)), derived, shard_set.output)
    rest = plan.without(rotten.lost)
    if rest.total:
        writer.copies = rotten.copies
        result = writer.publish(rest)
    else:  # an existing set may contain the last good bytes
        result = _result(plan, "unchanged", manifest) if manifest else BucketResult(plan.bucket, "empty")
    result.rotten = rotten
    return result


def _result(plan: BucketPlan, status: Literal["written", "unchanged"], manifest: Manifest) -> BucketResult:
    result = BucketResult(plan.bucket, status, manifest.samples, len(manifest.shards), manifest.bytes)
    if status == "written":
        written = [shard for shard, tar in zip(manifest.shards, plan.change.tars, strict=True) if not tar.kept]
        result.written = tuple(shard.name for shard in written)
        result.written_samples, result.written_bytes = plan.samples, sum(shard.bytes for shard in written)
        result.change, result.updates, result.scratch = plan.change, plan.updates, plan.scratch
    return result


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


class _Tar(NamedTuple):
    """One tar of the new set: its samples for the index, its entry in the manifest, and suffixes and places of the members.

    `members`: those of each sample, as IndexEntry has them; none if the tar is linked.
    """

    lines: list[IndexLine]
    entry: ShardEntry
    members: list[tuple[tuple[str, ...], bytes]]


class _Shards(Sequence[tuple[str, list[IndexEntry]]]):
    """Tars with their samples for Energon. The entries of a tar are made at each access, because a set has millions of them."""

    def __init__(self, tars: Sequence[_Tar]) -> None:
        self._tars = tars

    def __len__(self) -> int:
        return len(self._tars)

    def __getitem__(self, number: Any) -> Any:
        lines, entry, members = self._tars[number]
        if not members:
            return entry.name, [line.entry for line in lines]
        samples = zip(lines, members, strict=True)
        return entry.name, [IndexEntry(line.key, line.offset, line.size, *of_sample) for line, of_sample in samples]


@dataclass(slots=True)
class _SetWriter:
    """Writer of one run's sets. `copies`: samples that contain the recorded bytes of damaged files."""

    shard_set: PackPlan
    derived: Path
    identities: Mapping[str, ModelIdentity]
    on_sample: Callable[[int], None]
    copies: Mapping[FileKey, StoredSample] = field(default_factory=dict)
    _shared: dict[Any, Any] = field(default_factory=dict)
    _turns: Turns = field(default_factory=Turns)

    def publish(self, plan: BucketPlan) -> BucketResult:
        """Write one set and publish it. Raises DamagedFile or DamagedTar, in which case the old set stays in place."""
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
        """Write all files of a set: kept tars, new tars, index, and the manifest last."""
        before = read_manifest(old)
        present = {shard.name: shard for shard in before.shards} if before else {}
        moved = {shard_name(number): tar.kept for number, tar in enumerate(plan.change.tars) if tar.kept}
        with ThreadPoolExecutor(self.shard_set.workers, "pack") as pool:
            tars = [
                pool.submit(self._link_one, old / tar.kept, folder / shard_name(number), tar, present[tar.kept])
                if tar.kept
                else pool.submit(self._write_one, folder / shard_name(number), old, tar.samples, present)
                for number, tar in enumerate(plan.change.tars)
            ]
            try:
                written = [tar.result() for tar in tars]
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
        index = [line for tar in written for line in tar.lines]
        write_jsonl(folder / INDEX, index)
        earlier = Earlier(old, moved) if moved else None
        write_energon(folder, _Shards(written), bucket=plan.bucket, earlier=earlier)
        # Only withdrawals are applied without ready samples: the earlier manifest describes the models of the others.
        inherited = before if plan.ready is None else None
        provenance = inherited.provenance if inherited else _provenance(plan, self.identities)
        empty = dict(_write_empty_captions(self.shard_set.empty_captions, old, folder, provenance))
        crop = crop_statistics(index, plan.bucket, latent_size(provenance))
        manifest = Manifest(
            format=FORMAT,
            bucket=plan.bucket,
            digest=plan.digest,
            samples=plan.total,
            tombstones=0,
            appended=not plan.is_from_scratch,
            members=inherited.members if inherited else set_members(),
            shards=[tar.entry for tar in written],
            empty_captions=empty,
            statistics=msgspec.convert(statistics_of(index), SetStatistics),
            crop=msgspec.convert(crop, CropStatistics | None),
            pixels=self.shard_set.colours_of([line.image_id for line in index]),
            repeats=summed_repeats(index),
            images=self.shard_set.images or msgspec.UNSET,
            parameters=plan.parameters,
            provenance=provenance,
        )
        document = document_of(manifest)
        # A digest would make the unverified provenance of an earlier release look verified.
        unproven = inherited is not None and not inherited.sealed
        write_json(folder / MANIFEST, document if unproven else sealed(document))
        return manifest

    def _link_one(self, source: Path, path: Path, tar: TarPlan, entry: ShardEntry) -> _Tar:
        _link(source, path)
        lines = [line for line in tar.samples if isinstance(line, IndexLine)]
        if path.name != tar.kept:
            lines = [msgspec.structs.replace(line, shard=path.name) for line in lines]
        return _Tar(lines, msgspec.structs.replace(entry, name=path.name), [])

    def _write_one(
        self, path: Path, old: Path, planned: Sequence[PlannedSample], present: Mapping[str, ShardEntry]
    ) -> _Tar:
        samples = self.shard_set.loaded(planned, self.derived)
        for name in {sample.shard for sample in samples if isinstance(sample, IndexLine)}:
            _refuse_damaged(old / name, present[name].checksum)
        checksum = RunningFingerprint()
        with closing(self._members(samples, old)) as members:
            entries = write_shard(path, members, checksum=checksum)
        lines = [
            sharing(
                IndexLine(
                    sample.image_id,
                    entry.key,
                    path.name,
                    entry.offset,
                    entry.size,
                    digest_of(sample),
                    *_measures(sample),
                    _repeats(sample),
                ),
                self._shared,
            )
            for sample, entry in zip(samples, entries, strict=True)
        ]
        places = [(entry.suffixes, entry.places) for entry in entries]
        members = [self._shared.setdefault(each, each) for each in places]
        return _Tar(lines, ShardEntry(path.name, len(samples), path.stat().st_size, str(checksum)), members)

    def _members(self, samples: Sequence[PlannedSample], old: Path) -> Generator[Sample, None, None]:
        """Yield the members of each sample, from the present set or from its files; a damaged file's from `copies`."""
        kinds = [(spec, f"{self.derived / spec.folder}{os.sep}") for spec in embedding_specs()]
        for sample in self._turns.over(samples):
            if isinstance(sample, IndexLine):
                yield sample.key, list(read_sample(old / sample.shard, sample.entry).items())
                self.on_sample(sample.size)
                continue
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


def _refuse_damaged(tar: Path, checksum: str) -> None:
    """Raise DamagedTar unless a present tar has its recorded bytes."""
    try:
        found = fingerprint_file(tar)
    except OSError as error:
        raise DamagedTar(tar, str(error)) from error
    if found != checksum:
        raise DamagedTar(tar, "its bytes differ from the checksum in the manifest")


def _measures(sample: PlannedSample) -> Measures:
    if isinstance(sample, IndexLine):
        return Measures(sample.width, sample.height, sample.tokens)
    return measures_of(sample.record, sample.mask)


def _repeats(sample: PlannedSample) -> int | msgspec.UnsetType:
    if isinstance(sample, IndexLine):
        return sample.repeats
    return repeats if (repeats := repeats_in(sample.record)) != 1 else msgspec.UNSET


def sample_bytes(sample: PlannedSample) -> int:
    """Return the bytes that a sample adds to a tar; if it is packed from its files, those of its arrays."""
    if isinstance(sample, IndexLine) or not sample.files:
        return sample.size
    return sum([signature_bytes(file.stat) for file in sample.files])


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


def _provenance(plan: BucketPlan, identities: Mapping[str, ModelIdentity]) -> dict[str, ModelEntry]:
    """Return the provenance by kind; `unknown_maker` counts samples with an adopted file."""
    by_kind = {}
    for n, spec in enumerate(embedding_specs()):
        keys = [sample.model_keys[n] for sample in plan.ready or ()]
        unknown = keys.count(UNKNOWN) + keys.count(UNKNOWN_PREVIEW)
        entry = ModelEntry(unknown_maker=unknown, declared_as=spec.declared_as or msgspec.UNSET)
        if made := identities.get(spec.kind):
            named = {name: getattr(made, name) for name in ("model", "revision", "key", "preview", "facts")}
            entry = msgspec.structs.replace(entry, **named, libraries=made.libraries or msgspec.UNSET)
        if UNKNOWN_PREVIEW in keys:
            entry = msgspec.structs.replace(entry, preview=True)
        by_kind[spec.kind] = entry
    return by_kind
