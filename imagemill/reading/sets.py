"""Opened sets of shards: the live samples of every bucket by index entry; tars are read only on access.

    data/shards/                    open this, or one bucket folder
    └─ bucket_1024x1024/
       ├─ shard-000000.tar …
       ├─ index.jsonl               position of each sample
       ├─ tombstones.jsonl          samples that are not live, if any: never delivered
       └─ manifest.json             its models, and the number of live samples

Several places, such as the shards of the shares of a folder, are read as one: the sets of a bucket become one bucket.

This module finds, checks and refuses sets, and provides random access by id. Documents are described in
pipeline/shards/shard_sets.py; bytes are read in tars.py, members decoded in samples.py, and the order is in plan.py.

Spec: docs/spec/shards.md#updating-a-set, docs/spec/shards.md#several-places
"""

import hashlib
import os
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from imagemill.domain.buckets import bucket_size
from imagemill.domain.embedding_specs import latent_shape
from imagemill.domain.ids import member_key
from imagemill.domain.latent_boxes import encoded_box
from imagemill.errors import ImagemillError, MissingInput, WrongUsage
from imagemill.formats.npy import parse_npy, read_npy
from imagemill.formats.published import set_key, tar_key
from imagemill.fs.fingerprints import RunningFingerprint, fingerprint, fingerprint_file, signature_bytes
from imagemill.fs.location import is_url
from imagemill.fs.objects import PART_BYTES
from imagemill.fs.swap import read_unswapped
from imagemill.pipeline.shards.shard_manifest import Manifest, ModelEntry, ShardEntry, empty_caption_name, latent_size
from imagemill.pipeline.shards.shard_sets import MANIFEST, IndexLine, live_lines, load_manifest
from imagemill.reading.preview import refuse_preview
from imagemill.reading.published import PublishedTars, Version, open_version
from imagemill.reading.samples import Place, Tars, read_members
from imagemill.reading.tars import OpenedTars
from imagemill.text.units import counted

_WRITE_AGAIN = "write the set again: imagemill shards --overwrite"


