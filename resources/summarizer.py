"""The summarizer of Stage-A in this deployment: a vision-language model or `MODULE:CLASS`, from the configuration or a run.

The protocol is in imagemill/models.py, construction in a worker in imagemill/encoders/recipes.py, models in
imagemill/encoders/vlm.py, and the caller in imagemill/pipeline/stage_a/worker.py.
Spec: docs/spec/stage-a.md#summarizers
"""

from typing import Any

import dagster as dg
import msgspec
from pydantic import Field

from imagemill.config import TRANSFORMERS, SummarizerSettings, check_kind
from imagemill.encoders.prompts import Prompts
from imagemill.encoders.recipes import SummarizerClass, SummarizerModel, import_class
from imagemill.models import class_identity
from imagemill.store.provenance import ModelIdentity
from imagemill.store.trust import SUMMARIZER, config_demands, refuse_untrusted
from imagemill.text.settings import convert_settings
from resources.data_root import DataRootResource
from resources.devices import devices_in_use
from resources.vlm import vlm_identity

PREVIEW_NOTE = "preview model: these summaries do not describe the images"


class SummarizerResource(dg.ConfigurableResource):
    """The summarizer of a run."""

    data_root: dg.ResourceDependency[DataRootResource]
    kind: str | None = Field("", description="`transformers` or `MODULE:CLASS`; empty: the kind in imagemill.yaml.")
    overrides: dict[str, Any] = Field(
        {}, description="Fields of `summarizer` that differ from imagemill.yaml in this run: model, temperature, …"
    )

    def settings(self) -> SummarizerSettings:
        """Return the file's settings with this run's overrides.

        Raises:
            WrongUsage: for an unknown field or a bad value.
            NotTrusted: if the data root's own file names a class, and the user has not consented to it.
        """
        where = "run configuration, resources.summarizer"
        given = {**self.overrides, **({"kind": self.kind} if self.kind else {})}
        base = msgspec.to_builtins(self.data_root.session.config.summarizer)
        settings = convert_settings({**base, **given}, SummarizerSettings, where=where)
        check_kind(settings.kind, where=where)
        if "kind" not in given:
            self._refuse_untrusted_class()
        return settings

    def _refuse_untrusted_class(self) -> None:
        """Raise NotTrusted if the data root's own file names a class and the user has not consented."""
        if file := self.data_root.own_config_file():
            demands = [demand for demand in config_demands(file) if demand.setting == SUMMARIZER]
            refuse_untrusted(demands, self.data_root.root(), "name the class by --summarizer, or a file by --config")

    def identity(self, mission: str) -> str:
        """Return the identity of the summarizer for this mission: model, prompt and settings, or class."""
        made_by = self.made_by(mission)
        if made_by is None:
            return class_identity(import_class(self.settings().kind))
        return f"{made_by.kind}:{made_by.key}"

    def former_identity(self, mission: str) -> str | None:
        """Return the identity that earlier releases gave to the summarizer for this mission; None for a class."""
        made_by = self.made_by(mission)
        return made_by and f"{made_by.kind}:{made_by.former.key}"

    def made_by(self, mission: str) -> ModelIdentity | None:
        """Return the identity of the model with this mission's prompt, from its files; None for a class. Raises ModelUnusable."""
        settings = self.settings()
        if settings.kind != TRANSFORMERS:
            return None
        return vlm_identity(self.data_root, settings, "summarizer", Prompts.read(settings.prompts).of(mission))

    def metadata(self, mission: str) -> dict[str, str]:
        """Return metadata about the summarizer: `summarizer`; for a model also `revision`, `key`, and a note if it is a preview.

        Raises:
            ModelUnusable, WrongUsage, MissingInput: if its files or its prompt are missing or unusable.
        """
        made_by = self.made_by(mission)
        if made_by is None:
            return {"summarizer": self.identity(mission)}
        known = {"summarizer": made_by.model, "revision": made_by.revision, "key": made_by.key}
        known["preview"] = PREVIEW_NOTE if made_by.preview else None
        return {name: value for name, value in known.items() if value}

    def factory(self, processes: int = 1) -> SummarizerModel | SummarizerClass:
        """Return the picklable recipe that constructs the summarizer of a rank, in the process that uses it.

        A missing class, and a device that does not exist, raise here. With `devices`, ranks use them in turn.

        Args:
            processes: number of processes on this machine that construct one; they share the machine's threads.
        """
        settings = self.settings()
        if settings.kind != TRANSFORMERS:
            import_class(settings.kind)
            return SummarizerClass(settings.kind)
        config, preview_root = self.data_root.session.config, self.data_root.root().preview_models
        threads = max(config.model_threads // processes, 1)
        devices = devices_in_use(config, settings)
        return SummarizerModel(settings, Prompts.read(settings.prompts), threads, preview_root, devices)
