"""Captions by machines that share no folder with this one: images travel, texts return.

There, a `CaptionWorker` without folders asks the model. The general part is in pipeline/remote.py.
Spec: docs/spec/engines.md#what-travels
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from imagemill.config import VlmSettings
from imagemill.domain.encoder_settings import settings_on_nodes
from imagemill.domain.inputs import ColorSetting
from imagemill.errors import ModelMismatch
from imagemill.fs.fingerprints import signature_bytes
from imagemill.fs.folders import SentFolder
from imagemill.models import CAPTIONER, Captioner
from imagemill.pipeline.remote import About, Parcel, about_here
from imagemill.pipeline.stage2.caption import CaptionedImage, CaptionJob, CaptionWorker, lost_caption
from imagemill.pipeline.stage2.sent_images import SentImage, SentImagesWorker, image_to_send
from imagemill.store.provenance import ModelIdentity, differing_facts

_JOB_BYTES = 1024


@dataclass(frozen=True, kw_only=True)
class CaptionRecipe:
    """Builds the worker on any machine that has the weights.

    Attributes:
        make: takes settings, prompt, threads and the folder of preview models; returns the model.
        identify: takes the same; returns the identity of the model with its prompt, read from its files.
        settings: of the captioner.
        prompt: its text.
        threads: of the model's arithmetic.
        images_per_call: most images in one call of the model.
        decode_threads: that open images.
        decode_ahead_pixels: most pixels of images opened ahead of the model.
        color: how pixels are read.
    """

    make: Callable[[VlmSettings, str, int, Path], Captioner]
    identify: Callable[[VlmSettings, str, int, Path], ModelIdentity]
    settings: VlmSettings
    prompt: str
    threads: int
    images_per_call: int
    decode_threads: int
    decode_ahead_pixels: int
    color: ColorSetting

    def identity(self, preview_root: Path) -> ModelIdentity:
        """Return the identity of the model on this machine. Raises ModelUnusable."""
        return self.identify(self.settings, self.prompt, self.threads, preview_root)

    def __call__(self) -> "RemoteCaptionWorker":
        """Return the worker. The model is loaded when the first image has come."""
        return RemoteCaptionWorker(self)


class RemoteCaptionWorker(SentImagesWorker):
    """The worker, on the other machine."""

    def __init__(self, recipe: CaptionRecipe) -> None:
        super().__init__()
        self.recipe = recipe
        self.worker = CaptionWorker(
            approved=SentFolder(),
            captioner=partial(recipe.make, recipe.settings, recipe.prompt, recipe.threads, self.preview_root),
            images_per_call=recipe.images_per_call,
            decode_threads=recipe.decode_threads,
            decode_ahead_pixels=recipe.decode_ahead_pixels,
            color=recipe.color,
        )

    def about(self) -> About:
        """Return the facts on which the captions depend; the identity of the model is read from its files."""
        return about_here(self.recipe.identity(self.preview_root), self.recipe.images_per_call)


class CaptionPass:
    """The pass, as the process that owns the data root sees it.

    Args:
        options: arguments of a CaptionWorker that sees the data root.
        decode_threads: threads of a worker that open images.
        gpus: GPUs of a worker, by name of the pass.
        identify: as for CaptionRecipe.
    """

    def __init__(
        self,
        options: Mapping[str, Any],
        decode_threads: int,
        gpus: Mapping[str, float],
        *,
        identify: Callable[[VlmSettings, str, int, Path], ModelIdentity],
    ) -> None:
        self.modules = ()
        self.gpus = gpus.get(CAPTIONER, 0)
        self._approved = options["approved"]
        captioner: partial[Any] = options["captioner"]
        settings, prompt, threads, self._preview_root = captioner.args
        self.recipe = CaptionRecipe(
            make=captioner.func,
            identify=identify,
            settings=settings_on_nodes(settings, self.gpus),
            prompt=prompt,
            threads=threads,
            images_per_call=options["images_per_call"],
            decode_threads=decode_threads,
            decode_ahead_pixels=options["decode_ahead_pixels"],
            color=options["color"],
        )

    @cached_property
    def _identity(self) -> ModelIdentity:
        """Identity of the model on this machine."""
        return self.recipe.identity(self._preview_root)

    @property
    def model_batch(self) -> int:
        """Images of a model call."""
        return self.recipe.images_per_call

    def weight(self, job: CaptionJob) -> int:
        """Return the bytes that a job will send."""
        return _JOB_BYTES + signature_bytes(job.stat)

    def name_of(self, key: CaptionJob | CaptionedImage) -> str:
        """Return the image id of a job or of a row."""
        return key.job.image_id if isinstance(key, CaptionedImage) else key.image_id

    def send(self, job: CaptionJob) -> CaptionedImage | Parcel:
        """Pack the image of a job."""
        try:
            image = image_to_send(self._approved, job)
        except Exception as error:  # disk error: the next run tries this image again
            return CaptionedImage(job, "failed", reason="read_error", detail=f"{type(error).__name__}: {error}")
        return Parcel(job, SentImage(job, image), image.nbytes)

    def fits(self, about: About) -> bool:
        """Return whether a worker has the model and the prompt of this machine."""
        return not differing_facts(self._identity, about.identity)

    def agree(self, about: About) -> None:
        """Check the model. Raises ModelMismatch for another one than that of this machine, whose key captions get."""
        if fields := differing_facts(self._identity, about.identity):
            raise ModelMismatch(
                f"captioner: the model on the nodes is not that of this machine; it differs in {', '.join(fields)}",
                do="give all machines the same model",
            )

    def receive(self, row: CaptionedImage) -> CaptionedImage:
        """Return the row, which carries nothing to store."""
        return row

    def parts(self, job: CaptionJob) -> list[CaptionJob]:
        """Return the job, which cannot be divided."""
        return [job]

    def lost(self, job: CaptionJob, how: str) -> CaptionedImage:
        """Return the row of a job that ended its worker each time."""
        return lost_caption(job, how)
