"""What an encoder is, for the rooms that use one without importing torch.

Belongs here: the protocol and the value that passes between `prepare` and `encode`.
Belongs elsewhere: the models (encoders/), the stream that feeds them (pipeline/stage2/embed.py).
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np

from imagemill.config import EncoderSettings
from imagemill.embedding_specs import EmbeddingSpec
from imagemill.provenance import ModelIdentity


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
