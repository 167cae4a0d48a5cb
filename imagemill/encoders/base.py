"""Common base of the encoders of embedding kinds: settings to checkpoint, checkpoint to identity and model.

The encoder of a new kind sets three attributes (which files, what config.json must contain) and defines `_facts` and `_model_of`,
besides `prepare`, `encode` and `write_preview`.

Each step is implemented in loading.py; the protocol is in imagemill/models.py.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np

from imagemill.domain.embedding_specs import EmbeddingSpec
from imagemill.domain.encoder_settings import EncoderSettings
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
from imagemill.models import Prepared
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
    host_class: ClassVar[Callable[[Checkpoint, EmbeddingSpec], Any]] = lambda checkpoint, spec: None

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
        checkpoint = cls._resolve(settings, spec, preview_root)
        return cls._identity_of(checkpoint, cls._contract(checkpoint, spec.requested(settings)), threads)

    @classmethod
    def in_force(
        cls, settings: EncoderSettings, *, spec: EmbeddingSpec, threads: int, preview_root: Path
    ) -> EmbeddingSpec:
        """Return the spec with these settings and what the model's configuration adds. Raises ModelUnusable."""
        return cls._contract(cls._resolve(settings, spec, preview_root, weights=False), spec.requested(settings))

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
        spec = cls._contract(checkpoint, spec.requested(settings))
        cls.host_class(checkpoint, spec)
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
        spec = cls._contract(checkpoint, spec.requested(settings))
        made_by = cls._identity_of(checkpoint, spec, threads)
        host = cls.host_class(checkpoint, spec)
        set_up_arithmetic(threads)
        with checkpoint.loading():
            model = cls._model_of(checkpoint, host, spec)
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
    def _contract(cls, checkpoint: Checkpoint, spec: EmbeddingSpec) -> EmbeddingSpec:
        """Return the spec with the values of its contract that the model's configuration determines (`model_names`)."""
        return spec

    @classmethod
    def _identity_of(cls, checkpoint: Checkpoint, spec: EmbeddingSpec, threads: int) -> ModelIdentity:
        facts = cls._facts(checkpoint, spec)
        return identity(checkpoint, threads=threads, weights=cls.weights, stored_dtype=spec.dtype, **facts)

    @classmethod
    @abstractmethod
    def _facts(cls, checkpoint: Checkpoint, spec: EmbeddingSpec) -> dict[str, Any]:
        """Return the facts besides the checkpoint that affect the output's bytes; JSON values only. Raises ModelUnusable."""

    @classmethod
    @abstractmethod
    def _model_of(cls, checkpoint: Checkpoint, host: Any, spec: EmbeddingSpec) -> Any:
        """Return the model on its device. Raises ModelUnusable."""


class LaunchedEncoder(CheckpointEncoder):
    """An encoder whose batches can be launched: a GPU then computes one while the results of the one before are collected."""

    @property
    def overlaps(self) -> bool:
        """Whether the device works by itself after a launch."""
        return self._checkpoint.device.startswith("cuda")

    @abstractmethod
    def launch(self, batch: Sequence[Prepared]) -> Callable[[], list[np.ndarray]]:
        """Start the model on items of one group; return a function that waits for the arrays, and raises NonFiniteEmbedding."""

    def encode(self, batch: Sequence[Prepared]) -> list[np.ndarray]:
        """Return the arrays of a launched batch. Raises NonFiniteEmbedding."""
        return self.launch(batch)()
