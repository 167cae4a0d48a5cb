"""Protocols of the models: `Encoder`, `Summarizer`, `Captioner`, and the values that they take. Nothing here imports torch.

    class Mine:                                      # --summarizer module:Mine, made without arguments
        def summarize(self, images, mission):        # images[i].name, images[i].image
            return [f"{image.name}: …" for image in images]

The models are in encoders/, their callers in pipeline/.
Spec: docs/spec/stage-a.md#summarizers
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol, Self

import numpy as np
from PIL import Image

from imagemill.config import EncoderSettings
from imagemill.domain.embedding_specs import EmbeddingSpec
from imagemill.store.provenance import ModelIdentity

# The name of the captioner's provenance, and of the counts and problems of captions.
CAPTIONER = "captioner"


class NamedImage(NamedTuple):
    """One image: its file's name, and its pixels (RGB, upright)."""

    name: str
    image: Image.Image


class Summarizer(Protocol):
    """One loaded model, or an object used in its place."""

    def summarize(self, images: Sequence[NamedImage], mission: str) -> list[str]:
        """One answer per image, in order."""
        ...


class Captioner(Protocol):
    """One loaded model that describes images."""

    def caption(self, images: Sequence[Image.Image]) -> list[str]:
        """One paragraph per image, in order."""
        ...

    def close(self) -> None:
        """Give the model's memory back."""
        ...


def class_identity(summarizer: type[Any]) -> str:
    """Return the identity of a class: `MODULE:CLASS`, and its attribute `identity` if it has one."""
    name = f"{summarizer.__module__}:{summarizer.__qualname__}"
    stated = getattr(summarizer, "identity", None)
    return f"{name}:{stated}" if isinstance(stated, str) else name


@dataclass(slots=True)
class Prepared:
    """One item, ready for the model.

    Attributes:
        payload: the encoder's own form (a tensor, token ids).
        group: items of equal group may share a model call.
        pixels: cost against the pixel budget; 0 where cost does not grow with the image.
        facts: what the ledger keeps beside the file (T5: `mask`, `truncated`).
    """

    payload: Any
    group: Hashable
    pixels: int = 0
    facts: dict[str, Any] = field(default_factory=dict)


class Encoder(Protocol):
    """One loaded model. `calls` counts forward calls."""

    calls: int
    identity: ModelIdentity

    @classmethod
    def identify(
        cls, settings: EncoderSettings, *, spec: EmbeddingSpec, threads: int, preview_root: Path
    ) -> ModelIdentity:
        """Which model these settings mean, read from its files; no weights are loaded."""
        ...

    @classmethod
    def look_up(
        cls, settings: EncoderSettings, *, spec: EmbeddingSpec, threads: int, preview_root: Path
    ) -> ModelIdentity | None:
        """Find the model without fetching its weights; return its identity if everything is on this machine."""
        ...

    @classmethod
    def load(cls, settings: EncoderSettings, *, spec: EmbeddingSpec, threads: int, preview_root: Path) -> Self:
        """Load the model, checked: missing or mismatched weights raise ModelUnusable."""
        ...

    def prepare(self, item: np.ndarray | str) -> Prepared:
        """Host work on one item, safe on several threads: uint8 (H, W, 3) for pixel kinds, text for caption kinds."""
        ...

    def encode(self, batch: Sequence[Prepared]) -> list[np.ndarray]:
        """One model call over items of one group; arrays in the stored shape and dtype, in order."""
        ...

    def close(self) -> None:
        """Give the memory back."""
        ...
