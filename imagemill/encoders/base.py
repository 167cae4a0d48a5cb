"""Common base of the encoders of embedding kinds: settings to checkpoint, checkpoint to identity and model.

The encoder of a new kind sets three attributes (which files, what config.json must contain) and defines `_facts` and `_model_of`,
besides `prepare`, `encode` and `write_preview`.

Each step is implemented in loading.py; the protocol is in imagemill/models.py.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Self

from imagemill.config import EncoderSettings
from imagemill.domain.embedding_specs import EmbeddingSpec
from imagemill.encoders.loading import (
    Checkpoint,
    expect_config,
    fetches_weights,
    identity,
    release,
    resolve,
    set_up_arithmetic,
    weight_patterns,
)
from imagemill.errors import WeightsMissing
from imagemill.store.provenance import ModelIdentity


class CheckpointEncoder(ABC):
    """One loaded model. `calls` counts its calls; `host` prepares its inputs, on decode threads.

    Attributes:
        weights: stem of the weight files.
        files: the other files that the model needs.
        config: required values in config.json.
        host_class: prepares the inputs, if that takes more than a function.
    """

    weights: ClassVar[str] = "model"
    files: ClassVar[tuple[str, ...]] = ("config.json",)
    config: ClassVar[Mapping[str, Any]]
    host_class: ClassVar[Callable[[Checkpoint], Any]] = lambda checkpoint: None

    def __init__(
        self, model: Any, host: Any, checkpoint: Checkpoint, spec: EmbeddingSpec, made_by: ModelIdentity
    ) -> None:
        self.calls = 0
        self.identity = made_by
        self._model: Any = model
        self._host, self._checkpoint, self._spec = host, checkpoint, spec

    @classmethod
    def identify(
        cls, settings: EncoderSettings, *, spec: EmbeddingSpec, threads: int, preview_root: Path
    ) -> ModelIdentity:
        """Determine the identity from the files; no weights are loaded. Raises ModelUnusable."""
        return cls._identity_of(cls._resolve(settings, spec, preview_root), spec, threads)

    @classmethod
    def look_up(
        cls, settings: EncoderSettings, *, spec: EmbeddingSpec, threads: int, preview_root: Path
    ) -> ModelIdentity | None:
        """Check that the model exists and that its configuration fits; fetch no weights.

        Returns:
            its identity, None if its weights have to be fetched first.

        Raises:
            ModelUnusable: no such model, no access, or not a model of this kind.
        """
        checkpoint = cls._resolve(settings, spec, preview_root, weights=False)
        cls.host_class(checkpoint)
        try:
            return cls._identity_of(checkpoint, spec, threads)
        except WeightsMissing:
            if fetches_weights(checkpoint):
                return None
            raise

    @classmethod
    def load(cls, settings: EncoderSettings, *, spec: EmbeddingSpec, threads: int, preview_root: Path) -> Self:
        """Load the complete model. Raises ModelUnusable."""
        checkpoint = cls._resolve(settings, spec, preview_root)
        made_by = cls._identity_of(checkpoint, spec, threads)
        host = cls.host_class(checkpoint)
        set_up_arithmetic(threads)
        with checkpoint.loading():
            model = cls._model_of(checkpoint, host)
        return cls(model, host, checkpoint, spec, made_by)

    def close(self) -> None:
        """Free the model's memory."""
        self._model = None
        release()

    @classmethod
    def _resolve(
        cls, settings: EncoderSettings, spec: EmbeddingSpec, preview_root: Path, *, weights: bool = True
    ) -> Checkpoint:
        """Return the files of these settings, with or without the weights of a hub model. Raises ModelUnusable."""
        files = (*cls.files, *weight_patterns(cls.weights))
        checkpoint = resolve(settings, spec=spec, preview_root=preview_root, files=files, weights=weights)
        expect_config(checkpoint, **cls.config)
        return checkpoint

    @classmethod
    def _identity_of(cls, checkpoint: Checkpoint, spec: EmbeddingSpec, threads: int) -> ModelIdentity:
        facts = cls._facts(checkpoint)
        return identity(checkpoint, threads=threads, weights=cls.weights, stored_dtype=spec.dtype, **facts)

    @classmethod
    @abstractmethod
    def _facts(cls, checkpoint: Checkpoint) -> dict[str, Any]:
        """Return the facts besides the checkpoint that affect the output's bytes; JSON values only. Raises ModelUnusable."""

    @classmethod
    @abstractmethod
    def _model_of(cls, checkpoint: Checkpoint, host: Any) -> Any:
        """Return the model on its device. Raises ModelUnusable."""
