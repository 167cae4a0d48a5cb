"""Publication of the shard sets to object storage, as one version that readers see whole.

    sets ──plan_push──> tars and documents that are missing ──upload──> pointer, in one conditional write

An interrupted call leaves the earlier version; the next one finds the tars that were sent. Documents are described in
formats/published.py.

Spec: docs/spec/object-storage.md#push
"""

import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import NamedTuple

import msgspec

from imagemill.domain.buckets import BUCKETS
from imagemill.errors import ImagemillError, MissingInput, WrongUsage
from imagemill.formats.energon import META, TAR_INDEX_SUFFIX, documents_elsewhere
from imagemill.formats.published import (
    POINTER,
    PROBE,
    PROBE_BYTES,
    SETS,
    SHARDS_LIST,
    TARS,
    Pointer,
    decode_pointer,
    encode_pointer,
    kept_sets,
    set_id,
    set_key,
    successor,
    tar_key,
    version_of,
)
from imagemill.fs.blobs import AnswerLost, Blob, Changed, Exists, Missing, StorageSettings, StoreFailed
from imagemill.fs.fingerprints import RunningFingerprint, fingerprint_file
from imagemill.fs.location import FOR_WRITING, Location, parse_location
from imagemill.fs.objects import PART_BYTES, READS, Objects, repeated
from imagemill.pipeline.leases import claimed, holder_without_run
from imagemill.pipeline.session import Session
from imagemill.pipeline.shards.readiness import ASSET as PACKING
from imagemill.pipeline.shards.shard_manifest import Manifest, is_empty_caption
from imagemill.pipeline.shards.shard_sets import INDEX, MANIFEST, TOMBSTONES, bucket_folder, live_lines, load_manifest
from imagemill.progress import Progress
from imagemill.store.ledger import ROOT_ID, Ledger

# Tars that are sent at a time; each has up to four parts under way.
AT_ONCE = 3

_WRONG_TAG = '"0"'


class LocalSet(NamedTuple):
    """A set on the disk. `document`: the bytes of its manifest."""

    folder: Path
    manifest: Manifest
    document: bytes

    @property
    def identifier(self) -> str:
        """Its id."""
        return set_id(self.document)

    @property
    def preview(self) -> bool:
        """Whether a preview model made arrays of it."""
        return any(entry.preview for entry in self.manifest.provenance.values())

    @property
    def ids(self) -> set[str]:
        """The ids of its live samples."""
        return {line.image_id for line in live_lines(self.folder)}


class PushRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What to push. `buckets`: the only ones, empty for all."""

    buckets: tuple[str, ...] = ()
    verify: bool = False
    take_over: bool = False
    allow_preview: bool = False
    dry_run: bool = False


class Pushed(msgspec.Struct, kw_only=True):
    """The result of a push.

    Attributes:
        url: where.
        version: its short name.
        sets: current set of each bucket.
        changed: whether the version is a new one.
        tars: of the version.
        sent_tars: that were sent; with `dry_run`, that would be; of an unchanged version, those that had been missing.
        sent_bytes: bytes of these tars.
        deleted: objects that `--gc` has deleted.
        verified: objects that were read back.
    """

    url: str
    version: str
    sets: dict[str, str]
    changed: bool
    tars: int
    sent_tars: int = 0
    sent_bytes: int = 0
    deleted: int = 0
    verified: int = 0


# ---- what to push


def local_sets(output: Path, buckets: Iterable[str] = BUCKETS) -> dict[str, LocalSet]:
    """Return the set of each bucket that has one. Raises as `load_manifest` for one that cannot be read."""
    found = {}
    for bucket in buckets:
        folder = bucket_folder(output, bucket)
        if (folder / MANIFEST).exists():
            found[bucket] = LocalSet(folder, load_manifest(folder), (folder / MANIFEST).read_bytes())
    return found


def refuse_push(
    request: PushRequest, local: Mapping[str, LocalSet], pointer: Pointer | None, root: str, where: Location
) -> None:
    """Raise if the sets may not be published there.

    Raises:
        MissingInput: if there is no set, or none of a chosen bucket.
        ImagemillError: for a place where another data root publishes.
    """
    if lacking := [bucket for bucket in request.buckets if bucket not in local]:
        raise MissingInput(
            f"there is no set of {', '.join(lacking)}", do="imagemill shards, or choose another --bucket"
        )
    if not local:
        raise MissingInput("there are no shards to publish", do="imagemill run")
    if pointer and pointer.root != root and not request.take_over:
        raise ImagemillError(
            "another data root publishes there",
            where=where,
            why=f"its id is {pointer.root}; it published at {pointer.time:%Y-%m-%d %H:%M:%S} UTC",
            do="give another URL, or --take-over if this data root replaces it",
        )


def refuse_preview_sets(chosen: Mapping[str, LocalSet], where: Location) -> None:
    """Raise ImagemillError if preview models made arrays of the sets."""
    if preview := [bucket for bucket, one in chosen.items() if one.preview]:
        raise ImagemillError(
            f"preview models made arrays of {', '.join(preview)}",
            where=where,
            why="their weights are random: nothing can be learned from them",
            do="run imagemill with real models, or give --allow-preview to try a pipeline out",
        )


def moved_images(
    chosen: Mapping[str, set[str]], published: Mapping[str, set[str]], others: Mapping[str, set[str]]
) -> set[str]:
    """Return the images that would be in two sets or in none if only the chosen buckets were published.

    Args:
        chosen: images of each chosen bucket's new set.
        published: images of the published sets, by bucket.
        others: images of the local sets of the buckets that are not chosen.
    """
    staying = {image_id for bucket, ids in published.items() if bucket not in chosen for image_id in ids}
    now = {image_id for ids in chosen.values() for image_id in ids}
    before = {image_id for bucket, ids in published.items() if bucket in chosen for image_id in ids}
    elsewhere = {image_id for ids in others.values() for image_id in ids}
    return (now & staying) | ((before - now) & elsewhere)


def missing_tars(
    needed: Mapping[str, int], found: Mapping[str, Blob], named: Collection[str], now: datetime | None, keep_days: float
) -> list[str]:
    """Return the keys of the tars that have to be sent.

    A tar that no kept version names, and that is older than half of `keep_days`, is sent again: another call with `--gc` may be
    about to delete it.

    Args:
        needed: bytes of each tar of the new version, by key.
        found: the tars that exist.
        named: keys of the tars that kept versions name.
        now: by the server's clock; None if nothing is kept for want of a clock.
        keep_days: see `StorageSettings`.
    """

    def is_there(key: str) -> bool:
        blob = found.get(key)
        if blob is None or blob.size != needed[key]:
            return False
        return key in named or now is None or blob.modified > now - timedelta(days=keep_days / 2)

    return [key for key in needed if not is_there(key)]


def superfluous(
    found: Iterable[Blob], kept: Collection[str], tars: Collection[str], before: datetime | None
) -> list[str]:
    """Return the keys of the objects that no kept version names.

    Args:
        found: objects below `sets/` and `tars/`.
        kept: ids of the kept sets.
        tars: keys of their tars.
        before: only objects that are older; None for all.
    """
    return [
        blob.key
        for blob in found
        if (before is None or blob.modified < before)
        and not (blob.key.startswith(f"{SETS}/") and blob.key.split("/")[1] in kept)
        and blob.key.removesuffix(TAR_INDEX_SUFFIX) not in tars
    ]


# ---- publishing


@dataclass
class Publisher:
    """One call of `imagemill push`.

    Attributes:
        store: where.
        output: folder of the sets.
        ledger: of the data root, whose leases keep the sets as they are meanwhile.
        root: id of the data root.
        run_id: holder of the leases.
    """

    store: Objects
    output: Path
    ledger: Ledger
    root: str
    run_id: str
    _now: datetime | None = None

    @property
    def settings(self) -> StorageSettings:
        """Settings of the store."""
        return self.store.settings

    def push(self, request: PushRequest) -> Pushed:
        """Publish the sets.

        Raises:
            MissingInput, ImagemillError: see `refuse_push`; if an image would be in two sets or in none; if another call
                publishes at the same time; if a tar is damaged.
            StoreFailed: if the store cannot be used.
        """
        with claimed(self.ledger, PACKING, list(BUCKETS), self.run_id):
            local = local_sets(self.output)
            pointer, tag = self.pointer()
            refuse_push(request, local, pointer, self.root, self.store.location)
            chosen = {bucket: one for bucket, one in local.items() if bucket in request.buckets or not request.buckets}
            sets = {bucket: one.identifier for bucket, one in chosen.items()}
            if request.buckets and pointer:
                self._refuse_moves(chosen, local, pointer)
                sets = {**pointer.sets, **sets}
            sets = {bucket: sets[bucket] for bucket in BUCKETS if bucket in sets}
            published = pointer is not None and pointer.sets == sets
            if not published and not request.allow_preview:
                refuse_preview_sets(chosen, self.store.location)
            tars = sum(len(one.manifest.shards) for one in chosen.values())
            result = Pushed(url=str(self.store.location), version=version_of(sets), sets=sets, changed=False, tars=tars)
            result.changed = not published or (pointer is not None and pointer.root != self.root)
            if result.changed or request.verify:
                self._publish(request, chosen, pointer, tag, result)
            if request.verify and not request.dry_run:
                result.verified = sum(self._verify(one) for one in chosen.values())
        return result

    def collect(self, *, now: bool) -> int:
        """Delete the objects that no kept version names; return their number.

        Args:
            now: keep the current version alone, and delete newer objects too.
        """
        pointer, tag = self.pointer()
        if pointer is None:
            return 0
        clock = self._clock()
        keep_days = 0.0 if now else self.settings.keep_days
        if now and pointer.previous:
            writer = uuid.uuid4().hex
            self._write_pointer(msgspec.structs.replace(pointer, previous=[], writer=writer, time=clock), tag)
        kept = kept_sets(pointer, clock, keep_days)
        tars = {key for identifier in kept for key in self._tars_of(identifier)}
        before = None if now else clock - timedelta(days=keep_days)
        found = (blob for prefix in (SETS, TARS) for page in self.store.list(prefix) for blob in page)
        keys = superfluous(found, kept, tars, before)
        self.store.delete(keys)
        return len(keys)

    def pointer(self) -> tuple[Pointer | None, str]:
        """Return the pointer, if there is one, and its tag. This is also the check of bucket and permission."""
        found = self.store.check(POINTER)
        if found is None:
            return None, ""
        data, blob = found
        return decode_pointer(data, self.store.location / POINTER), blob.tag

    def _publish(
        self,
        request: PushRequest,
        chosen: Mapping[str, LocalSet],
        pointer: Pointer | None,
        tag: str,
        result: Pushed,
    ) -> None:
        """Send what is missing; where the version is a new one, then write its pointer."""
        files = {
            tar_key(shard.checksum): one.folder / shard.name for one in chosen.values() for shard in one.manifest.shards
        }
        needed = {tar_key(shard.checksum): shard.bytes for one in chosen.values() for shard in one.manifest.shards}
        if not request.dry_run:
            self._probe()
        clock = None if request.dry_run else self._clock()
        found = {blob.key: blob for page in self.store.list(TARS) for blob in page}
        named = self._named(pointer, clock, chosen) if pointer and any(key in found for key in needed) else set()
        missing = missing_tars(needed, found, named, clock, self.settings.keep_days)
        result.sent_tars, result.sent_bytes = len(missing), sum(needed[key] for key in missing)
        if request.dry_run:
            return
        assert clock
        self._send_tars({key: files[key] for key in missing}, needed)
        self._send(
            (set_key(one.identifier, name), data)
            for bucket, one in chosen.items()
            if request.verify or pointer is None or pointer.sets.get(bucket) != one.identifier
            for name, data in set_documents(one)
        )
        if request.verify:
            self._send(index for one in chosen.values() for index in tar_indexes(one))
        if not result.changed:
            return
        new = Pointer(
            root=self.root,
            writer=uuid.uuid4().hex,
            sets=result.sets,
            previous=successor(pointer, clock, self.settings.keep_days),
            preview=any(one.preview for one in chosen.values()),
            time=clock,
        )
        self._write_pointer(new, tag)

    def _send_tars(self, files: Mapping[str, Path], sizes: Mapping[str, int]) -> None:
        with (
            Progress("push", len(files), unit="tar", work=sum(sizes[key] for key in files), work_unit="B") as progress,
            ThreadPoolExecutor(AT_ONCE, "push") as pool,
        ):

            def send(key: str) -> None:
                path = files[key]
                if tar_key(fingerprint_file(path)) != key:
                    raise ImagemillError(
                        f"{path.parent.name}/{path.name} is damaged",
                        where=path,
                        why="its bytes do not have the manifest's checksum",
                        do="imagemill verify, then imagemill run",
                    )
                if (index := path.with_name(path.name + TAR_INDEX_SUFFIX)).is_file():
                    self.store.put(f"{key}{TAR_INDEX_SUFFIX}", index)
                self.store.put(key, path)
                progress.advance(1, sizes[key])

            sending = [pool.submit(send, key) for key in files]
            try:
                for each in sending:
                    each.result()
            except BaseException:
                for each in sending:
                    each.cancel()
                raise

    def _send(self, documents: Iterable[tuple[str, bytes | Path]]) -> None:
        with ThreadPoolExecutor(AT_ONCE, "push") as pool:
            for _ in pool.map(lambda document: self.store.put(*document), documents):
                pass

    def _refuse_moves(self, chosen: Mapping[str, LocalSet], local: Mapping[str, LocalSet], pointer: Pointer) -> None:
        by_id = {one.identifier: one for one in local.values()}
        published = {
            bucket: by_id[identifier].ids if identifier in by_id else self._ids_of(identifier)
            for bucket, identifier in pointer.sets.items()
        }
        others = {bucket: one.ids for bucket, one in local.items() if bucket not in chosen}
        if moved := moved_images({bucket: one.ids for bucket, one in chosen.items()}, published, others):
            raise ImagemillError(
                f"{len(moved)} images would be in two buckets or in none: {', '.join(sorted(moved)[:3])}",
                where=self.store.location,
                why="their bucket has changed since the last push",
                do="push all buckets: leave out --bucket",
            )

    def _ids_of(self, identifier: str) -> set[str]:
        lines = self.store.read(set_key(identifier, INDEX))[0].splitlines()
        return {msgspec.json.decode(line)["image_id"] for line in lines}

    def _tars_of(self, identifier: str) -> list[str]:
        return self.store.read(set_key(identifier, SHARDS_LIST))[0].decode().splitlines()

    def _named(self, pointer: Pointer, clock: datetime | None, local: Mapping[str, LocalSet]) -> set[str]:
        """Return the keys of the tars that kept versions name. Of local sets, the lists of their tars are not read."""
        known = {one.identifier: [tar_key(shard.checksum) for shard in one.manifest.shards] for one in local.values()}
        kept = kept_sets(pointer, clock or pointer.time, self.settings.keep_days)
        return {key for identifier in kept for key in known.get(identifier) or self._tars_of(identifier)}

    # ---- conditions, clock, pointer

    def _probe(self) -> None:
        """Check that the store honours conditions, before anything is published there. Raises StoreFailed if it does not."""
        if self.settings.single_writer or self.store.check(PROBE):
            return
        with suppress(Exists):  # an earlier probe, or this one, whose answer was lost
            repeated(READS, AnswerLost, lambda: self.store.create(PROBE, PROBE_BYTES))
        honoured = []
        for attempt in (
            lambda: self.store.create(PROBE, PROBE_BYTES),
            lambda: self.store.replace(PROBE, PROBE_BYTES, _WRONG_TAG),
        ):
            try:
                repeated(READS, AnswerLost, attempt)
            except (Exists, Changed):
                honoured.append(True)
        if len(honoured) < 2:
            self.store.delete([PROBE])
            raise StoreFailed(
                "the store ignores conditions",
                where=self.store.location,
                why="of two data roots or commands that publish at the same time, both would believe to have published",
                do="if this data root is the only writer there, set object_storage.single_writer: true",
            )

    def _clock(self) -> datetime:
        """Return the server's time: that at which it last wrote an object."""
        if self._now is None:
            self.store.put(PROBE, PROBE_BYTES)
            self._now = self.store.head(PROBE).modified
        return self._now

    def _write_pointer(self, pointer: Pointer, tag: str) -> None:
        data = encode_pointer(pointer)
        write: Callable[[], str]
        if self.settings.single_writer:
            write = lambda: self.store.put(POINTER, data)  # noqa: E731
        elif tag:
            write = lambda: self.store.replace(POINTER, data, tag)  # noqa: E731
        else:
            write = lambda: self.store.create(POINTER, data)  # noqa: E731
        for attempt in range(READS):
            try:
                write()
                return
            except (Exists, Changed, Missing, AnswerLost) as error:
                # The answer to a write that succeeded may have been lost, and the library then repeats it.
                there, tag_there = self.pointer()
                if there and (there.writer == pointer.writer or there.sets == pointer.sets):
                    return
                if not isinstance(error, AnswerLost):
                    raise self._overtaken(there) from None
                if tag_there != tag or attempt == READS - 1:
                    raise

    def _overtaken(self, there: Pointer | None) -> ImagemillError:
        time = f"{there.time:%Y-%m-%d %H:%M:%S} UTC" if there else ""
        return ImagemillError(
            "another call has published there meanwhile",
            where=self.store.location,
            why=f"data root {there.root}, at {time}" if there else "the pointer was removed",
            do="run the same command again: the tars that were sent are found",
        )

    # ---- reading back

    def _verify(self, one: LocalSet) -> int:
        """Compare the published objects of a set with the local files, byte by byte; return their number."""
        count = 0
        for name, data in set_documents(one):
            key = set_key(one.identifier, name)
            if self.store.read(key)[0] != data:
                raise self._damaged(key)
            count += 1
        for key, path in tar_indexes(one):
            if self.store.read(key)[0] != path.read_bytes():
                raise self._damaged(key)
            count += 1
        for shard in one.manifest.shards:
            key, digest = tar_key(shard.checksum), RunningFingerprint()
            if self.store.head(key).size != shard.bytes:
                raise self._damaged(key)
            for start in range(0, shard.bytes, PART_BYTES):
                digest.update(self.store.read_range(key, start, min(PART_BYTES, shard.bytes - start)))
            if str(digest) != shard.checksum:
                raise self._damaged(key)
            count += 1
        return count

    def _damaged(self, key: str) -> ImagemillError:
        return ImagemillError(
            "a published object is damaged",
            where=self.store.location / key,
            why="its bytes are not those of the local file",
            do="delete the object, then run the same command again",
        )


