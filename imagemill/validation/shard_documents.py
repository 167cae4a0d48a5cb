"""Consistency of a set's own documents: index, tombstones and manifest. No tar is opened.

Tars are checked in shards.py, Energon's files in energon_files.py.

Spec: docs/spec/shards.md#index-and-manifest
"""

from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from imagemill.domain.ids import id_of_member_key
from imagemill.errors import ImagemillError
from imagemill.formats.energon import Place, Shard
from imagemill.formats.jsonl import read_jsonl
from imagemill.pipeline.shards.shard_manifest import SEAL, Manifest, decode_manifest, latent_size, seal_is_broken
from imagemill.pipeline.shards.shard_sets import (
    INDEX,
    MANIFEST,
    TOMBSTONES,
    IndexLine,
    Tombstone,
    bucket_folder,
    entries_by_shard,
    read_manifest_document,
    read_tombstones,
    set_digest,
)
from imagemill.pipeline.shards.shard_statistics import crop_statistics, statistics_of, summed_repeats
from imagemill.validation.catalogue import finding
from imagemill.validation.findings import Finding


@dataclass(slots=True)
class Index:
    """The samples of a set by position; `dead`: positions of those that are not live."""

    places: dict[Place, IndexLine] = field(default_factory=dict)
    dead: set[Place] = field(default_factory=set)

    def shards(self, manifest: Manifest) -> list[Shard]:
        """Return every tar of the manifest with its samples in order, as Energon numbers them."""
        return list(entries_by_shard(manifest.shards, sorted(self.places.values(), key=lambda line: line.offset)))


def checked_manifest(folder: Path) -> Generator[Finding, None, Manifest | None]:
    """Yield the findings of the manifest document, then return the manifest; None if it was not written by imagemill.

    A manifest with a wrong digest is returned too, so that the other checks can show the differences.
    """
    file = f"{folder.name}/{MANIFEST}"
    try:
        document = read_manifest_document(folder)
        manifest = decode_manifest(document)
    except ImagemillError as error:
        yield finding("manifest", f"{error.what}: {error.why}" if error.why else error.what, file=file)
        return None
    except msgspec.ValidationError as error:
        yield finding("manifest", f"not a valid manifest: {error}", file=file)
        return None
    if seal_is_broken(document):
        yield finding("manifest_digest", "changed after it was written", file=file, field=SEAL)
    elif not manifest.sealed:
        yield finding("no_manifest_digest", "written by an earlier release, which recorded no digest", file=file)
    return manifest


def documents(folder: Path, manifest: Manifest) -> Generator[Finding, None, Index]:
    """Yield the findings of the documents, including invalid lines and differences from the manifest; return the index."""
    file = f"{folder.name}/{MANIFEST}"
    # Readers use the manifest's bucket, `load_dataset` and people the folder's.
    if folder.name != bucket_folder(folder.parent, manifest.bucket).name:
        yield finding("set_bucket", f"bucket {manifest.bucket}, but the folder is {folder.name}", file=file)
    if not (folder / INDEX).is_file():
        yield finding("index", "no index", file=f"{folder.name}/{INDEX}")
        return Index()
    tombstones = yield from _tombstones(folder, manifest)
    index = Index(dead={tombstone.place for tombstone in tombstones})
    live = yield from _lines(folder, index)
    # A reader numbers samples by line of the index, Energon by position in the tars.
    number = {shard.name: n for n, shard in enumerate(manifest.shards)}
    order = [(number.get(shard, len(number)), offset) for shard, offset in index.places]
    if order != sorted(order):
        yield finding("index_order", "lines are not in the order of their samples", file=f"{folder.name}/{INDEX}")
    for tombstone in tombstones:
        line = index.places.get(tombstone.place)
        if line is None or line.image_id != tombstone.image_id:
            message = f"one for {tombstone.shard} at {tombstone.offset}, where there is no sample with that id"
            yield finding("tombstones", message, file=f"{folder.name}/{TOMBSTONES}", item=tombstone.image_id)
    yield from _counted(file, manifest, live)
    return index


def _tombstones(folder: Path, manifest: Manifest) -> Generator[Finding, None, list[Tombstone]]:
    try:
        tombstones = read_tombstones(folder)
    except ImagemillError as error:
        yield finding("tombstones", str(error.why), file=f"{folder.name}/{TOMBSTONES}")
        return []
    if len(tombstones) != manifest.tombstones:
        message = f"{manifest.tombstones} tombstones recorded, {len(tombstones)} found"
        yield finding("tombstones", message, file=f"{folder.name}/{MANIFEST}")
    return tombstones


def _lines(folder: Path, index: Index) -> Generator[Finding, None, dict[str, IndexLine]]:
    """Fill the index; return the live samples by id."""
    file, live = f"{folder.name}/{INDEX}", dict[str, IndexLine]()
    for line in read_jsonl(folder / INDEX):
        try:
            entry = msgspec.convert(line.value, IndexLine)
        except msgspec.ValidationError as error:
            yield finding("index", line.problem or str(error), file=file, line=line.number)
            continue
        counts = entry.place not in index.dead
        is_duplicate = entry.place in index.places or (counts and entry.image_id in live)
        if is_duplicate or entry.image_id != id_of_member_key(entry.key):
            message = "a sample twice, or of another id"
            yield finding("index", message, file=file, line=line.number, item=entry.image_id)
        index.places[entry.place] = entry
        if counts:
            live[entry.image_id] = entry
    return live


def _counted(file: str, manifest: Manifest, live: Mapping[str, IndexLine]) -> Generator[Finding]:
    """Compare the manifest's counts with the live samples. Sets of earlier releases have no statistics."""
    samples = manifest.samples
    if samples != len(live):
        yield finding("live_samples", f"{samples} samples recorded, {len(live)} live", file=file, field="samples")
    elif manifest.digest != set_digest(entry.digest for entry in live.values()):
        yield finding("live_samples", "of samples other than those of the index", file=file, field="digest")
    statistics = manifest.statistics
    if statistics is not None and msgspec.to_builtins(statistics) != statistics_of(live.values()):
        yield finding("statistics", "not those of the index", file=file, field="statistics")
    if manifest.repeats != summed_repeats(live.values()):
        yield finding("statistics", "not those of the index", file=file, field="repeats")
    if manifest.crop is not None:
        bucket = file.partition("/")[0].removeprefix("bucket_")
        expected = crop_statistics(live.values(), bucket, latent_size(manifest.provenance))
        if msgspec.to_builtins(manifest.crop) != expected:
            yield finding("statistics", "not those of the index", file=file, field="crop")
