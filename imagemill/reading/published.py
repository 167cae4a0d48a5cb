"""Published versions of shard sets, in object storage or on a web server: their documents, and ranges of their tars.

    current.json ──> set ids ──> manifest.json, index.jsonl      read once, at opening
                             └─> tars/<checksum>.tar             a range per sample, several at a time

Keys and documents are described in formats/published.py; a set on a disk is opened in sets.py.

Spec: docs/spec/object-storage.md#reading
"""

import itertools
import os
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from imagemill.domain.buckets import BUCKETS
from imagemill.errors import ImagemillError, MissingInput, WrongUsage
from imagemill.formats.published import (
    POINTER,
    SHARDS_LIST,
    TARS,
    Pointer,
    Sets,
    decode_pointer,
    set_folder,
    set_key,
    version_of,
)
from imagemill.fs.blobs import Blob, Changed, Missing, StorageSettings
from imagemill.fs.fingerprints import FileSignature
from imagemill.fs.location import Location, parse_location
from imagemill.fs.objects import Objects
from imagemill.pipeline.shards.shard_manifest import Manifest, decode_manifest
from imagemill.pipeline.shards.shard_sets import INDEX, MANIFEST, TOMBSTONES
from imagemill.reading.tars import ShardsReplaced

# Samples that are asked for ahead of those that are needed, and requests of one process at a time: docs/decisions/0163.
SAMPLES_AHEAD = 64
CONNECTIONS = 48


@dataclass(frozen=True, slots=True)
class PublishedTars:
    """The tars of a published set, as `OpenedTars` on a disk. May be pickled; contains no credentials.

    Attributes:
        store: where.
        folder: of the set's documents, for messages.
        keys: key of each tar by name.
        stats: signature of each tar by name; those of missing ones are absent.
    """

    store: Objects
    folder: Location
    keys: Mapping[str, str]
    stats: Mapping[str, FileSignature]

    def read(self, name: str, offset: int, size: int) -> memoryview:
        """Return bytes of a tar, which are not writable; fewer only at its end.

        Raises:
            ShardsReplaced: if the tar is gone, or is another object than at opening.
        """
        key = self.keys[name]
        try:
            data = self.store.read_range(key, offset, size, self.stats[name].split(":", 2)[2])
        except (Missing, Changed) as error:
            raise ShardsReplaced(
                f"the version of {self.folder} that this reader opened was removed",
                where=self.store.location / key,
                why=f"{name}: {error.what}",
                do="open the reader again; load_state_dict checks whether a saved state can continue in the current version",
            ) from None
        return memoryview(data)

    def read_into(self, name: str, offset: int, buffer: memoryview) -> int:
        """Fill a buffer; return the number of bytes. See `read`."""
        data = self.read(name, offset, len(buffer))
        buffer[: len(data)] = data
        return len(data)


class Version(NamedTuple):
    """A version that was opened. `sets`: id of the set of each bucket."""

    store: Objects
    sets: Mapping[str, str]

    @contextmanager
    def documents(self, optional: Collection[str] = (TOMBSTONES,)) -> Iterator[dict[str, Path]]:
        """Yield a folder with the documents of each set while the block runs, by bucket.

        Args:
            optional: names of further documents to fetch, and of those that may be missing.

        Raises:
            MissingInput: if there is no manifest, index or list of tars.
        """
        with tempfile.TemporaryDirectory(prefix="imagemill-") as temporary, ThreadPoolExecutor(CONNECTIONS) as pool:
            folders = {bucket: Path(temporary, f"bucket_{bucket}") for bucket in self.sets}
            for folder in folders.values():
                folder.mkdir()

            def fetch(bucket: str, name: str) -> None:
                path = folders[bucket] / name
                path.parent.mkdir(exist_ok=True)
                try:
                    path.write_bytes(self.store.read(set_key(self.sets[bucket], name))[0])
                except Missing as error:
                    if name not in optional:
                        raise MissingInput(
                            f"the set {self.sets[bucket]} of {bucket} is not published",
                            where=error.where,
                            why="it was deleted after another version had replaced it, or the id is wrong",
                            do="open the current version: leave out set_id; a saved state of a deleted set cannot continue",
                        ) from None

            wanted = itertools.product(self.sets, dict.fromkeys((MANIFEST, INDEX, SHARDS_LIST, *optional)))
            for _ in pool.map(lambda pair: fetch(*pair), wanted):
                pass
            yield folders

    def tars(self, bucket: str, manifest: Manifest, folder: Path, found: Mapping[str, Blob]) -> PublishedTars:
        """Return the tars of a set.

        Args:
            bucket: the bucket.
            manifest: of the set.
            folder: with the documents.
            found: the existing tars by key.
        """
        keys = (folder / SHARDS_LIST).read_text().splitlines()
        named = {shard.name: key for shard, key in zip(manifest.shards, keys, strict=True)}
        stats = {name: found[key].signature for name, key in named.items() if key in found}
        return PublishedTars(self.store, self.store.location / set_folder(self.sets[bucket]), named, stats)

    def find_tars(self, keys: list[str]) -> dict[str, Blob]:
        """Return the state of the tars that exist, by key. A web server is asked for each, object storage lists them.

        Raises:
            ImagemillError: for a web server without ranges or strong ETags.
        """
        if self.store.location.scheme == "s3":
            return {blob.key: blob for page in self.store.list(TARS) for blob in page}
        with ThreadPoolExecutor(CONNECTIONS) as pool:
            found = {blob.key: blob for blob in pool.map(self._head, keys) if blob}
        if weak := [key for key, blob in found.items() if not blob.tag or blob.tag.startswith("W/")]:
            raise ImagemillError(
                "the web server gives no strong ETags",
                where=self.store.location / weak[0],
                why="without them, bytes of two versions could be mixed",
                do="read from object storage, or from a web server that gives them",
            )
        if first := next(iter(found.values()), None):
            self.store.read_range(first.key, 0, 1, first.tag)
        return found

    def _head(self, key: str) -> Blob | None:
        try:
            return self.store.head(key)
        except Missing:
            return None