def set_documents(one: LocalSet) -> Iterator[tuple[str, bytes]]:
    """Yield name and bytes of each document of a set as it is published, the manifest last."""
    names = {shard.name: f"../../{tar_key(shard.checksum)}" for shard in one.manifest.shards}
    keys = "".join(f"{tar_key(shard.checksum)}\n" for shard in one.manifest.shards)
    yield INDEX, (one.folder / INDEX).read_bytes()
    yield SHARDS_LIST, keys.encode()
    if (one.folder / TOMBSTONES).is_file():
        yield TOMBSTONES, (one.folder / TOMBSTONES).read_bytes()
    for path in sorted(one.folder.iterdir()):
        if is_empty_caption(path.name):
            yield path.name, path.read_bytes()
    if (one.folder / META).is_dir():
        for name, data in documents_elsewhere(one.folder, names):
            yield f"{META}/{name}", data
    yield MANIFEST, one.document


def object_sizes(one: LocalSet) -> dict[str, int]:
    """Return the size of each object of a published set, by key, in bytes."""
    return {
        **{set_key(one.identifier, name): len(data) for name, data in set_documents(one)},
        **{key: path.stat().st_size for key, path in tar_indexes(one)},
        **{tar_key(shard.checksum): shard.bytes for shard in one.manifest.shards},
    }


def tar_indexes(one: LocalSet) -> Iterator[tuple[str, Path]]:
    """Yield key and file of the index of each tar that has one."""
    for shard in one.manifest.shards:
        if (path := one.folder / f"{shard.name}{TAR_INDEX_SUFFIX}").is_file():
            yield f"{tar_key(shard.checksum)}{TAR_INDEX_SUFFIX}", path


def publisher(session: Session, location: Location, run_id: str | None = None) -> Publisher:
    """Return what publishes a data root's sets at a place, in a run or, without one, in this process."""
    store, ledger = Objects(location, session.storage()), session.ledger
    return Publisher(store, session.root.shards, ledger, ledger.setting(ROOT_ID) or "", run_id or holder_without_run())


def place_to_push(session: Session, given: str | None = None) -> Location:
    """Return where to push: as given, else `push` of the configuration. Raises WrongUsage if there is neither."""
    url = given or session.config.push
    if not url:
        raise WrongUsage(
            "no URL to publish to", why="imagemill.yaml has no `push`", do="imagemill push s3://bucket/prefix"
        )
    return parse_location(url, "URL" if given else "push", schemes=FOR_WRITING)
