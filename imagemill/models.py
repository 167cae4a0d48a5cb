"""Protocols of the models (`Encoder`, `Summarizer`, `Captioner`) and the values that they take. Does not import torch.

    class Mine:                                      # --summarizer module:Mine, constructed without arguments
        def summarize(self, images, mission):        # images[i].name, images[i].image
            return [f"{image.name}: …" for image in images]

The models are in encoders/, their callers in pipeline/.
Spec: docs/spec/stage-a.md#summarizers
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Self

from imagemill.domain.embedding_specs import EmbeddingSpec
from imagemill.domain.encoder_settings import EncoderSettings
from imagemill.store.provenance import ModelIdentity

if TYPE_CHECKING:
    import numpy as np
    from PIL import Image

# Name of the captioner in provenance records, counts and problems.
CAPTIONER = "captioner"

# Name of the summarizer among the passes of an engine.
SUMMARIZER = "summarizer"


class NamedImage(NamedTuple):
    """One image: its file name and its pixels (RGB, upright)."""

    name: str
    image: "Image.Image"


class Summarizer(Protocol):
    """A loaded model, or an object used in its place."""

    def summarize(self, images: Sequence[NamedImage], mission: str) -> list[str]:
        """Return one answer per image, in order."""
        ...


class CutShort(str):
    """An answer that ended at the most tokens that the model may write."""

    __slots__ = ()


class Captioner(Protocol):
    """A loaded model that describes images."""

    def caption(self, images: "Sequence[Image.Image]") -> list[str]:
        """Return one paragraph per image, in order; CutShort if it ended at the most tokens that the model may write."""
        ...

    def close(self) -> None:
        """Free the model's memory."""
        ...


def class_identity(summarizer: type[Any]) -> str:
    """Return the identity of a class: `MODULE:CLASS`, followed by its attribute `identity` if it has one."""
    name = f"{summarizer.__module__}:{summarizer.__qualname__}"
    stated = getattr(summarizer, "identity", None)
    return f"{name}:{stated}" if isinstance(stated, str) else name


@dataclass(slots=True)
class Prepared:
    """One item, ready for the model.

    Attributes:
        payload: encoder-specific form (a tensor, token ids).
        group: items of equal group may share a model call.
        pixels: cost against the pixel budget; 0 if the cost does not grow with the image.
        facts: values that the ledger stores with the file (T5: `mask`, `truncated`).
    """

    payload: Any
    group: Hashable
    pixels: int = 0
    facts: dict[str, Any] = field(default_factory=dict)


class Encoder(Protocol):
    """A loaded model. `calls` counts forward calls."""

    calls: int
    identity: ModelIdentity

    @classmethod
    def identify(
        cls, settings: EncoderSettings, *, spec: EmbeddingSpec, threads: int, preview_root: Path
    ) -> ModelIdentity:
        """Return the identity of the model that these settings name, read from its files; no weights are loaded."""
        ...

    @classmethod
    def in_force(
        cls, settings: EncoderSettings, *, spec: EmbeddingSpec, threads: int, preview_root: Path
    ) -> EmbeddingSpec:
        """Return the spec with these settings and what the model's configuration adds; no weights are needed."""
        ...

    @classmethod
    def look_up(
        cls, settings: EncoderSettings, *, spec: EmbeddingSpec, threads: int, preview_root: Path
    ) -> ModelIdentity | None:
        """Find the model without downloading its weights; return its identity if all its files are on this machine."""
        ...

    @classmethod
    def load(cls, settings: EncoderSettings, *, spec: EmbeddingSpec, threads: int, preview_root: Path) -> Self:
        """Load and check the model. Raises ModelUnusable for missing or mismatched weights."""
        ...

    def prepare(self, item: "np.ndarray | str") -> Prepared:
        """Prepare one item on the CPU; thread-safe. Takes uint8 (H, W, 3) for pixel kinds, text for caption kinds."""
        ...

    def encode(self, batch: Sequence[Prepared]) -> "list[np.ndarray]":
        """Call the model once on items of one group; return arrays in the stored shape and dtype, in order."""
        ...

    def close(self) -> None:
        """Free the model's memory."""
        ...
