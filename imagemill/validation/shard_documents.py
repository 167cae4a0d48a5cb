"""A set's own documents against each other: index, tombstones and manifest. No tar is opened.

Belongs here: what the documents say of the samples and of one another.
Belongs elsewhere: whether the tars hold it (shards.py), energon's files (energon_files.py).
Source: CONTRACTS section 2, "Beside the tars"; issue 5, "index agreement".
"""

from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from imagemill.errors import ImagemillError
from imagemill.formats.energon import Place, Shard
from imagemill.formats.jsonl import read_jsonl
from imagemill.formats.tar import IndexEntry
from imagemill.ids import id_of_member_key
from imagemill.pipeline.shards.shard_sets import (
    INDEX,
    MANIFEST,
    TOMBSTONES,
    IndexLine,
    Tombstone,
    bucket_folder,
    read_tombstones,
    set_digest,
)
from imagemill.pipeline.shards.shard_statistics import statistics_of
from imagemill.validation.catalogue import finding
from imagemill.validation.findings import Finding


@dataclass(slots=True)
class Index:
    """The samples of a set by place; `dead`: places of those that count no more."""

    places: dict[Place, IndexLine] = field(default_factory=dict)
    dead: set[Place] = field(default_factory=set)

    def shards(self, manifest: Mapping[str, Any]) -> list[Shard]:
        """Every tar of the manifest with its samples in order, as energon numbers them."""
        entries: dict[str, list[IndexEntry]] = {shard["name"]: [] for shard in manifest["shards"]}
        for line in sorted(self.places.values(), key=lambda line: line.offset):
            entries.setdefault(line.shard, []).append(IndexEntry(line.key, line.offset, line.size))
        return list(entries.items())


def documents(folder: Path, manifest: Mapping[str, Any]) -> Generator[Finding, None, Index]:
    """The index, after what is wrong with it; lines that are none, and a manifest that says otherwise, are findings."""
    yield from _bucket(folder, manifest)
    if not (folder / INDEX).is_file():
        yield finding("index", "no index", file=f"{folder.name}/{INDEX}")
        return Index()
    tombstones = yield from _tombstones(folder, manifest)
    index = Index(dead={tombstone.place for tombstone in tombstones})
    live = yield from _lines(folder, index)
    yield from _order(folder, manifest, index)
    for place, image_id in ((tombstone.place, tombstone.image_id) for tombstone in tombstones):
        if place not in index.places or index.places[place].image_id != image_id:
            message = f"one for {place[0]} at {place[1]}, where no sample of that id is"
            yield finding("tombstones", message, file=f"{folder.name}/{TOMBSTONES}", item=image_id)
    yield from _counted(folder, manifest, live)
    return index


def _bucket(folder: Path, manifest: Mapping[str, Any]) -> Generator[Finding]:
    """Readers go by the manifest's, `load_dataset` and people by the folder's."""
    bucket = manifest.get("bucket")
    if folder.name != bucket_folder(folder.parent, str(bucket)).name:
        yield finding("set_bucket", f"says {bucket}, the folder is {folder.name}", file=f"{folder.name}/{MANIFEST}")


def _tombstones(folder: Path, manifest: Mapping[str, Any]) -> Generator[Finding, None, list[Tombstone]]:
    try:
        tombstones = read_tombstones(folder)
    except ImagemillError as error:
        yield finding("tombstones", str(error.why), file=f"{folder.name}/{TOMBSTONES}")
        return []
    if len(tombstones) != manifest["tombstones"]:
        message = f"says {manifest['tombstones']} tombstones, there are {len(tombstones)}"
        yield finding("tombstones", message, file=f"{folder.name}/{MANIFEST}")
    return tombstones


def _lines(folder: Path, index: Index) -> Generator[Finding, None, dict[str, IndexLine]]:
    """Fill the index; returns the samples that count by id."""
    file, live = f"{folder.name}/{INDEX}", dict[str, IndexLine]()
    for line in read_jsonl(folder / INDEX):
        try:
            entry = msgspec.convert(line.value, IndexLine)
        except msgspec.ValidationError as error:
            yield finding("index", line.problem or str(error), file=file, line=line.number)
            continue
        counts = entry.place not in index.dead
        twice = entry.place in index.places or (counts and entry.image_id in live)
        if twice or entry.image_id != id_of_member_key(entry.key):
            message = "a sample twice, or of another id"
            yield finding("index", message, file=file, line=line.number, item=entry.image_id)
        index.places[entry.place] = entry
        if counts:
            live[entry.image_id] = entry
    return live


def _order(folder: Path, manifest: Mapping[str, Any], index: Index) -> Generator[Finding]:
    """A reader's position is a line's; energon's is a place in the tars."""
    number = {shard["name"]: n for n, shard in enumerate(manifest["shards"])}
    order = [(number.get(shard, len(number)), offset) for shard, offset in index.places]
    if order != sorted(order):
        message = "lines in another order than their samples"
        yield finding("index_order", message, file=f"{folder.name}/{INDEX}")


def _counted(folder: Path, manifest: Mapping[str, Any], live: Mapping[str, IndexLine]) -> Generator[Finding]:
    """What the manifest says of the samples that count. Sets of earlier versions have no statistics."""
    file, samples = f"{folder.name}/{MANIFEST}", manifest["samples"]
    if samples != len(live):
        yield finding("live_samples", f"says {samples} samples, {len(live)} count", file=file, field="samples")
    elif manifest["digest"] != set_digest(entry.digest for entry in live.values()):
        yield finding("live_samples", "of other samples than those of the index", file=file, field="digest")
    statistics = manifest.get("statistics")
    if statistics is not None and statistics != statistics_of(live.values()):
        yield finding("statistics", "not those of the index", file=file, field="statistics")
