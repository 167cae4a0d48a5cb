"""Encoder settings of each kind: the configuration file with the overrides of a run.

The models are in imagemill/encoders/ and are loaded in the worker.
"""

from typing import Any

import dagster as dg
import msgspec
from pydantic import Field

from imagemill.domain.embedding_specs import T5, EmbeddingSpec
from imagemill.domain.encoder_settings import EncoderSettings
from imagemill.formats.npy import NpyStore
from imagemill.fs.folders import reads_ahead
from imagemill.fs.owners import owner_name
from imagemill.models import Encoder
from imagemill.pipeline.stage2.image_metadata import Masks
from imagemill.store.inputs import PixelRule
from imagemill.store.provenance import ModelIdentity, guard_identity, read_identity, read_recorded_models, spec_in_force
from imagemill.text.settings import convert_settings
from resources.data_root import DataRootResource
from resources.devices import devices_in_use


class Encoders(dg.ConfigurableResource):
    """Encoder settings per embedding kind."""

    data_root: dg.ResourceDependency[DataRootResource]
    overrides: dict[str, dict[str, Any]] = Field(
        {}, description="Per embedding kind, fields of its settings that differ from imagemill.yaml in this run."
    )

    def settings(self, spec: EmbeddingSpec) -> EncoderSettings:
        """Return the file's settings with this run's overrides; `dtype: auto` is that of the recorded model, if there is one.

        Raises WrongUsage for an unknown field or a bad value.
        """
        base = msgspec.to_builtins(self.data_root.session.config.encoder(spec))
        where = f"run configuration, resources.encoders.overrides.{spec.kind}"
        settings = convert_settings({**base, **self.overrides.get(spec.kind, {})}, spec.settings_class, where=where)
        recorded = read_identity(self.data_root.session.ledger, spec.kind) if settings.dtype == "auto" else None
        dtype = recorded.facts.get("compute_dtype", settings.dtype) if recorded else settings.dtype
        return msgspec.structs.replace(settings, dtype=dtype)

    def in_force(self, spec: EmbeddingSpec) -> EmbeddingSpec:
        """Return a kind with the contract of its recorded model; before the first file, of the configured one.

        Raises ModelUnusable if the configured model's files are needed for this and cannot be read.
        """
        given = self._given(spec)
        if not spec.model_names or read_identity(self.data_root.session.ledger, spec.kind):
            return given["spec"]
        return self.encoder_class(spec).in_force(self.settings(spec), **given)

    def worker_options(self, spec: EmbeddingSpec) -> dict[str, Any]:
        """Return the arguments of an EmbedWorker of this kind."""
        root, config, settings = self.data_root.root(), self.data_root.session.config, self.settings(spec)
        ledger, in_force = self.data_root.session.ledger, self.in_force(spec)
        return {
            "spec": in_force,
            "approved": root.approved,
            "store": NpyStore(root.derived / spec.folder, in_force),
            "recorded_models": read_recorded_models(ledger, spec.kind),
            "preview_root": root.preview_models,
            "empty_captions": root.empty_captions,
            "settings": settings,
            "threads": config.model_threads,
            "decode_threads": reads_ahead(root.approved, config.decoders),
            "write_threads": config.write_threads,
            "pixels": PixelRule.read(ledger),
            "decode_ahead_pixels": config.decode_ahead_pixels,
        }

    def options_of_devices(self, spec: EmbeddingSpec) -> list[dict[str, Any]]:
        """Return the arguments of the EmbedWorker of each device in use.

        Raises:
            WrongUsage: if a configured device does not exist.
        """
        options = self.worker_options(spec)
        devices = devices_in_use(self.data_root.session.config, options["settings"])
        # The files of several workers belong to this process, which publishes them.
        share = (
            {}
            if len(devices) == 1
            else {
                "owner": owner_name(),
                "decode_threads": max(1, options["decode_threads"] // len(devices)),
                "decode_ahead_pixels": max(1, options["decode_ahead_pixels"] // len(devices)),
            }
        )
        return [
            {**options, **share, "settings": msgspec.structs.replace(options["settings"], device=device)}
            for device in devices
        ]

    def check_recorded(self, spec: EmbeddingSpec) -> None:
        """Refuse a configured model that did not make the existing files, even if nothing is left to make.

        The model's files are read only if the names differ from the recorded ones.
        """
        ledger, settings = self.data_root.session.ledger, self.settings(spec)
        recorded = read_identity(ledger, spec.kind)
        if recorded is None:
            return
        in_force = spec.recorded(recorded.facts)
        same_model = (recorded.model, recorded.revision or settings.revision) == (settings.model, settings.revision)
        if not same_model or in_force.requested(settings).contract != in_force.contract:
            guard_identity(ledger, self.identify(spec))

    def look_up(self, spec: EmbeddingSpec) -> None:
        """Check the configured model before work begins: it exists, its configuration fits, and it is the recorded one.

        Weights are neither downloaded nor loaded. A model whose weights are not on this machine is compared after their download.

        Raises:
            WrongUsage: if a configured device does not exist.
            ModelUnusable: if the model does not exist, or is of another kind.
            ModelMismatch: if it is not the recorded model.
        """
        settings = self.settings(spec)
        devices_in_use(self.data_root.session.config, settings)
        identity = self.encoder_class(spec).look_up(settings, **self._given(spec))
        if identity is not None:
            read_recorded_models(self.data_root.session.ledger, spec.kind).check(identity)

    def identify(self, spec: EmbeddingSpec) -> ModelIdentity:
        """Return the identity of the configured model, read from its files. Raises ModelUnusable."""
        return self.encoder_class(spec).identify(self.settings(spec), **self._given(spec))

    def encoder_class(self, spec: EmbeddingSpec) -> type[Encoder]:
        """Return the encoder class of a kind."""
        return spec.encoder_class()

    def masks(self) -> Masks:
        """Return the function from captions to T5 masks, which needs only the tokenizer."""
        tokenizer = T5.encoder_class().tokenizer(self.settings(T5), **self._given(T5))
        return tokenizer.masks

    def _given(self, spec: EmbeddingSpec) -> dict[str, Any]:
        root = self.data_root.root()
        return {
            "spec": spec_in_force(spec, self.data_root.session.ledger, self.settings(spec)),
            "threads": self.data_root.session.config.model_threads,
            "preview_root": root.preview_models,
        }
