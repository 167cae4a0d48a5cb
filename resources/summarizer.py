"""Which summarizer Stage-A uses in this deployment: the vision-language model, or `MODULE:CLASS`, as configured or as a run says.

Belongs here: the choice, its settings, its identity.
Belongs elsewhere: what a summarizer is (imagemill/models.py), how a worker makes one (imagemill/encoders/recipes.py), models
(imagemill/encoders/vlm.py), who calls it (imagemill/pipeline/stage_a/worker.py).
Spec: docs/spec/stage-a.md#summarizers
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import dagster as dg
import msgspec
from pydantic import Field

from imagemill.config import TRANSFORMERS, SummarizerSettings, check_kind
from imagemill.encoders.prompts import Prompts
from imagemill.encoders.recipes import import_class, make_class, make_vlm
from imagemill.models import Summarizer, class_identity
from imagemill.store.provenance import ModelIdentity
from imagemill.store.trust import SUMMARIZER, config_demands, refuse_untrusted
from imagemill.text.settings import convert_settings
from resources.data_root import DataRootResource
from resources.vlm import vlm_identity

PREVIEW_NOTE = "preview model: these summaries describe nothing"


class SummarizerResource(dg.ConfigurableResource):
    """The summarizer of a run."""

    data_root: dg.ResourceDependency[DataRootResource]
    kind: str | None = Field("", description="`transformers` or `MODULE:CLASS`; empty: as imagemill.yaml says.")
    overrides: dict[str, Any] = Field(
        {}, description="Fields of `summarizer` that differ from imagemill.yaml in this run: model, temperature, …"
    )

    def settings(self) -> SummarizerSettings:
        """Return the file's settings with this run's differences.

        Raises:
            WrongUsage: an unknown field or a bad value.
            NotTrusted: the data root's own file names a class, and the user has not consented to it.
        """
        where = "run configuration, resources.summarizer"
        said = {**self.overrides, **({"kind": self.kind} if self.kind else {})}
        base = msgspec.to_builtins(self.data_root.session.config.summarizer)
        settings = convert_settings({**base, **said}, SummarizerSettings, where=where)
        check_kind(settings.kind, where=where)
        if "kind" not in said:
            self._refuse_untrusted_class()
        return settings

    def _refuse_untrusted_class(self) -> None:
        """Raises NotTrusted if the data root's own file names a class and the user has not consented."""
        if file := self.data_root.own_config_file():
            demands = [demand for demand in config_demands(file) if demand.setting == SUMMARIZER]
            refuse_untrusted(demands, self.data_root.root(), "name the class by --summarizer, or a file by --config")

    def identity(self, mission: str) -> str:
        """What makes two summarizers the same for this mission: model, prompt and settings, or class."""
        made_by = self.made_by(mission)
        if made_by is None:
            return class_identity(import_class(self.settings().kind))
        return f"{made_by.kind}:{made_by.key}"

    def made_by(self, mission: str) -> ModelIdentity | None:
        """The model with this mission's prompt, read from its files; None for a class. Raises ModelUnusable."""
        settings = self.settings()
        if settings.kind != TRANSFORMERS:
            return None
        return vlm_identity(self.data_root, settings, "summarizer", Prompts.read(settings.prompts).of(mission))

    def maker(self, mission: str) -> dict[str, str]:
        """Who makes the summaries, for people: `summarizer`; of a model also its `revision` and `key`, and whether it is none.

        Raises:
            ModelUnusable, WrongUsage, MissingInput: it is not there, as far as its files and its prompt tell.
        """
        made_by = self.made_by(mission)
        if made_by is None:
            return {"summarizer": self.identity(mission)}
        known = {"summarizer": made_by.model, "revision": made_by.revision, "key": made_by.key}
        known["preview"] = PREVIEW_NOTE if made_by.preview else None
        return {name: value for name, value in known.items() if value}

    def factory(self, processes: int = 1) -> Callable[[], Summarizer]:
        """Picklable; makes the summarizer in the process that will use it. A class that is not there is told here.

        Args:
            processes: how many on this machine will each make one: they share its threads.
        """
        settings = self.settings()
        if settings.kind != TRANSFORMERS:
            import_class(settings.kind)
            return partial(make_class, settings.kind)
        threads = max(self.data_root.session.config.model_threads // processes, 1)
        return partial(
            make_vlm, settings, Prompts.read(settings.prompts), threads, self.data_root.root().preview_models
        )
