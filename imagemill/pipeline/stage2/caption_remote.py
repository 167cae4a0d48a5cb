"""Captions by machines that share no folder with this one: images travel, texts return.

There, a `CaptionWorker` without folders asks the model. The general part is in pipeline/remote.py.
Spec: docs/spec/engines.md#what-travels
"""

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from imagemill.config import VlmSettings
from imagemill.domain.inputs import ColorSetting
from imagemill.errors import ModelMismatch
from imagemill.fs.fingerprints import signature_bytes
from imagemill.fs.folders import SentFolder, file_bytes
from imagemill.models import CAPTIONER, Captioner
from imagemill.pipeline.remote import About, Parcel
from imagemill.pipeline.software import sources, versions
from imagemill.pipeline.stage2.caption import CaptionedImage, CaptionJob, CaptionWorker, lost_caption
from imagemill.store.provenance import ModelIdentity, differing_facts

# The captioner's entry in `engine.gpus`.
POOL = CAPTIONER

_JOB_BYTES = 1024


class SentImage(NamedTuple):
    """A job as it travels. `image`: the bytes of the file, uint8 (n,)."""

    job: CaptionJob
    image: np.ndarray


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


class RemoteCaptionWorker:
    """The worker, on the other machine."""

    def __init__(self, recipe: CaptionRecipe) -> None:
        self.recipe = recipe
        self._previews = tempfile.TemporaryDirectory(prefix="imagemill-")
        self._stopped = False
        self._worker = CaptionWorker(
            approved=SentFolder(),
            captioner=partial(recipe.make, recipe.settings, recipe.prompt, recipe.threads, Path(self._previews.name)),
            images_per_call=recipe.images_per_call,
            decode_threads=recipe.decode_threads,
            decode_ahead_pixels=recipe.decode_ahead_pixels,
            color=recipe.color,
        )

    def about(self) -> About:
        """Return the facts on which the captions depend; the identity of the model is read from its files."""
        identity = self.recipe.identity(Path(self._previews.name))
        return About(
            node="",
            sources=sources(),
            versions=versions(),
            device=identity.device.partition(":")[0],
            batch_size=str(self.recipe.images_per_call),
            identity=identity,
            model=identity.facts,
        )

    def stream(self, payloads: Sequence[SentImage]) -> Iterator[CaptionedImage]:
        """Yield one row per job, in order."""
        self._worker.approved = SentFolder({sent.job.file_name: sent.image.tobytes() for sent in payloads})
        yield from self._worker.stream(job for job in [sent.job for sent in payloads] if not self._stopped)

    def stop(self) -> None:
        """Take no further job."""
        self._stopped = True

    def close(self) -> None:
        """Free the memory of the model."""
        self._worker.close()
        self._previews.cleanup()


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
        self.gpus = gpus.get(POOL, 0)
        self._approved = options["approved"]
        captioner: partial[Any] = options["captioner"]
        settings, prompt, threads, self._preview_root = captioner.args
        if not self.gpus and settings.device == "auto":  # Ray hides no GPU from a worker that asks for none
            settings = msgspec.structs.replace(settings, device="cpu")
        self._jobs: dict[str, CaptionJob] = {}
        self.recipe = CaptionRecipe(
            make=captioner.func,
            identify=identify,
            settings=settings,
            prompt=prompt,
            threads=threads,
            images_per_call=options["images_per_call"],
            decode_threads=decode_threads,
            decode_ahead_pixels=options["decode_ahead_pixels"],
            color=options["color"],
        )

    @property
    def model_batch(self) -> int:
        """Images of a model call."""
        return self.recipe.images_per_call

    def here(self) -> tuple[dict[str, str], dict[str, str]]:
        """Return the sources and versions of this machine."""
        return sources(), versions()

    def weight(self, job: CaptionJob) -> int:
        """Return the bytes that a job will send."""
        return _JOB_BYTES + signature_bytes(job.stat)

    def name_of(self, key: CaptionJob | CaptionedImage) -> str:
        """Return the image id of a job or of a row."""
        return key.job.image_id if isinstance(key, CaptionedImage) else key.image_id

    def send(self, job: CaptionJob) -> CaptionedImage | Parcel:
        """Pack the image of a job."""
        try:
            image = np.frombuffer(file_bytes(self._approved / job.file_name, job.stat), np.uint8)
        except Exception as error:  # disk error: the next run tries this image again
            return CaptionedImage(job, "failed", reason="read_error", detail=f"{type(error).__name__}: {error}")
        self._jobs[job.image_id] = job
        return Parcel(job, SentImage(job, image), image.nbytes)

    def fits(self, about: About) -> bool:
        """Return whether a worker has the model and the prompt of this machine."""
        return not differing_facts(self.recipe.identity(self._preview_root), about.identity)

    def agree(self, about: About) -> None:
        """Check the model. Raises ModelMismatch for another one than that of this machine, whose key captions get."""
        mine = self.recipe.identity(self._preview_root)
        if fields := differing_facts(mine, about.identity):
            raise ModelMismatch(
                f"captioner: the model on the nodes is not that of this machine; it differs in {', '.join(fields)}",
                do="give all machines the same model",
            )

    def receive(self, row: CaptionedImage) -> CaptionedImage:
        """Return the row with the job as it is known here."""
        return replace(row, job=self._jobs.pop(row.job.image_id))

    def lost(self, job: CaptionJob, how: str) -> CaptionedImage:
        """Return the row of a job that ended its worker each time."""
        self._jobs.pop(job.image_id, None)
        return lost_caption(job, how)
