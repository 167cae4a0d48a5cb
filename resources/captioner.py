"""The captioner of images that have no caption. It is off unless imagemill.yaml enables it.

Images are selected in imagemill/pipeline/stage2/caption.py; the model is constructed in imagemill/encoders/recipes.py.
Spec: docs/spec/stage2.md#caption-sources
"""

from collections.abc import Iterable
from functools import partial
from typing import Any

import dagster as dg
import msgspec

from imagemill.config import CaptionerSettings
from imagemill.domain.embedding_specs import T5, mask_length
from imagemill.domain.encoder_settings import PREVIEW
from imagemill.encoders.prompts import caption_prompt
from imagemill.encoders.recipes import make_captioner
from imagemill.fs.folders import reads_ahead
from imagemill.inputs.scan import Scan
from imagemill.models import CAPTIONER
from imagemill.pipeline.stage2.caption import CaptionJob, caption_jobs
from imagemill.store.ledger import Ledger
from imagemill.store.provenance import ModelIdentity, spec_in_force
from resources.data_root import DataRootResource
from resources.devices import devices_in_use
from resources.vlm import vlm_identity


class CaptionerResource(dg.ConfigurableResource):
    """The captioner of a run."""

    data_root: dg.ResourceDependency[DataRootResource]

    def settings(self) -> CaptionerSettings:
        """Return the captioner's settings; `max_new_tokens` of a real model follows the text encoder's limit if it is not set."""
        settings = self.data_root.session.config.captioner
        if settings.max_new_tokens is not None or settings.model == PREVIEW:
            return settings
        # Room for the end of the sentence; the text encoder reads no more than its own limit.
        return msgspec.structs.replace(settings, max_new_tokens=2 * self._tokens())

    def _tokens(self) -> int:
        session = self.data_root.session
        return mask_length([spec_in_force(T5, session.ledger, session.config.encoder(T5))])

    def jobs(self, ids: Iterable[str], scan: Scan, ledger: Ledger, *, recaption: bool = False) -> list[CaptionJob]:
        """Return the images to caption; empty if the captioner is disabled.

        Args:
            ids: candidates.
            scan: scan of the approved folder.
            ledger: record of existing captions.
            recaption: also images captioned by another captioner, or by this one with another prompt or other settings.
        """
        settings = self.settings()
        if not settings.enabled:
            return []
        made_by = self.made_by() if recaption else None
        keys = made_by and {made_by.key, made_by.former.key}
        return caption_jobs(ids, scan, ledger, preview=settings.model == PREVIEW, replacing=keys)

    def made_by(self) -> ModelIdentity:
        """Return the identity of the model with its prompt, read from its files. Raises ModelUnusable."""
        settings = self.settings()
        identity = vlm_identity(self.data_root, settings, "captioner", caption_prompt(settings.prompt, self._tokens()))
        return msgspec.structs.replace(identity, kind=CAPTIONER)

    def options_of_devices(self) -> list[dict[str, Any]]:
        """Return the arguments of the CaptionWorker of each device in use. Raises WrongUsage for a device that does not exist."""
        config, settings = self.data_root.session.config, self.settings()
        devices = devices_in_use(config, settings)
        share = {"decode_threads": max(1, config.decoders // len(devices))}
        return [
            {**self._worker_options(msgspec.structs.replace(settings, device=device)), **share} for device in devices
        ]

    def _worker_options(self, settings: CaptionerSettings) -> dict[str, Any]:
        """Return the arguments of a CaptionWorker."""
        root, config = self.data_root.root(), self.data_root.session.config
        prompt = caption_prompt(settings.prompt, self._tokens())
        return {
            "approved": root.approved,
            "captioner": partial(make_captioner, settings, prompt, config.model_threads, root.preview_models),
            "images_per_call": settings.batch_size,
            "decode_threads": reads_ahead(root.approved, config.decoders),
            "decode_ahead_pixels": config.decode_ahead_pixels,
            "color": self.data_root.session.inputs.color,
        }
