"""The main job as the command line runs it: the same assets in the same instance as the UI, in as few runs as can be.

    survey ─> register partitions ─> embedding runs over ranges of images ─> one run for records, shards and checks

Belongs here: which runs a command needs, and what they did.
Belongs elsewhere: what one run does (assets/), how a run of ours is started (dagster_project/runs.py), printing (cli/).
"""

import time
from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import dagster as dg

from assets.partitions import IMAGES_PER_RUN, buckets, images
from dagster_project.instance import open_instance
from dagster_project.partitions import register_images
from dagster_project.runs import RunOutcome, run_here
from imagemill.embedding_specs import EmbeddingSpec, embedding_specs
from imagemill.layout import DataRoot
from imagemill.ledger import Ledger
from imagemill.pipeline.facts import adopt_captions
from imagemill.pipeline.plan import images_with_work
from imagemill.pipeline.ranges import plan_ranges
from imagemill.pipeline.scan import survey
from resources.data_root import DataRootResource, config_of
from resources.encoders import Encoders


@dataclass(slots=True)
class Work:
    """What one command has done so far.

    `counts`: per asset, counters of its runs. `checks`: check name → passed. `error`: text of the first run that failed.
    """

    root: DataRoot
    instance: dg.DagsterInstance
    began: float = field(default_factory=time.monotonic)
    outcomes: list[RunOutcome] = field(default_factory=list)

    @property
    def run_ids(self) -> list[str]:
        return [outcome.run_id for outcome in self.outcomes]

    @property
    def error(self) -> str | None:
        return next((outcome.error for outcome in self.outcomes if outcome.error), None)

    @property
    def interrupted(self) -> int | None:
        """Number of the signal that stopped a run, if one did."""
        return next((outcome.signal for outcome in self.outcomes if outcome.signal), None)

    def seconds(self) -> float:
        return time.monotonic() - self.began

    def counts(self) -> dict[str, dict[str, int]]:
        with Ledger(self.root.ledger) as ledger:
            return ledger.counts(self.run_ids)

    def checks(self) -> dict[str, bool]:
        return {name: passed for outcome in self.outcomes for name, passed in outcome.checks.items()}

    @property
    def encoders(self) -> Encoders:
        data_root = DataRootResource(path=str(self.root.path), config_file=None)
        return Encoders(data_root=data_root, overrides={})

    # ---- the two halves

    def embed(self, specs: Sequence[EmbeddingSpec], *, limit: int | None = None) -> None:
        """Embed what is missing, invalid or stale, in name order, a few thousand images per run."""
        for spec in specs:
            self.encoders.check_recorded(spec)
        with Ledger(self.root.ledger) as ledger:
            scan = survey(self.root.approved, ledger)
            adopt_captions(self.root.stage2_jsonl, scan, ledger)
            wanted = images_with_work(specs, self.root.derived, scan, ledger)[:limit]
            if limit is None:
                wanted = sorted({*wanted, *self._unreported(specs, ledger, scan.sources)})
        register_images(self.instance, scan.sources, scan)
        assert images.name
        for part in plan_ranges(self.instance.get_dynamic_partitions(images.name), wanted, IMAGES_PER_RUN):
            if self.interrupted or self._stopped():
                return
            up_to = {"up_to": wanted[-1]} if limit else {}
            self._run(
                [spec.kind for spec in specs],
                deferred=True,
                partition_range=(part.first, part.last),
                run_config={"ops": {spec.kind: {"config": up_to} for spec in specs}},
            )

    def _unreported(self, specs: Sequence[EmbeddingSpec], ledger: Ledger, present: Container[str]) -> set[str]:
        """Images with a file that Dagster has not heard of: the last events before a kill, or a history that was removed."""
        missing: set[str] = set()
        for spec in specs:
            reported = self.instance.get_materialized_partitions(dg.AssetKey(spec.kind))
            missing.update(image_id for image_id, _ in ledger.files(spec.kind) if image_id not in reported)
        return {image_id for image_id in missing if image_id in present}

    def _stopped(self) -> bool:
        """A run ended by something other than single images: the next range would meet the same."""
        return any(outcome.failures and not outcome.only_images_failed for outcome in self.outcomes)

    def publish(self) -> None:
        """Write the records, and the shards of every bucket whose samples changed."""
        keys = buckets.get_partition_keys()
        self._run(["stage2_jsonl", "bucket_shards"], partition_range=(keys[0], keys[-1]))

    def write_records(self) -> None:
        """Write the records; after an interrupt what is finished, without opening another image."""
        self._run(["stage2_jsonl"], run_config=_config("stage2_jsonl", complete=not self.interrupted))

    def pack(self, chosen: Sequence[str], **config: Any) -> None:
        """Write the shards of these buckets. Only they are reported, whatever lies between the first and the last."""
        self._run(
            ["bucket_shards"],
            partition_range=(chosen[0], chosen[-1]),
            deferred=True,
            run_config=_config("bucket_shards", only=list(chosen), **config),
        )

    def _run(self, assets: Sequence[str], **how: Any) -> None:
        self.outcomes.append(run_here(self.instance, assets, **how))


def _config(asset: str, **given: Any) -> dict[str, Any]:
    """Run configuration of one asset, without what was left to its default."""
    return {"ops": {asset: {"config": {name: value for name, value in given.items() if value is not None}}}}


@contextmanager
def open_work(root: DataRoot) -> Iterator[Work]:
    """A data root with its Dagster history, for one command. A wrong configuration is refused before anything begins."""
    config_of(root)
    with open_instance(root) as instance:
        yield Work(root, instance)


def chosen_specs(passes: Sequence[str]) -> list[EmbeddingSpec]:
    """The specs of these pass names; all of them where none is named, or `all` is."""
    if not passes or "all" in passes:
        return list(embedding_specs())
    return [spec for spec in embedding_specs() if spec.pass_name in passes]
