"""Documents of shard sets that are published to object storage: where they are, and which are current.

    format.json                    {"format"}: the store honours conditions
    current.json                   the pointer to the current version, replaced in one step
    sets/<set id>/manifest.json …  a set's documents; never changed
    tars/<32 hex digits>.tar       named by checksum, so that versions share them; `.tar.idx` beside each

Spec: docs/spec/object-storage.md#published-version
"""

import hashlib
from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta
from typing import Literal

import msgspec

from imagemill.errors import ImagemillError

PROBE, POINTER, SHARDS_LIST = "format.json", "current.json", "shards.txt"
SETS, TARS = "sets", "tars"
FORMAT = "imagemill-published/1"
PROBE_BYTES = msgspec.json.encode({"format": FORMAT}) + b"\n"

Sets = Mapping[str, str]
"""Bucket → id of its set."""


class Replaced(msgspec.Struct, frozen=True):
    """A version that another one has replaced. `until`: when, by the server's clock, UTC."""

    sets: dict[str, str]
    until: datetime


class Pointer(msgspec.Struct, frozen=True, kw_only=True):
    """Contents of `current.json`.

    Attributes:
        format: of all documents.
        root: id of the data root.
        writer: identifier of the call that wrote it.
        sets: current set of each bucket.
        previous: versions that it or an earlier one has replaced, the newest first.
        preview: whether a preview model made arrays of it.
        time: when it was written, by the server's clock, UTC.
    """

    format: Literal["imagemill-published/1"] = FORMAT
    root: str
    writer: str
    sets: dict[str, str]
    previous: list[Replaced] = []
    preview: bool = False
    time: datetime


def encode_pointer(pointer: Pointer) -> bytes:
    """Return the bytes of a pointer."""
    return msgspec.json.format(msgspec.json.encode(pointer), indent=2) + b"\n"


def decode_pointer(data: bytes, where: object) -> Pointer:
    """Return the pointer with these bytes. Raises ImagemillError if this release cannot read it."""
    try:
        return msgspec.json.decode(data, type=Pointer)
    except msgspec.DecodeError as error:
        raise ImagemillError(
            f"{POINTER} is not a pointer that this release reads",
            where=where,
            why=str(error),
            do="give another prefix, or use the release that wrote it",
        ) from error


def set_id(manifest: bytes) -> str:
    """Return the id of a set: the first 32 hex digits of the SHA-256 of its manifest."""
    return hashlib.sha256(manifest).hexdigest()[:32]


def set_folder(identifier: str) -> str:
    """Return what the keys of a set's documents begin with, without the `/`."""
    return f"{SETS}/{identifier}"


def set_key(identifier: str, name: str) -> str:
    """Return the key of a set's document."""
    return f"{set_folder(identifier)}/{name}"


def tar_key(checksum: str) -> str:
    """Return the key of the tar with a checksum, `xxh3:` and 32 hex digits."""
    return f"{TARS}/{checksum.partition(':')[2]}.tar"


def version_of(sets: Sets) -> str:
    """Return a short name of a version, 12 hex digits, which depends on its sets alone."""
    listed = "\n".join(f"{bucket} {identifier}" for bucket, identifier in sorted(sets.items()))
    return hashlib.sha256(listed.encode()).hexdigest()[:12]


def successor(before: Pointer | None, now: datetime, keep_days: float) -> list[Replaced]:
    """Return the `previous` of the pointer that replaces one now: that version, and those replaced less than `keep_days` ago."""
    if before is None:
        return []
    kept = [each for each in before.previous if each.until > now - timedelta(days=keep_days)]
    return [Replaced(before.sets, now), *kept]


def kept_sets(pointer: Pointer, now: datetime, keep_days: float) -> set[str]:
    """Return the ids of the sets of the current version, and of those replaced less than `keep_days` ago."""
    versions: Iterable[Sets] = (
        pointer.sets,
        *(each.sets for each in pointer.previous if each.until > now - timedelta(days=keep_days)),
    )
    return {identifier for sets in versions for identifier in sets.values()}
