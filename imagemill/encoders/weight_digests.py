"""Digests of weight files: one sha256 over the tensors of a checkpoint, however they are split into files.

    .imagemill/weight_digests/<checkpoint>.json     digests by the signatures of the weight files

A checkpoint is read once, in chunks; later processes find its digests in that folder. The folder is a cache: a file that is
missing, damaged, or of other weights is computed and written again.

Spec: docs/spec/conventions.md#provenance
"""

import contextlib
import functools
import hashlib
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import msgspec

from imagemill.fs.atomic import sweep_temporaries, write_bytes_atomic
from imagemill.fs.fingerprints import FileSignature, file_signature, fingerprint
from imagemill.text.strict_json import NOT_JSON

_CHUNK = 4 << 20
_MAX_HEADER = 100_000_000  # the limit of the safetensors library
_SHA256_NAME = re.compile(r"[0-9a-f]{64}")


class WeightDigests(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Digests of the weight files of one checkpoint.

    Attributes:
        tensors: sha256 of all tensors, see `digest_tensors`.
        files: file name → sha256 of the file, which identities of schemes 1 and 2 contain.
    """

    tensors: str
    files: dict[str, str]


class _Stored(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One file of the cache. `signatures`: of the weight files, by path; `check`: fingerprint of the other fields."""

    digests: WeightDigests
    signatures: dict[str, FileSignature]
    check: str = ""

    def sealed(self) -> "_Stored":
        unsealed = msgspec.structs.replace(self, check="")
        return msgspec.structs.replace(self, check=fingerprint(msgspec.json.encode(unsealed, order="sorted")))


class TensorDigest(msgspec.Struct, frozen=True, order=True, array_like=True):
    """A tensor: its key, dtype as safetensors names it, shape, and the sha256 of its bytes."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    sha256: str


def weight_digests(paths: Sequence[Path], cache: Path) -> WeightDigests:
    """Return the digests of the weight files of a checkpoint; they are read only if one has changed.

    Args:
        paths: safetensors files.
        cache: folder of known digests. If it cannot be written, the next process reads the weights again.

    Raises:
        OSError: if a file cannot be read.
        ValueError: if a file is not in the safetensors format.
    """
    real = {path.name: path.resolve() for path in paths}
    # Taken before the bytes: a file that changes while it is read has another signature afterwards.
    signatures = {str(path): file_signature(path) for path in real.values()}
    return _known_or_read(tuple(real.items()), tuple(signatures.items()), cache)


def digest_tensors(tensors: Sequence[TensorDigest]) -> str:
    """Return the sha256 of tensors, in order of their keys; independent of files and of the order in them."""
    digest = hashlib.sha256()
    for tensor in sorted(tensors):
        digest.update(msgspec.json.encode(tensor) + b"\n")
    return digest.hexdigest()


def blob_sha256(path: Path) -> str | None:
    """Return the sha256 that is the name of a file in the hub's cache, None for other files."""
    return path.name if path.parent.name == "blobs" and _SHA256_NAME.fullmatch(path.name) else None


@functools.lru_cache(maxsize=64)
def _known_or_read(
    files: tuple[tuple[str, Path], ...], signatures: tuple[tuple[str, FileSignature], ...], cache: Path
) -> WeightDigests:
    name = hashlib.sha256(
        "\0".join(path for path, _ in sorted(signatures)).encode(errors="surrogateescape")
    ).hexdigest()
    place = cache / f"{name[:32]}.json"
    if (known := _read_cache(place)) and known.signatures == dict(signatures):
        return known.digests
    tensors: list[TensorDigest] = []
    by_file = {}
    for file_name, path in files:
        by_file[file_name] = read_weights(path, tensors)
    digests = WeightDigests(digest_tensors(tensors), by_file)
    # Without the cache, identities are the same: the next process reads the weights again.
    with contextlib.suppress(OSError):
        cache.mkdir(parents=True, exist_ok=True)
        sweep_temporaries(cache)
        stored = _Stored(digests, dict(signatures)).sealed()
        write_bytes_atomic(place, msgspec.json.format(msgspec.json.encode(stored, order="sorted")) + b"\n")
    return digests


def _read_cache(place: Path) -> _Stored | None:
    try:
        stored = msgspec.json.decode(place.read_bytes(), type=_Stored)
    except (OSError, *NOT_JSON):
        return None
    return stored if stored == stored.sealed() else None


def read_weights(path: Path, tensors: list[TensorDigest]) -> str:
    """Append the digests of the tensors of a safetensors file; return the sha256 of the file. One pass, in chunks.

    Raises:
        OSError: if the file cannot be read.
        ValueError: if it is not in the safetensors format.
    """
    known = blob_sha256(path)
    whole = hashlib.sha256()

    with open(path, "rb", buffering=0) as file:

        def chunks(size: int) -> Iterator[memoryview]:
            for chunk in _chunks(file, size):
                if known is None:
                    whole.update(chunk)
                yield chunk

        length = int.from_bytes(b"".join(chunks(8)), "little")
        if length > _MAX_HEADER:
            raise ValueError(f"{path.name} is not a safetensors file")
        header = b"".join(chunks(length))
        for key, dtype, shape, size in _layout(path.name, header):
            digest = hashlib.sha256()
            for chunk in chunks(size):
                digest.update(chunk)
            tensors.append(TensorDigest(key, dtype, shape, digest.hexdigest()))
        if file.read(1):
            raise ValueError(f"{path.name} has bytes after its last tensor")
    return known or whole.hexdigest()


def _chunks(file: BinaryIO, size: int) -> Iterator[memoryview]:
    """Yield the next `size` bytes of a file. Each chunk is valid until the next one. Raises ValueError at the file's end."""
    buffer = memoryview(bytearray(min(size, _CHUNK)))
    while size:
        read = file.readinto(buffer[: min(size, _CHUNK)])  # type: ignore[attr-defined]  # a raw file
        if not read:
            raise ValueError(f"{Path(file.name).name} is incomplete")
        yield buffer[:read]
        size -= read


class _Entry(msgspec.Struct, frozen=True):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def _layout(name: str, header: bytes) -> Iterator[tuple[str, str, tuple[int, ...], int]]:
    """Yield key, dtype, shape and number of bytes of each tensor, in the order of their bytes. Raises ValueError."""
    try:
        raw = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
        entries = {key: msgspec.json.decode(raw[key], type=_Entry) for key in raw if key != "__metadata__"}
    except NOT_JSON as error:
        raise ValueError(f"{name} is not a safetensors file: {error}") from error
    position = 0
    for key, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
        begin, end = entry.data_offsets
        if begin != position or end < begin:  # the format has no gaps
            raise ValueError(f"{name}: the tensor {key} is not where the one before it ends")
        yield key, entry.dtype, entry.shape, end - begin
        position = end