@dataclass(frozen=True, slots=True)
class Bucket:
    """One bucket's set, complete and of one publication.

    `name`: as `1024x1024`. `lines`: the live samples, in index order.
    """

    name: str
    folder: Place
    manifest: Manifest
    lines: Sequence[IndexLine]
    tars: Tars

    @property
    def latent_size(self) -> tuple[int, int]:
        """(height, width) of a latent of the bucket's own size."""
        width, height = bucket_size(self.name)
        return latent_shape(height, width)[1:]

    @property
    def one_size(self) -> bool:
        """Whether all latents as stored have the bucket's size. Spec: docs/spec/stage2.md#bucket-size."""
        return latent_size(self.manifest.provenance) == "bucket"

    def crop_box(self, width: int, height: int) -> tuple[int, int, int, int]:
        """Return (left, top, right, bottom) of the part of an image that its latent as stored contains, in pixels."""
        return encoded_box(width, height, latent_size(self.manifest.provenance), self.name)

    @property
    def members(self) -> list[str]:
        """Member suffixes as in the tars."""
        return self.manifest.members

    @property
    def parts(self) -> Sequence["Bucket"]:
        """The sets that it consists of: itself, or those of several places."""
        return (self,)

    def tars_of(self, rows: np.ndarray) -> list[Tars]:
        """Return the tars with each of these samples, given by their numbers in `lines`."""
        return [self.tars] * len(rows)

    def digest(self) -> str:
        """Return a digest of the live samples, their contents and positions.

        If digests are equal, a position means the same sample.
        """
        samples = "\n".join(f"{line.image_id}\t{line.shard}\t{line.offset}\t{line.digest}" for line in self.lines)
        return hashlib.sha256(samples.encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class JoinedBucket(Bucket):
    """The sets of one bucket in several places, read as one.

    `folder`, `manifest` and `tars` are those of the first; `lines` those of all, one set after the other.
    """

    sets: Sequence[Bucket]

    @classmethod
    def of(cls, sets: Sequence[Bucket]) -> Bucket:
        """Return the sets as one bucket; a single one as it is."""
        if len(sets) == 1:
            return sets[0]
        first = sets[0]
        return cls(
            first.name, first.folder, first.manifest, [line for one in sets for line in one.lines], first.tars, sets
        )

    @property
    def parts(self) -> Sequence[Bucket]:
        """The sets, in the order of their places."""
        return self.sets

    def tars_of(self, rows: np.ndarray) -> list[Tars]:
        """Return the tars of each sample's place."""
        ends = np.cumsum([len(one.lines) for one in self.sets])
        return [self.sets[n].tars for n in np.searchsorted(ends, rows, side="right")]

    def digest(self) -> str:
        """Return the digests of the sets, in the order of their places."""
        return " ".join(one.digest() for one in self.sets)


def parts_of(buckets: Iterable[Bucket]) -> list[Bucket]:
    """Return the sets that buckets consist of."""
    return [part for bucket in buckets for part in bucket.parts]


# Places where sets lie: a folder, or a URL; or several of them, such as those of shares.
Places = str | Path | Sequence[str | Path]

# A folder, or the version at a URL.
Source = Path | Version

# Ids of published sets by bucket; of several places, those of each.
SetIds = Mapping[str, str] | Sequence[Mapping[str, str] | None]


def sources_of(
    places: Places, object_storage: Mapping[str, Any] | None = None, set_id: SetIds | None = None
) -> tuple[Source, ...]:
    """Find what is to be opened.

    Args:
        places: a folder or a URL, or a list of them.
        object_storage: settings for URLs, see `open_version`.
        set_id: of a URL: ids of the sets, by bucket; of several places: a list of such ids, None for a folder.

    Raises:
        WrongUsage: for a place that is named twice, an empty list, or ids that do not go with the places.
        MissingInput: see `open_version`.
    """
    given = [places] if isinstance(places, str | Path) else list(places)
    if set_id is None:
        ids: list[Mapping[str, str] | None] = [None] * len(given)
    else:
        ids = [set_id] if isinstance(set_id, Mapping) else list(set_id)
    if len(ids) != len(given):
        raise WrongUsage(
            f"set_id does not go with {counted(len(given), 'place')}",
            do="give the ids as under `sets` in a state: of one place by bucket, of several a list, with None for a folder",
        )
    names = [str(place) if is_url(place) else os.path.abspath(place) for place in given]
    if not given:
        raise WrongUsage("no place of shards was given", do="give a folder, a URL, or a list of them")
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise WrongUsage(f"{twice[0]} is given twice", do="name each place once")
    return tuple(
        open_version(str(place), object_storage, chosen) if is_url(place) else Path(place)
        for place, chosen in zip(given, ids, strict=True)
    )


def open_sources(sources: Sequence[Source], *, allow_preview: bool = False, verify: bool = False) -> tuple[Bucket, ...]:
    """Open all sets, by the names of their buckets; sets of one bucket in several places become one bucket.

    Raises:
        MissingInput: see `open_buckets` and `open_published`.
        ImagemillError: see there; also if the sets of several places do not go together, or an id is live in two of them.
    """
    opened = [
        open_published(source, allow_preview=allow_preview, verify=verify)
        if isinstance(source, Version)
        else open_buckets(source, allow_preview=allow_preview, verify=verify)
        for source in sources
    ]
    if len(opened) == 1:
        return opened[0]
    every = [bucket for buckets in opened for bucket in buckets]
    _refuse_differing(every)
    refuse_twice(every, in_places=True)
    names = sorted({bucket.name for bucket in every})
    return tuple(JoinedBucket.of([bucket for bucket in every if bucket.name == name]) for name in names)


def _refuse_differing(buckets: Sequence[Bucket]) -> None:
    """Raise ImagemillError if sets of several places have different members or were made by different models."""
    first = buckets[0]
    for bucket in buckets[1:]:
        if difference := _difference(first.manifest, bucket.manifest):
            raise ImagemillError(
                f"the sets of several places do not go together: {difference}",
                where=f"{first.folder}, {bucket.folder}",
                why="a model cannot be trained on arrays of different kinds",
                do="give all data roots one imagemill.yaml; imagemill stage2 --regenerate KIND replaces arrays of another model",
            )


def _difference(one: Manifest, other: Manifest) -> str | None:
    if one.members != other.members:
        return f"{', '.join(one.members)} against {', '.join(other.members)}"
    for kind in one.provenance.keys() | other.provenance.keys():
        mine, others = (manifest.provenance.get(kind, ModelEntry()) for manifest in (one, other))
        if _identity(mine) != _identity(others):
            facts = mine.facts or {}, others.facts or {}
            names = sorted(name for name in facts[0] | facts[1] if facts[0].get(name) != facts[1].get(name))
            what = f", which differ in {', '.join(names)}" if names else ""
            return f"{kind} was made by {_maker(mine)} and by {_maker(others)}{what}"
    if one.pixels and other.pixels and one.pixels.color != other.pixels.color:
        return f"pixels.color is {one.pixels.color} and {other.pixels.color}"
    return None


def _identity(entry: ModelEntry) -> tuple[object, ...]:
    """Return what is equal if models are interchangeable: the same weights may have been loaded from different paths."""
    return entry.key, entry.preview, entry.declared_as


def _maker(entry: ModelEntry) -> str:
    return f"{entry.model or 'an unknown model'}" + (f" at {entry.revision}" if entry.revision else "")


def open_buckets(folder: Path, *, allow_preview: bool = False, verify: bool = False) -> tuple[Bucket, ...]:
    """Open all buckets below a shards folder, by name, or the one with this folder.

    A bucket's folder with neither manifest nor tars is not a set: only foreign files remained when its last sample was
    removed.

    Args:
        folder: `shards/`, or one bucket folder in it.
        allow_preview: also open sets of preview models.
        verify: also read every tar in full and compare its checksum; sizes are always compared.

    Raises:
        MissingInput: if there are no sets, or tars without a manifest.
        ImagemillError: if a set is inconsistent, an id is live twice, or a preview model generated files of a set.
    """
    # Absolute, because a training script may change its working directory.
    folder = folder.absolute()
    folders = [folder] if folder.name.startswith("bucket_") else sorted(folder.glob("bucket_*/"))
    buckets = tuple(
        bucket for path in folders if path.is_dir() and (bucket := read_unswapped(path, partial(_read_bucket, path)))
    )
    if not buckets:
        raise MissingInput(f"no shards in {folder}", do="imagemill run, or give the folder that holds bucket_<bucket>/")
    return _checked(buckets, allow_preview=allow_preview, verify=verify)


def open_published(version: Version, *, allow_preview: bool = False, verify: bool = False) -> tuple[Bucket, ...]:
    """Open the sets of a published version, by name. Arguments and errors as for `open_buckets`."""
    with version.documents() as folders:
        manifests = {bucket: load_manifest(folder) for bucket, folder in folders.items()}
        keys = [tar_key(shard.checksum) for manifest in manifests.values() for shard in manifest.shards]
        found = version.find_tars(keys)
        buckets = []
        for name, folder in sorted(folders.items()):
            tars = version.tars(name, manifests[name], folder, found)
            bucket = Bucket(manifests[name].bucket, tars.folder, manifests[name], live_lines(folder), tars)
            _refuse_disagreement(bucket)
            buckets.append(bucket)
    return _checked(tuple(buckets), allow_preview=allow_preview, verify=verify)


def _checked(buckets: tuple[Bucket, ...], *, allow_preview: bool, verify: bool) -> tuple[Bucket, ...]:
    """Return the buckets unless they contradict each other or may not be read."""
    refuse_twice(buckets)
    for bucket in buckets:
        if not bucket.manifest.sealed:
            warnings.warn(
                f"{bucket.folder / MANIFEST}: an earlier release wrote this manifest without a digest, so changes to it go "
                "unnoticed; `imagemill shards --overwrite` writes one",
                stacklevel=3,
            )
        if not allow_preview:
            refuse_preview(bucket.folder, bucket.manifest)
        if verify:
            _refuse_damaged(bucket)
    return buckets


def empty_caption(buckets: Sequence[Bucket], kind: str) -> np.ndarray:
    """Return the state of the empty caption of a text kind, see `ShardSet.empty_caption`."""
    buckets = parts_of(buckets)
    states = {bucket.manifest.empty_captions.get(kind): bucket for bucket in buckets}
    if found := [content for content in states if content is None]:
        where, known = states[found[0]].folder, {kind for bucket in buckets for kind in bucket.manifest.empty_captions}
        raise MissingInput(
            f"the set has no state of the empty caption of {kind!r}",
            where=where,
            why=f"it has those of {', '.join(sorted(known)) or 'no kind'}; earlier releases stored none",
            do=f"imagemill stage2 --regenerate {kind}, then imagemill shards --overwrite",
        )
    if len(states) > 1:
        raise ImagemillError(
            f"the buckets have different states of the empty caption of {kind!r}",
            where=", ".join(bucket.folder.name for bucket in states.values()),
            why="they were packed with different models",
            do=_WRITE_AGAIN,
        )
    ((content, bucket),) = states.items()
    name = empty_caption_name(kind)
    if isinstance(bucket.tars, PublishedTars):
        data = bucket.tars.store.read(set_key(bucket.folder.name, name))[0]
        if fingerprint(data) != content:
            raise ImagemillError(f"{name} is damaged", where=bucket.folder, do="imagemill push --verify")
        return parse_npy(memoryview(bytearray(data)), bucket.folder / name)
    assert isinstance(bucket.folder, Path)
    return read_npy(bucket.folder / name, content=content)


def refuse_twice(buckets: Sequence[Bucket], *, in_places: bool = False) -> None:
    """Raise ImagemillError if an id is live twice, in one bucket or in two; `in_places`: which are not all of one place."""
    seen: dict[str, Bucket] = {}
    for bucket in parts_of(buckets):
        for line in bucket.lines:
            if (other := seen.setdefault(line.image_id, bucket)) is not bucket:
                raise (_in_two_places if in_places else _live_twice)(line.image_id, other, bucket)
        if len({line.image_id for line in bucket.lines}) < len(bucket.lines):
            counts = Counter(line.image_id for line in bucket.lines)
            raise _live_twice(counts.most_common(1)[0][0], bucket, bucket)


def _in_two_places(image_id: str, one: Bucket, other: Bucket) -> ImagemillError:
    return ImagemillError(
        f"{image_id!r} is in two of the places",
        where=f"{one.folder}, {other.folder}",
        why="an id names one sample; shares of one folder, with one N, have no id in common",
        do="give the shares of one folder, each once",
    )


def _live_twice(image_id: str, one: Bucket, other: Bucket) -> ImagemillError:
    places = f"bucket_{one.name}" if one is other else f"bucket_{one.name} and bucket_{other.name}"
    return ImagemillError(
        f"{image_id!r} is live twice, in {places}",
        where=other.folder,
        why="an id names one sample; a run that moves it between buckets was stopped, or the folders are from different times",
        do=f"run `imagemill run`, which finishes an interrupted run; else {_WRITE_AGAIN}",
    )


def _refuse_damaged(bucket: Bucket) -> None:
    """Raise ImagemillError if a tar does not match the manifest's checksum."""
    for shard in bucket.manifest.shards:
        path = bucket.folder / shard.name
        if _fingerprint_of(bucket, shard) != shard.checksum:
            raise ImagemillError(
                f"{bucket.folder.name}/{shard.name} is damaged",
                where=path,
                why="its bytes do not have the manifest's checksum",
                do=f"copy the folder again, or {_WRITE_AGAIN}",
            )


def _fingerprint_of(bucket: Bucket, shard: ShardEntry) -> str:
    if not isinstance(bucket.tars, PublishedTars):
        return fingerprint_file(bucket.tars.folder / shard.name)
    digest = RunningFingerprint()
    for start in range(0, shard.bytes, PART_BYTES):
        digest.update(bucket.tars.read(shard.name, start, min(PART_BYTES, shard.bytes - start)))
    return str(digest)


def _read_bucket(folder: Path) -> Bucket | None:
    """Read the set in a folder; return None if the folder contains no set."""
    if not (folder / MANIFEST).exists() and not any(folder.glob("*.tar")):
        return None
    try:
        manifest = load_manifest(folder)
    except ImagemillError as error:
        raise type(error)(
            error.what,
            where=folder,
            why=error.why or "samples are found through the index and manifest that imagemill writes beside the tars",
            do=f"{_WRITE_AGAIN}; foreign tars: webdataset.WebDataset",
        ) from error
    bucket = Bucket(manifest.bucket, folder, manifest, live_lines(folder), OpenedTars.of(folder, manifest))
    _refuse_disagreement(bucket)
    return bucket


def _refuse_disagreement(bucket: Bucket) -> None:
    """Raise ImagemillError if index, manifest and tars of a set do not belong together."""
    if problem := _disagreement(bucket):
        raise ImagemillError(
            f"{bucket.folder.name}: its index files and tars do not match",
            where=bucket.folder,
            why=problem,
            do=f"copy the folder whole, or {_WRITE_AGAIN}",
        )


def _disagreement(bucket: Bucket) -> str | None:
    """Return a contradiction between index, manifest and the tars' sizes, if any; no tar is opened."""
    sizes = {shard.name: shard.bytes for shard in bucket.manifest.shards}
    for name, size in sizes.items():
        found = bucket.tars.stats.get(name)
        if found is None:
            return f"{name} is missing"
        if (found_size := signature_bytes(found)) != size:
            return f"{name} has {found_size} bytes, {size} by the manifest"
    for line in bucket.lines:
        if line.offset < 0 or line.size < 0 or line.offset + line.size > sizes.get(line.shard, -1):
            return f"the index puts {line.image_id!r} where {line.shard} has no bytes"
        if line.key != member_key(line.image_id):
            return f"the index gives {line.image_id!r} the key {line.key!r}"
    expected = bucket.manifest.samples
    return None if len(bucket.lines) == expected else f"{len(bucket.lines)} live samples, {expected} by the manifest"


class ShardSet(Mapping[str, dict[str, Any]]):
    """Samples by id; each access costs one read of one tar.

    A sample is a dict: image_id, bucket, caption, `json` (the record), and one writable array per npy member, named
    without the `.npy`, as stored: vae float16 (16, H // 8, W // 8) neither scaled nor shifted, t5h float16 (77, 1024),
    t5m uint8 (77,), dinov3 float32 (1024,).
    """

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        self.buckets = tuple(buckets)
        refuse_twice(self.buckets)
        self._places = {line.image_id: (part, line) for part in parts_of(buckets) for line in part.lines}

    @classmethod
    def open(
        cls,
        places: Places,
        *,
        allow_preview: bool = False,
        verify: bool = False,
        object_storage: Mapping[str, Any] | None = None,
        set_id: SetIds | None = None,
    ) -> "ShardSet":
        """Open a shards folder, one of its bucket folders, the URL of a published version, or a list of them as one set.

        Arguments and errors are those of `sources_of` and `open_sources`.
        """
        return cls(open_sources(sources_of(places, object_storage, set_id), allow_preview=allow_preview, verify=verify))

    def empty_caption(self, kind: str) -> np.ndarray:
        """Return the state of the empty caption, for classifier-free guidance, as stored: float16 (77, 1024) for `t5_hidden`.

        Raises:
            MissingInput: if the set contains none of this kind.
            ImagemillError: if the file is damaged, or if the buckets contain states of two models.
        """
        return empty_caption(self.buckets, kind)

    def __getitem__(self, image_id: str) -> dict[str, Any]:
        """Return one sample.

        Raises:
            KeyError: if the id is not live.
            ShardsReplaced: if another set replaced this one.
            ImagemillError: if the tar is damaged.
        """
        bucket, line = self._places[image_id]
        sample = read_members(bucket.tars, line, bucket.members, memoryview(bytearray(line.size)))
        return {
            "image_id": image_id,
            "bucket": bucket.name,
            "caption": sample["json"]["caption"],
            **{name: value.copy() for name, value in sample.items()},
        }

    def __contains__(self, image_id: object) -> bool:
        return image_id in self._places

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)