def open_version(url: str, object_storage: Mapping[str, Any] | None = None, set_id: Sets | None = None) -> Version:
    """Find the version at a URL.

    Args:
        url: `s3://bucket/prefix`, or `https://host/path`.
        object_storage: settings, see `StorageSettings`.
        set_id: ids of the sets to open, by bucket, as in a state; the current ones without it. In a process group of
            torch.distributed, all ranks open those that rank 0 finds.

    Raises:
        WrongUsage: for a URL or settings that cannot be used.
        MissingInput: if nothing is published there.
        StoreFailed: if the store cannot be used.
    """
    location = parse_location(url, "the URL of the shards")
    try:
        settings = msgspec.convert(dict(object_storage or {}), StorageSettings)
    except msgspec.ValidationError as error:
        raise WrongUsage(
            "object_storage cannot be used", why=str(error), do="see docs/how-to/object-storage.md"
        ) from None
    store = Objects(location, settings)
    return Version(store, _known(set_id if set_id else _of_rank_0(lambda: _current(store).sets), location))


def _known(sets: Sets, where: Location) -> Sets:
    """Return the sets in the order of the buckets. Raises WrongUsage for an unknown bucket, whose samples would be missing."""
    if unknown := sets.keys() - set(BUCKETS):
        raise WrongUsage(
            f"unknown bucket {', '.join(sorted(unknown))}",
            where=where,
            why=f"this release has {', '.join(BUCKETS)}",
            do="give set_id as in a saved state, or use the release that published the version",
        )
    return {bucket: sets[bucket] for bucket in BUCKETS if bucket in sets}


class PublishedBucket(msgspec.Struct):
    """The published set of a bucket. `bytes`: of its tars."""

    set_id: str
    samples: int
    tars: int
    bytes: int


class ReplacedVersion(msgspec.Struct):
    """A version that was replaced."""

    version: str
    until: datetime


class PublishedStatus(msgspec.Struct):
    """The version at a URL; see `Pointer`."""

    url: str
    version: str
    root: str
    time: datetime
    preview: bool
    buckets: dict[str, PublishedBucket]
    previous: list[ReplacedVersion]


def read_published(store: Objects) -> PublishedStatus:
    """Read what is published at a place. Raises as `open_version`."""
    pointer = _current(store)
    buckets = {}
    for bucket, identifier in pointer.sets.items():
        manifest = decode_manifest(msgspec.json.decode(store.read(set_key(identifier, MANIFEST))[0]))
        buckets[bucket] = PublishedBucket(identifier, manifest.samples, len(manifest.shards), manifest.bytes)
    previous = [ReplacedVersion(version_of(each.sets), each.until) for each in pointer.previous]
    version = version_of(pointer.sets)
    return PublishedStatus(str(store.location), version, pointer.root, pointer.time, pointer.preview, buckets, previous)


def current_version(store: Objects) -> Version:
    """Return the current version at a place. Raises as `open_version`."""
    return Version(store, _known(_current(store).sets, store.location))


def _current(store: Objects) -> Pointer:
    found = store.check(POINTER)
    if found is None:
        raise MissingInput(
            "nothing is published there", where=store.location, do="check the URL; imagemill push publishes"
        )
    return decode_pointer(found[0], store.location / POINTER)


def _of_rank_0(find: Callable[[], Sets]) -> Sets:
    """Return what rank 0 finds, so that ranks which open around a push read one version."""
    import sys

    distributed = getattr(sys.modules.get("torch"), "distributed", None)
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return find()
    found: list[Any] = [None]
    if distributed.get_rank() == 0:
        try:
            found = [find()]
        except ImagemillError as error:
            found = [error]
    distributed.broadcast_object_list(found, src=0)
    if isinstance(found[0], ImagemillError):
        raise found[0]
    return found[0]


@cache
def exit_with_parent() -> None:
    """End this worker process as soon as its parent has ended in any way. Call it in the worker."""
    import multiprocessing
    import threading
    from multiprocessing.connection import wait

    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def watch() -> None:
        wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, name="parent", daemon=True).start()
