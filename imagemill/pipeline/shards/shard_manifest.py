"""The manifest of a set of shards: its typed schema, and the digest over its content.

    manifest.json ──JSON──> document ──check_seal──> unchanged since it was written
                                     ──decode─────> Manifest

The digest detects accidents: a flipped byte, a manual edit, a merge of two manifests. It is not a signature.

The folder that contains it is handled in shard_sets.py; its numbers come from shard_statistics.py and shard_writer.py.
"""

import hashlib
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec

from imagemill.domain.buckets import BUCKETS
from imagemill.domain.embedding_specs import VAE, EmbeddingSpec, embedding_specs, shipped_specs
from imagemill.pipeline.colours import ColourCounts

FORMAT = "imagemill-shards/2"

# Field that contains the digest of all the others.
SEAL = "manifest_digest"

# `\Z`, because `$` also matches before a trailing newline.
ShardName = Annotated[str, msgspec.Meta(pattern=r"^shard-[0-9]{6,}\.tar\Z")]
_Member = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9_-][A-Za-z0-9_.-]*\Z")]
# A kind is part of file names below `.imagemill/provenance/`.
_Kind = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9_-]+\Z")]
_Positive = Annotated[int, msgspec.Meta(ge=1)]
_Count = Annotated[int, msgspec.Meta(ge=0)]


class ShardParameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The parameters of a packing run that determine a set, besides its samples."""

    shard_size: _Positive = 1000
    shuffle: bool = False
    seed: int = 1337
    limit: _Positive | None = None


class ShardEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One tar. `checksum`: fingerprint of its bytes."""

    name: ShardName
    samples: _Count
    bytes: _Count
    checksum: str


class ModelEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The recorded model of one kind; fields are None if no model is recorded.

    `unknown_maker`: samples in the tars whose file was adopted. `libraries`: their versions when the model was recorded;
    absent for identities of releases that did not record them. `declared_as`: kind of the declaration, of one under another
    name.
    """

    model: str | None = None
    revision: str | None = None
    key: str | None = None
    preview: bool | None = None
    facts: dict[str, Any] | None = None
    unknown_maker: _Count = 0
    libraries: dict[str, str] | msgspec.UnsetType = msgspec.UNSET
    declared_as: str | msgspec.UnsetType = msgspec.UNSET


class SetStatistics(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Counts over the live samples, see `shard_statistics.statistics_of`."""

    caption_tokens: dict[str, int] = {}
    aspect_ratios: dict[str, int] = {}
    megapixels: dict[str, int] = {}
    unmeasured: _Count = 0


class CropStatistics(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Use of the live samples' images by training at the bucket's size, see `shard_statistics.crop_statistics`.

    Attributes:
        size: `original` or `bucket`, the picture that the VAE encoded.
        median_coverage: share of an image's pixels, from 0 to 1.
        median_enlargement: how many times they are enlarged.
        most_enlargement: of all samples.
    """

    size: Literal["original", "bucket"]
    median_coverage: float
    median_enlargement: float
    most_enlargement: float


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The manifest of a set.

    `digest`: of the live samples. `manifest_digest`: of all other fields, None in sets of earlier releases.
    `empty_captions`: text kind → fingerprint of `empty-<kind>.npy`, the state of the empty caption.
    `statistics`: None in sets of releases that did not count samples; `crop`: None if samples are not measured. `pixels`: how
    the pixels behind the arrays were read, and the colours of the images; None in sets of releases that did not record it.
    `repeats`: draws in an epoch over the live samples, if some are drawn more than once. `images`: URL of the photographs when
    the set was written, if they were in object storage; for people, and never opened.
    """

    format: Literal["imagemill-shards/2"]
    bucket: Literal[BUCKETS]  # type: ignore[valid-type]
    digest: str
    samples: _Count
    tombstones: _Count
    appended: bool
    members: list[_Member]
    shards: list[ShardEntry]
    parameters: ShardParameters
    provenance: dict[_Kind, ModelEntry]
    empty_captions: dict[_Kind, str] = {}
    statistics: SetStatistics | None = None
    crop: CropStatistics | None = None
    pixels: ColourCounts | None = None
    repeats: _Count | msgspec.UnsetType = msgspec.UNSET
    images: str | msgspec.UnsetType = msgspec.UNSET
    manifest_digest: str | None = None

    @property
    def sealed(self) -> bool:
        """Whether the manifest has a digest of its content."""
        return self.manifest_digest is not None

    @property
    def bytes(self) -> int:
        """Total size of all tars, in bytes."""
        return sum(shard.bytes for shard in self.shards)


def empty_caption_name(kind: str) -> str:
    """Return the name of the file with a text kind's state of the empty caption, in a set's folder."""
    return f"empty-{kind}.npy"


def is_empty_caption(name: str) -> bool:
    """Return whether a file of a set's folder has a name of `empty_caption_name`."""
    return name.startswith("empty-") and name.endswith(".npy")


def latent_size(provenance: Mapping[str, ModelEntry]) -> str:
    """Return the picture that the VAE of a set encoded: `original` or `bucket`."""
    return recorded_spec(VAE, provenance).contract["size"]


def specs_of_set(manifest: Manifest) -> list[EmbeddingSpec]:
    """Return the kinds of a set, in the order of its members, with their contracts; kinds that are not installed are left out."""
    shipped = {spec.kind: spec for spec in shipped_specs()}
    named = [
        shipped[declared].named(kind)
        for kind, entry in manifest.provenance.items()
        if isinstance(declared := entry.declared_as, str) and declared in shipped
    ]
    known = {spec.members[0]: spec for spec in (*shipped.values(), *named, *embedding_specs())}
    return [recorded_spec(known[member], manifest.provenance) for member in manifest.members if member in known]


def recorded_spec(spec: EmbeddingSpec, provenance: Mapping[str, ModelEntry]) -> EmbeddingSpec:
    """Return a kind with the contract of the model in a set's provenance."""
    return spec.recorded(provenance.get(spec.kind, ModelEntry()).facts or {})


def decode_manifest(document: Any) -> Manifest:
    """Decode a parsed manifest; raise msgspec.ValidationError if it does not match the schema."""
    return msgspec.convert(document, Manifest)


def document_of(manifest: Manifest) -> dict[str, Any]:
    """Return the manifest as a JSON document without its digest; `sealed` adds it."""
    document = msgspec.to_builtins(manifest)
    return {name: value for name, value in document.items() if name != SEAL}


def sealed(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return the document with the digest of its own content."""
    return {**document, SEAL: content_digest(document)}


def content_digest(document: Mapping[str, Any]) -> str:
    """Return the sha256 over the canonical JSON (keys sorted, no white space) of all fields except the digest itself."""
    content = {name: value for name, value in document.items() if name != SEAL}
    return hashlib.sha256(msgspec.json.encode(content, order="sorted")).hexdigest()


def seal_is_broken(document: Mapping[str, Any]) -> bool:
    """Return whether the document has a digest that does not match its content."""
    recorded = document.get(SEAL)
    return recorded is not None and recorded != content_digest(document)
