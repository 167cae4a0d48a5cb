"""Model identities: the model that generated the files of each kind, and the rule that one folder never mixes two.

An identity is a setting of the ledger (`identity.<kind>`), recorded when the first file of its kind is made. Reading an
identity from a model folder belongs in encoders/loading.py.
"""

import functools
import hashlib
from pathlib import Path
from typing import Any

import msgspec

from imagemill.domain.embedding_specs import OLD_VALUES, EmbeddingSpec
from imagemill.domain.encoder_settings import EncoderSettings
from imagemill.errors import ImagemillError, ModelMismatch
from imagemill.formats.npy import NpyStore
from imagemill.store.ledger import SUPERSEDED, Ledger
from imagemill.text.strict_json import NOT_JSON, decode_json

# Model keys of adopted files, for which no row records a model. The second marks files whose header contains a preview
# model's comment.
UNKNOWN, UNKNOWN_PREVIEW = "unknown", "unknown preview"
_NO_MODEL = {UNKNOWN, UNKNOWN_PREVIEW, SUPERSEDED}

SCHEME = 3
"""Number of the present set of facts. A scheme that adds facts adds their old values to `OLD_VALUES`.

In schemes 1 and 2, `weights_sha256` contains the sha256 of each weight file, by name; since 3, one sha256 over all tensors.
"""

_FILES_SCHEME = 2


class ModelIdentity(msgspec.Struct, frozen=True, kw_only=True, dict=True):
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
        libraries: versions of the libraries; None if an earlier release recorded the identity.
        batch_size: most items of a model call, once it is known.
        files_sha256: file name → sha256 of the weight files, which identities of schemes 1 and 2 compare.
    """

    kind: str
    model: str
    revision: str | None = None
    preview: bool = False
    device: str = "cpu"
    threads: int = 1
    facts: dict[str, Any]
    scheme: int = 1
    libraries: dict[str, str] | None = None
    batch_size: int | None = None
    files_sha256: dict[str, str] | None = None

    @functools.cached_property
    def key(self) -> str:
        """16 hex digits; equal keys mean interchangeable files."""
        return hashlib.sha256(msgspec.json.encode(self.facts, order="sorted")).hexdigest()[:16]

    @property
    def former(self) -> "ModelIdentity":
        """The identity that earlier releases gave to these files: that of the weight files instead of their tensors."""
        if self.scheme <= _FILES_SCHEME or self.files_sha256 is None:
            return self
        facts = self.facts | {"weights_sha256": self.files_sha256}
        return msgspec.structs.replace(self, scheme=_FILES_SCHEME, facts=facts, libraries=None, files_sha256=None)


def empty_caption_file(kind: str, model_key: str) -> str:
    """Return the name of the file with a model's state of the empty caption."""
    return f"{kind}-{model_key}.npy"


def differing_facts(recorded: ModelIdentity, requested: ModelIdentity) -> list[str]:
    """Return the names of the facts in which two identities differ; an empty list means that they are the same model.

    An identity of an older scheme equals a newer one if its facts are equal and every fact that it lacks has its old
    value. Weights are compared file by file if one of the identities knows only files.
    """
    missing = object()
    older, newer = recorded.scheme < requested.scheme, recorded.scheme > requested.scheme
    if min(recorded.scheme, requested.scheme) <= _FILES_SCHEME:
        recorded, requested = recorded.former, requested.former

    def value(identity: ModelIdentity, name: str, is_older: bool) -> Any:
        return identity.facts.get(name, OLD_VALUES.get(name, missing) if is_older else missing)

    names = recorded.facts.keys() | requested.facts.keys()
    return sorted(name for name in names if value(recorded, name, older) != value(requested, name, newer))


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
            do="run `imagemill repair`, which restores it from its second copy",
        ) from error


def spec_in_force(spec: EmbeddingSpec, ledger: Ledger, settings: EncoderSettings | None = None) -> EmbeddingSpec:
    """Return the spec with the contract of the recorded model; before the first file, with that of the settings."""
    chosen = spec if settings is None else spec.requested(settings)
    identity = read_identity(ledger, spec.kind)
    return chosen.recorded(identity.facts) if identity else chosen


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
        models = read_recorded_models(ledger, identity.kind)
        models.check(identity)
        in_force = models.in_force(identity)
        if models.recorded is None:
            record_identity(ledger, in_force)
        elif models.recorded.batch_size is None and identity.batch_size is not None:
            in_force = msgspec.structs.replace(in_force, batch_size=identity.batch_size)
            record_identity(ledger, in_force)
    return in_force


class RecordedModels(msgspec.Struct, frozen=True):
    """Models of the files of a kind, as recorded in the ledger; passed to workers, because they do not open the ledger.

    Attributes:
        recorded: the recorded model, None before the first file, or if the record was lost.
        keys: model keys in the rows of the files.
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
                f"{identity.kind}: this run's model is not the one that made the existing files "
                f"(recorded {self.recorded.model}, requested {identity.model}; differs in {', '.join(fields)})",
                where=self.ledger,
                why="one directory never mixes the vectors of two models",
                do="set the recorded model in imagemill.yaml, or replace every file with "
                f"`imagemill stage2 --regenerate {identity.kind}`",
            )

    def in_force(self, identity: ModelIdentity) -> ModelIdentity:
        """Return the identity whose key new files get: the recorded one; if the record was lost, that of the files."""
        former = identity.former
        return self.recorded or (former if former.key in self.keys else identity)

    def _refuse_others(self, identity: ModelIdentity) -> None:
        """Compare with the model keys of the recorded files, if there is no recorded identity."""
        others = sorted(self.keys - _NO_MODEL - {identity.key, identity.former.key})
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


def read_recorded_models(ledger: Ledger, kind: str) -> RecordedModels:
    """Return the models of the files of a kind. Raises ImagemillError if the recorded model cannot be read."""
    recorded = read_identity(ledger, kind)
    return RecordedModels(recorded, frozenset() if recorded else frozenset(ledger.model_keys(kind)), ledger.path)


def model_key_of_adopted(store: NpyStore, image_id: str) -> str:
    """Return the model key to record for a valid file without a row: only preview models are identified by the header."""
    return UNKNOWN_PREVIEW if store.is_preview(image_id) else UNKNOWN
