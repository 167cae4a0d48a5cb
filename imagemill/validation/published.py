"""Validation of published sets: the rules of sets on a disk, for their documents and, one after another, their tars.

Spec: docs/spec/object-storage.md#validation
"""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import msgspec

from imagemill.errors import ImagemillError
from imagemill.formats.energon import DOCUMENTS, META, TAR_INDEX_SUFFIX
from imagemill.formats.published import POINTER, SHARDS_LIST, TARS, set_folder, set_id, tar_key
from imagemill.fs.blobs import Missing
from imagemill.pipeline.push import Publisher, local_sets, object_sizes
from imagemill.pipeline.shards.shard_manifest import ShardEntry, decode_manifest
from imagemill.pipeline.shards.shard_sets import INDEX, MANIFEST, TOMBSTONES, read_manifest_document
from imagemill.progress import Progress
from imagemill.reading.published import Version
from imagemill.validation.catalogue import finding
from imagemill.validation.findings import Finding, Report, collect
from imagemill.validation.lines import Findings
from imagemill.validation.shards import ElsewhereTars, shard_set

_DOCUMENTS = (MANIFEST, INDEX, SHARDS_LIST, TOMBSTONES, *(f"{META}/{name}" for name in DOCUMENTS))
_REMEDY = (
    "delete the object if it is damaged, then imagemill push --verify; if the local set has the same fault, "
    "imagemill shards --overwrite first"
)


def validate_published(version: Version) -> Iterator[Report]:
    """Yield a report on each set of a version. Every tar is read in full; the disk holds one of them at a time.

    Raises:
        StoreFailed: if the store cannot be used.
    """
    with version.documents(optional=_DOCUMENTS) as folders:
        shards = {bucket: _shards(folder) for bucket, folder in folders.items()}
        every = [shard for each in shards.values() for shard in each]
        with Progress(
            "validate", len(every), unit="tar", work=sum(shard.bytes for shard in every), work_unit="B"
        ) as progress:
            for bucket, folder in folders.items():
                where = version.store.location / set_folder(version.sets[bucket])
                findings = _published_set(version, bucket, folder, shards[bucket], progress)
                yield collect(str(where), "shards", map(_with_remedy, findings))


def published_objects(call: Publisher) -> Report:
    """Compare names and sizes of the published objects with the local sets; return a report on the current version.

    Of the store, only the pointer and listings are read.

    Raises:
        StoreFailed: if the store cannot be used.
    """
    return collect(str(call.store.location), "published shards", _objects(call))


def _objects(call: Publisher) -> Findings:
    pointer, _ = call.pointer()
    local = local_sets(call.output)
    sets = pointer.sets if pointer else {}
    for bucket in sorted(sets.keys() | local.keys()):
        if bucket not in local or sets.get(bucket) != local[bucket].identifier:
            yield finding("not_published", f"{bucket}: the published set is another one", file=POINTER)
    same = {bucket: one for bucket, one in local.items() if sets.get(bucket) == one.identifier}
    folders = (TARS, *(set_folder(one.identifier) for one in same.values()))
    found = {blob.key: blob.size for folder in folders for page in call.store.list(folder) for blob in page}
    for bucket, one in same.items():
        for key, size in object_sizes(one).items():
            yield 1
            if found.get(key) != size:
                state = "missing" if key not in found else f"{found[key]} bytes, {size} on the disk"
                yield finding("missing_object", state, file=key, item=bucket)


def _with_remedy(found: Finding | int) -> Finding | int:
    return msgspec.structs.replace(found, remedy=_REMEDY) if isinstance(found, Finding) else found


def _shards(folder: Path) -> list[ShardEntry]:
    """Return the tars of a set; none if its manifest cannot be read, which `shard_set` reports."""
    try:
        return decode_manifest(read_manifest_document(folder)).shards
    except (ImagemillError, msgspec.ValidationError):
        return []


def _published_set(
    version: Version, bucket: str, folder: Path, shards: list[ShardEntry], progress: Progress
) -> Findings:
    """Check what only published sets have, then the set itself."""
    manifest, listed, keys = folder / MANIFEST, folder / SHARDS_LIST, [tar_key(shard.checksum) for shard in shards]
    if manifest.is_file() and set_id(manifest.read_bytes()) != version.sets[bucket]:
        yield finding(
            "manifest_digest", "not the manifest that the id of the set names", file=f"{folder.name}/{MANIFEST}"
        )
    if not listed.is_file() or listed.read_bytes().decode(errors="replace").splitlines() != keys:
        yield finding("missing_shard", "not the list of the manifest's tars", file=f"{folder.name}/{SHARDS_LIST}")
    sizes = {shard.name: shard.bytes for shard in shards}
    key_of = dict(zip(sizes, keys, strict=True))

    def fetch(name: str, path: Path) -> None:
        try:
            version.store.fetch(key_of[name], path)
            with suppress(Missing):
                index, _ = version.store.read(f"{key_of[name]}{TAR_INDEX_SUFFIX}")
                path.with_name(f"{name}{TAR_INDEX_SUFFIX}").write_bytes(index)
        finally:
            progress.advance(1, sizes[name])

    names = {name: f"../../{key}" for name, key in key_of.items()}
    yield from shard_set(folder, elsewhere=ElsewhereTars(fetch, names))
