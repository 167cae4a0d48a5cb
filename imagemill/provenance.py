"""Which model made the files of each kind, and the rule that one folder never mixes two.

    .imagemill/provenance/vae_latents.json     the ModelIdentity, written when the first file of that kind is made

Belongs here: the identity as a value, its record on disk, the refusal.
Belongs elsewhere: reading an identity off a model folder (encoders/loading.py).
Source: CONTRACTS section 0, "Provenance".
"""

import hashlib
import os
from pathlib import Path
from typing import Any

import msgspec

from imagemill.atomic import write_bytes_atomic
from imagemill.errors import ImagemillError, ModelMismatch
from imagemill.strict_json import NOT_JSON, decode_json

UNKNOWN = "unknown"


class ModelIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """What decides an encoder's bytes (`facts`), and where it came from (the rest).

    The same weights from a mirror are the same model, so id, path, revision, device and threads stay out of `key`.

    Attributes:
        kind: embedding kind.
        model: hub id or path as configured.
        revision: resolved commit where there is one.
        preview: whether the weights are a stand-in.
        device: where it ran.
        threads: CPU threads of the model's arithmetic: the VAE's last bits depend on it.
        facts: weights and config fingerprints, dtypes, preprocessing version, scaling and shift factors, ….
    """

    kind: str
    model: str
    revision: str | None = None
    preview: bool = False
    device: str = "cpu"
    threads: int = 1
    facts: dict[str, Any]

    @property
    def key(self) -> str:
        """16 hex digits; equal keys mean interchangeable files."""
        return hashlib.sha256(msgspec.json.encode(self.facts, order="sorted")).hexdigest()[:16]


def read_identity(folder: Path, kind: str) -> ModelIdentity | None:
    """Return the recorded maker of this kind; None if nothing was made yet. Raises ImagemillError for a damaged record."""
    path = folder / f"{kind}.json"
    if not path.exists():
        return None
    try:
        return decode_json(path.read_bytes(), ModelIdentity)
    except NOT_JSON as error:
        raise ImagemillError(
            f"the recorded model of {kind} cannot be read",
            where=path,
            why=str(error),
            do="restore the file; without it, files of two models could be mixed",
        ) from error


def write_identity(folder: Path, identity: ModelIdentity) -> None:
    data = msgspec.json.format(msgspec.json.encode(identity, order="sorted"))
    write_bytes_atomic(folder / f"{identity.kind}.json", data + b"\n")


def forget_identity(folder: Path, kind: str) -> None:
    """No file of this kind counts any more; the record is kept beside, for people."""
    path = folder / f"{kind}.json"
    if path.exists():
        os.replace(path, folder / f"{kind}.previous.json")


def guard_identity(folder: Path, identity: ModelIdentity) -> None:
    """Record the first maker of a kind, or refuse one that differs from it.

    Raises:
        ModelMismatch: naming the facts that differ.
    """
    recorded = read_identity(folder, identity.kind)
    if recorded is None:
        write_identity(folder, identity)
        return
    if recorded.key != identity.key:
        fields = sorted(
            name
            for name in recorded.facts.keys() | identity.facts.keys()
            if recorded.facts.get(name) != identity.facts.get(name)
        )
        raise ModelMismatch(
            f"{identity.kind}: this run's model is not the one that made the files already there "
            f"(recorded {recorded.model}, requested {identity.model}; differs in {', '.join(fields)})",
            where=folder / f"{identity.kind}.json",
            why="one directory never mixes the vectors of two models",
            do="set the recorded model in imagemill.yaml, or make every file anew with "
            f"`imagemill stage2 --regenerate {identity.kind}`",
        )
