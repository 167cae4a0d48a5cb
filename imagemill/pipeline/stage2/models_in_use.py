"""The models that made the files of each kind, as text: preview models and unfinished regenerations are named as such."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from imagemill.domain.embedding_specs import embedding_specs
from imagemill.store.ledger import SUPERSEDED, Ledger
from imagemill.store.provenance import UNKNOWN_PREVIEW, ModelIdentity, read_identity

PREVIEW_TEXT = "preview weights: not for training"

# A count of files that takes longer than so many seconds is repeated only after so many times that time.
_LONG_SECONDS, _REPEATED_AFTER = 0.005, 20


@dataclass(frozen=True, slots=True)
class ModelInUse:
    """The model of one kind.

    Attributes:
        model: text for people.
        preview: whether files of a preview model are among the kind's files.
        regeneration: progress of an unfinished regeneration, if any.
    """

    model: str
    preview: bool
    regeneration: str | None

    @property
    def notes(self) -> list[str]:
        """Notes for anyone who uses the files; empty for files of one real model."""
        return [*([PREVIEW_TEXT] if self.preview else []), *([self.regeneration] if self.regeneration else [])]


def model_in_use(ledger: Ledger, kind: str) -> ModelInUse:
    """Return the model that made the files of a kind."""
    identity = read_identity(ledger, kind)
    by_preview = identity is not None and identity.preview and ledger.has_files_by(kind, identity.key)
    preview = by_preview or ledger.has_files_by(kind, UNKNOWN_PREVIEW)
    progress = regeneration_progress(ledger, kind)
    regeneration = progress and (
        f"regeneration not finished: {progress}, the others are of the earlier model; "
        "`imagemill stage2` continues it, and no shard takes the files until then"
    )
    return ModelInUse(model_text(identity), preview, regeneration)


def regeneration_progress(ledger: Ledger, kind: str) -> str | None:
    """Return the progress of a regeneration; None if no file is waiting to be replaced."""
    if kind not in ledger.regenerating():
        return None
    counts = ledger.model_key_counts(kind)
    total, old = sum(counts.values()), counts.get(SUPERSEDED, 0)
    return f"{total - old} of {total} files replaced" if old else None


@dataclass(slots=True)
class ProgressOfBatches:
    """Progress of a kind's regeneration for each of many batches.

    Every count reads the rows of all files, so with many files it is repeated only after some batches.
    """

    kind: str
    _text: str | None = field(default=None, init=False)
    _valid_until: float = field(default=0.0, init=False)

    def text(self, ledger: Ledger) -> str | None:
        """Return `regeneration_progress`, now or a few batches ago."""
        began = time.monotonic()
        if began >= self._valid_until:
            self._text = regeneration_progress(ledger, self.kind)
            ended = time.monotonic()
            took = ended - began
            self._valid_until = ended + (_REPEATED_AFTER * took if took > _LONG_SECONDS else 0.0)
        return self._text


def model_text(identity: ModelIdentity | None) -> str:
    """Return a model's name for people."""
    if identity is None:
        return "none recorded"
    if identity.preview:
        return PREVIEW_TEXT
    return identity.model + (f" at revision {identity.revision[:12]}" if identity.revision else "")


def file_model_text(model_key: str, identity: ModelIdentity | None) -> str:
    """Return the name of the model of one file. `model_key`: from the file's row; `identity`: the recorded one of its kind."""
    if identity is not None and model_key == identity.key:
        return model_text(identity)
    return PREVIEW_TEXT if model_key == UNKNOWN_PREVIEW else model_key


def preview_kinds(ledger: Ledger) -> list[str]:
    """Return the kinds that have files of a preview model."""
    return [spec.kind for spec in embedding_specs() if model_in_use(ledger, spec.kind).preview]


def preview_notice(kinds: Sequence[str]) -> Iterator[str]:
    """Yield the line that begins and ends a command whose files of these kinds are made by preview models."""
    if kinds:
        yield f"{PREVIEW_TEXT} ({', '.join(kinds)})"


def model_lines(ledger: Ledger) -> Iterator[str]:
    """Yield one line for each kind with files of a preview model, or with an unfinished regeneration."""
    for spec in embedding_specs():
        for note in model_in_use(ledger, spec.kind).notes:
            yield f"  {'model':<10} {spec.kind}: {note}"
