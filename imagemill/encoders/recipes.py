"""Recipes for making a summarizer in a worker process: picklable and small, because torch is imported only there.

    SummarizerClass("module:Mine")                         a class given by the user
    SummarizerModel(settings, prompts, threads, root, devices)    the vision-language model, one per process
    partial(make_captioner, settings, prompt, threads, root)    the same model, captioning

The summarizer of a deployment is chosen in resources/summarizer.py; the model is in encoders/vlm.py.

Spec: docs/spec/stage-a.md#summarizers
"""

import hashlib
import importlib
import inspect
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import msgspec

from imagemill.config import VlmSettings
from imagemill.domain.encoder_settings import settings_on_nodes
from imagemill.encoders.prompts import Prompts
from imagemill.errors import ImagemillError, ModelUnusable, WrongUsage
from imagemill.models import Captioner, Summarizer, class_identity
from imagemill.store.provenance import ModelIdentity

_HINT = (
    "give MODULE:CLASS, a class on PYTHONPATH whose constructor takes no arguments and that has "
    "summarize(images, mission) -> list[str]"
)


@dataclass(frozen=True)
class SummarizerModel:
    """Makes the vision-language model as the summarizer of a rank. Ranks of one process and device share its weights.

    Attributes:
        settings: of the model.
        prompts: of the missions.
        threads: CPU threads of the model.
        preview_root: folder of preview models.
        devices: of the ranks, in turn.
    """

    settings: VlmSettings
    prompts: Prompts
    threads: int
    preview_root: Path
    devices: Sequence[str]

    @property
    def modules(self) -> tuple[str, ...]:
        """Modules of other packages that make the summaries: none."""
        return ()

    def __call__(self, rank: int) -> Summarizer:
        """Return the summarizer of a rank. Raises ModelUnusable if the model does not exist, or is of another kind."""
        from imagemill.encoders.vlm import SUMMARIZER, VlmSummarizer, held

        settings = msgspec.structs.replace(self.settings, device=self.devices[rank % len(self.devices)])
        return VlmSummarizer(held(settings, SUMMARIZER, self.threads, self.preview_root), self.prompts)

    def identity(self, mission: str) -> ModelIdentity:
        """Return the identity of the model with a mission's prompt, read from its files. Raises ModelUnusable."""
        return identify_vlm("summarizer", self.settings, self.prompts.of(mission), self.threads, self.preview_root)

    def elsewhere(self, preview_root: Path, gpus: float) -> "SummarizerModel":
        """Return the recipe for a worker on another machine: its folder of preview models, and how many GPUs it has."""
        settings = settings_on_nodes(self.settings, gpus)
        return replace(self, settings=settings, preview_root=preview_root, devices=(settings.device,))


def make_captioner(settings: VlmSettings, prompt: str, threads: int, preview_root: Path) -> Captioner:
    """Return the vision-language model as a captioner. Raises ModelUnusable."""
    from imagemill.encoders.vlm import CAPTIONER, VlmCaptioner, held

    return VlmCaptioner(held(settings, CAPTIONER, threads, preview_root), prompt)


def identify_vlm(
    section: Literal["summarizer", "captioner"], settings: VlmSettings, prompt: str, threads: int, preview_root: Path
) -> ModelIdentity:
    """Return the identity of a model with its prompt, read from its files; no weights are loaded. Raises ModelUnusable.

    Args:
        section: section of imagemill.yaml, named in errors.
        settings: of the model.
        prompt: text of the prompt.
        threads: CPU threads of the model.
        preview_root: folder of preview models.
    """
    from imagemill.encoders.vlm import CAPTIONER, SUMMARIZER, VisionLanguageModel

    return VisionLanguageModel.identify(
        settings,
        spec=SUMMARIZER if section == "summarizer" else CAPTIONER,
        threads=threads,
        preview_root=preview_root,
        prompt_sha256=hashlib.sha256(prompt.encode()).hexdigest(),
    )


@dataclass(frozen=True)
class SummarizerClass:
    """Makes the summarizer of a rank from the name of its class, `MODULE:CLASS`, without arguments."""

    named: str

    @property
    def modules(self) -> tuple[str, ...]:
        """Modules of other packages that make the summaries."""
        return (self.named.partition(":")[0],)

    def __call__(self, rank: int) -> Summarizer:
        """Return the summarizer of a rank. Raises ModelUnusable if its constructor raises."""
        try:
            return import_class(self.named)()
        except ImagemillError:
            raise
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            raise ModelUnusable(
                f"summarizer {self.named} cannot be made", why=why, do="correct its __init__"
            ) from error

    def identity(self, mission: str) -> str:
        """Return the identity of the class. Raises WrongUsage, as `import_class`."""
        return class_identity(import_class(self.named))

    def elsewhere(self, preview_root: Path, gpus: float) -> "SummarizerClass":
        """Return the recipe for a worker on another machine: the same."""
        return self


def import_class(named: str) -> type[Any]:
    """Return the class that `MODULE:CLASS` names. The current folder is searched only if it is on PYTHONPATH.

    Raises:
        WrongUsage: no such module or class, a module that cannot be imported, or a class that is called in another way.
    """
    module, _, name = named.partition(":")
    try:
        found = getattr(importlib.import_module(module), name)
    except Exception as error:  # importing runs the user's code, which may raise anything
        raise WrongUsage(f"no summarizer {named!r}: {type(error).__name__}: {error}", do=_HINT) from error
    if not isinstance(found, type) or not callable(getattr(found, "summarize", None)):
        raise WrongUsage(f"{named!r} is not a summarizer class", do=_HINT)
    if wrong := _refused(found) or _refused(inspect.getattr_static(found, "summarize"), "self", "images", "mission"):
        raise WrongUsage(f"{named!r} cannot be called like a summarizer: {wrong}", do=_HINT)
    return found


def _refused(called: Any, *arguments: str) -> str | None:
    """Return why it does not accept these arguments; None if it does, or has no signature."""
    if not isinstance(called, type) and not inspect.isfunction(called):
        return None
    try:
        signature = inspect.signature(called)
    except (TypeError, ValueError):  # a class written in C
        return None
    try:
        signature.bind(*arguments)
    except TypeError as error:
        return f"{called.__qualname__}{signature}: {error}"
    return None
