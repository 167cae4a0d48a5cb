"""What a summarizer is, for the rooms that use one without importing torch.

    class Mine:                                      # --summarizer module:Mine, made without arguments
        def summarize(self, images, mission):        # images[i].name, images[i].image
            return [f"{image.name}: …" for image in images]

Belongs here: the protocol, the value it is given, what makes two summarizers the same.
Belongs elsewhere: the model (encoders/), who calls it (pipeline/summarize.py).
Source: CONTRACTS section 5, "The summarizer is replaceable".
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from PIL import Image


class NamedImage(NamedTuple):
    """One image: its file's name, and its pixels (RGB, upright)."""

    name: str
    image: Image.Image


class Summarizer(Protocol):
    """One loaded model, or whatever stands for it."""

    def summarize(self, images: Sequence[NamedImage], mission: str) -> list[str]:
        """One answer per image, in order."""
        ...


def class_identity(summarizer: type[Any]) -> str:
    """By what a class is told from others, as `MODULE:CLASS`; its attribute `identity`, where it has one, is added."""
    name = f"{summarizer.__module__}:{summarizer.__qualname__}"
    stated = getattr(summarizer, "identity", None)
    return f"{name}:{stated}" if isinstance(stated, str) else name
