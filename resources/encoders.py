"""How each kind is encoded in this deployment: the configuration file, and what a run says differently.

Belongs here: settings and what a worker is built with.
Belongs elsewhere: the models (imagemill/encoders/), which are loaded in the worker.
"""

from typing import Any

import dagster as dg
import msgspec
from pydantic import Field

from imagemill.config import EncoderSettings
from imagemill.embedding_specs import T5, EmbeddingSpec
from imagemill.encoding import Encoder
from imagemill.errors import WrongUsage
from imagemill.formats.npy import NpyStore
from imagemill.pipeline.stage2.facts import Masks
from imagemill.provenance import ModelIdentity, guard_identity, read_identity
from imagemill.store.ledger import Ledger
from resources.data_root import DataRootResource


class Encoders(dg.ConfigurableResource):
    """Encoder settings per embedding kind."""

    data_root: dg.ResourceDependency[DataRootResource]
    overrides: dict[str, dict[str, Any]] = Field(
        {}, description="Per embedding kind, fields of its settings that differ from imagemill.yaml in this run."
    )

    def settings(self, spec: EmbeddingSpec) -> EncoderSettings:
        """The file's settings with this run's overrides. Raises WrongUsage for an unknown field or a bad value."""
        base = msgspec.to_builtins(self.data_root.config().encoder(spec))
        try:
            return msgspec.convert({**base, **self.overrides.get(spec.kind, {})}, EncoderSettings)
        except msgspec.ValidationError as error:
            raise WrongUsage(
                f"{spec.kind}: {error}", where="run configuration, resources.encoders.overrides"
            ) from error

    def worker_options(self, spec: EmbeddingSpec) -> dict[str, Any]:
        """What an EmbedWorker of this kind is built with."""
        root, config = self.data_root.root(), self.data_root.config()
        return {
            "spec": spec,
            "approved": root.approved,
            "store": NpyStore(root.derived / spec.folder, spec),
            "ledger": root.ledger,
            "preview_root": root.preview_models,
            "settings": self.settings(spec),
            "threads": config.model_threads,
            "decode_threads": config.decode_threads,
            "write_threads": config.write_threads,
            "decode_ahead_pixels": config.decode_ahead_pixels,
        }

    def check_recorded(self, spec: EmbeddingSpec) -> None:
        """Refuse a configured model that is not the one that made the files, even where nothing is left to make.

        The model's files are only read where the names differ from the recorded ones.
        """
        with self.data_root.ledger() as ledger:
            self._check_recorded(spec, ledger)

    def _check_recorded(self, spec: EmbeddingSpec, ledger: Ledger) -> None:
        settings, recorded = self.settings(spec), read_identity(ledger, spec.kind)
        if recorded is None or (recorded.model, recorded.revision or settings.revision) == (
            settings.model,
            settings.revision,
        ):
            return
        guard_identity(ledger, self.identify(spec))

    def identify(self, spec: EmbeddingSpec) -> ModelIdentity:
        """Return the identity of the configured model, read from its files. Raises ModelUnusable."""
        return self.encoder_class(spec).identify(self.settings(spec), **self._given(spec))

    def encoder_class(self, spec: EmbeddingSpec) -> type[Encoder]:
        return spec.encoder_class()

    def masks(self) -> Masks:
        """The T5 tokenizer alone, as a function from captions to masks."""
        tokenizer = T5.encoder_class().tokenizer(self.settings(T5), **self._given(T5))
        return tokenizer.masks

    def _given(self, spec: EmbeddingSpec) -> dict[str, Any]:
        root = self.data_root.root()
        return {"spec": spec, "threads": self.data_root.config().model_threads, "preview_root": root.preview_models}
