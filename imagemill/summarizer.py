"""What a summarizer and a captioner are, for the rooms that use one without importing torch.

    class Mine:                                      # --summarizer module:Mine, made without arguments
        def summarize(self, images, mission):        # images[i].name, images[i].image
            return [f"{image.name}: …" for image in images]

Belongs here: the protocol, the value it is given, what makes two summarizers the same.
Belongs elsewhere: the model (encoders/), who calls it (pipeline/batch_inference.py).
Source: CONTRACTS section 5, "The summarizer is replaceable".
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from PIL import Image

# The name of the captioner's provenance, and of the counts and problems of captions.
CAPTIONER = "captioner"


class NamedImage(NamedTuple):
    """One image: its file's name, and its pixels (RGB, upright)."""

    name: str
    image: Image.Image


class Summarizer(Protocol):
    """One loaded model, or whatever stands for it."""

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
    """By what a class is told from others, as `MODULE:CLASS`; its attribute `identity`, where it has one, is added."""
    name = f"{summarizer.__module__}:{summarizer.__qualname__}"
    stated = getattr(summarizer, "identity", None)
    return f"{name}:{stated}" if isinstance(stated, str) else name
