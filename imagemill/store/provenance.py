"""Model identities: the model that generated the files of each kind, and the rule that one folder never mixes two.

An identity is a setting of the ledger (`identity.<kind>`), recorded when the first file of its kind is made. Reading an
identity from a model folder belongs in encoders/loading.py.
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from imagemill.errors import ImagemillError, ModelMismatch
from imagemill.formats.npy import NpyStore
from imagemill.store.ledger import SUPERSEDED, Ledger
from imagemill.text.strict_json import NOT_JSON, decode_json

# Makers of adopted files, for which no row records a model. The second marks files whose header contains a preview
# model's comment.
UNKNOWN, UNKNOWN_PREVIEW = "unknown", "unknown preview"
_NO_MODEL = {UNKNOWN, UNKNOWN_PREVIEW, SUPERSEDED}

SCHEME = 1
"""Number of the present set of facts. A scheme that adds facts adds their old values below."""

# Facts that a later scheme added, with the value implied by identities without them.
OLD_VALUES: Mapping[str, Any] = {
    "size": "original",
    "tokens": 77,
    "padding": "zero",
    "preprocessing": "exact",
    "memory_format": "channels_last",
}


class ModelIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """The facts that determine an encoder's output bytes, and the origin of the model.

    The same weights from a mirror are the same model, so id, path, revision, device and threads are not part of `key`.

    Attributes:
        kind: embedding kind.
        model: hub id or path as configured.
        revision: resolved commit, if there is one.
        preview: whether the weights are random stand-ins.
        device: that it ran on.
        threads: CPU threads of the model's arithmetic; the VAE's last bits depend on it.
        facts: fingerprints of weights and configuration, dtypes, preprocessing version, scaling and shift factors, ….
        scheme: number of the set of facts.
    """

    kind: str
    model: str
    revision: str | None = None
    preview: bool = False
    device: str = "cpu"
    threads: int = 1
    facts: dict[str, Any]
    scheme: int = 1

    @property
    def key(self) -> str:
        """16 hex digits; equal keys mean interchangeable files."""
        return hashlib.sha256(msgspec.json.encode(self.facts, order="sorted")).hexdigest()[:16]


def differing_facts(recorded: ModelIdentity, requested: ModelIdentity) -> list[str]:
    """Return the names of the facts in which two identities differ; an empty list means that they are the same model.

    An identity of an older scheme equals a newer one if its facts are equal and every fact that it lacks has its old
    value.
    """
    missing = object()

    def value(identity: ModelIdentity, name: str, other: ModelIdentity) -> Any:
        old = OLD_VALUES.get(name, missing) if identity.scheme < other.scheme else missing
        return identity.facts.get(name, old)

    names = recorded.facts.keys() | requested.facts.keys()
    return sorted(name for name in names if value(recorded, name, requested) != value(requested, name, recorded))


def read_identity(ledger: Ledger, kind: str) -> ModelIdentity | None:
    """Return the recorded model of a kind, None if no file was made yet.

    Raises:
        ImagemillError: if the record cannot be read.
    """
    recorded = ledger.setting(f"identity.{kind}")
    if recorded is None:
        return None
    try:
        return decode_json(recorded.encode(), ModelIdentity)
    except NOT_JSON as error:
        raise ImagemillError(
            f"{kind}: the recorded model cannot be read: {error}",
            where=ledger.path,
            do="run `imagemill repair`, which takes it from its second copy",
        ) from error


def record_identity(ledger: Ledger, identity: ModelIdentity) -> None:
    """Record the model of a kind."""
    ledger.record_setting(f"identity.{identity.kind}", msgspec.json.encode(identity, order="sorted").decode())


def forget_identity(ledger: Ledger, kind: str) -> None:
    """Delete the identity of a kind whose files are all being replaced or deleted; keep it as `previous` for people."""
    _move_setting(ledger, f"identity.{kind}", f"previous.{kind}")


def recall_identity(ledger: Ledger, kind: str) -> None:
    """Undo `forget_identity`."""
    _move_setting(ledger, f"previous.{kind}", f"identity.{kind}")


def _move_setting(ledger: Ledger, old: str, new: str) -> None:
    """Give a setting another name. If it is absent, both names are absent afterwards."""
    with ledger.transaction():
        value = ledger.setting(old)
        ledger.forget_setting(old)
        ledger.forget_setting(new)
        if value is not None:
            ledger.record_setting(new, value)


def guard_identity(ledger: Ledger, identity: ModelIdentity) -> ModelIdentity:
    """Record the first model of a kind, or refuse one that differs from it.

    Returns:
        The identity in force: the recorded one, which is kept if a newer scheme only adds facts.

    Raises:
        ModelMismatch: with the facts that differ, or the files of another model if the record was lost.
    """
    with ledger.transaction():
        makers = read_makers(ledger, identity.kind)
        makers.check(identity)
        if makers.recorded is None:
            record_identity(ledger, identity)
    return makers.recorded or identity


class Makers(msgspec.Struct, frozen=True):
    """Makers of the files of a kind, as recorded in the ledger; passed to workers, because they do not open the ledger.

    Attributes:
        recorded: the recorded model, None before the first file, or if the record was lost.
        keys: makers in the rows of the files.
        ledger: its path, for messages.
    """

    recorded: ModelIdentity | None
    keys: frozenset[str]
    ledger: Path

    def check(self, identity: ModelIdentity) -> None:
        """Refuse a model that is not the recorded one. Raises ModelMismatch, as `guard_identity`."""
        if self.recorded is None:
            self._refuse_others(identity)
        elif fields := differing_facts(self.recorded, identity):
            raise ModelMismatch(
                f"{identity.kind}: this run's model is not the one that made the files already there "
                f"(recorded {self.recorded.model}, requested {identity.model}; differs in {', '.join(fields)})",
                where=self.ledger,
                why="one directory never mixes the vectors of two models",
                do="set the recorded model in imagemill.yaml, or replace every file with "
                f"`imagemill stage2 --regenerate {identity.kind}`",
            )

    def _refuse_others(self, identity: ModelIdentity) -> None:
        """Compare with the makers of the recorded files, if there is no recorded identity."""
        others = sorted(self.keys - _NO_MODEL - {identity.key})
        if not identity.preview and UNKNOWN_PREVIEW in self.keys:
            others.append("a preview model")
        if others:
            raise ModelMismatch(
                f"{identity.kind}: the record of the model is lost, and files of another model are there "
                f"(made by {', '.join(others)}, requested {identity.model} {identity.key})",
                where=self.ledger,
                why="one directory never mixes the vectors of two models",
                do="set the model that made the files in imagemill.yaml, or replace every file with "
                f"`imagemill stage2 --regenerate {identity.kind}`",
            )


def read_makers(ledger: Ledger, kind: str) -> Makers:
    """Return the makers of the files of a kind. Raises ImagemillError if the recorded model cannot be read."""
    recorded = read_identity(ledger, kind)
    return Makers(recorded, frozenset() if recorded else frozenset(ledger.makers(kind)), ledger.path)


def maker_of_adopted(store: NpyStore, image_id: str) -> str:
    """Return the maker to record for a valid file without a row: only preview models are identified by the header."""
    return UNKNOWN_PREVIEW if store.is_preview(image_id) else UNKNOWN
