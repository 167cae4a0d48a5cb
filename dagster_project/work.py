"""The main job as the command line runs it: the same assets in the same instance as the UI, in as few runs as can be.

    survey ─> register partitions ─> embedding runs over ranges of images ─> one run for records, shards and checks

Belongs here: which runs a command needs, and what they did.
Belongs elsewhere: what one run does (assets/), how a run of ours is started (dagster_project/internals/runs.py), printing (cli/).
"""

import os
import time
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import dagster as dg

from assets.command_options import split_options
from assets.partitions import IMAGES_PER_RUN, buckets, coord_presets, datasets, images, presets, ranks
from assets.stage_a_groups import RANKS, rank_key
from dagster_project.command_line import command_tags
from dagster_project.internals.instance import open_instance
from dagster_project.internals.runs import RunOutcome, run_here
from dagster_project.jobs import published, roll_back_records, roll_back_to_stage1
from dagster_project.partitions import register, register_missions
from imagemill.domain.embedding_specs import EmbeddingSpec, embedding_specs
from imagemill.domain.layout import DataRoot
from imagemill.options import RollbackOptions
from imagemill.pipeline.accounting import embedded_images
from imagemill.pipeline.forecast import check_space
from imagemill.pipeline.session import Session
from imagemill.pipeline.stage2.caption import forget_problems
from imagemill.pipeline.stage2.passes import Passes
from imagemill.pipeline.stage2.plan import Job, LedgerSnapshot, all_jobs, ids_of, plan_embedding
from imagemill.pipeline.stage2.ranges import plan_ranges
from imagemill.pipeline.stage2.regenerate import cancel, finish, regenerate, resume
from imagemill.pipeline.stage2.scan import Scan
from imagemill.pipeline.stage_a.merge import ASSET as GROUPS
from imagemill.store.ledger import Ledger
from imagemill.store.locations import refuse_no_folder, refuse_no_root, refuse_read_only, sweep_state
from imagemill.store.provenance import ModelIdentity
from imagemill.store.second_copy import refresh
from resources.captioner import CaptionerResource
from resources.dagster_internals.tags import PARTITION_TAG
from resources.data_root import DataRootResource
from resources.encoders import Encoders

_DEFINITIONS = {"raw_dataset": datasets, "rescale_preset": presets, "derived_preset": coord_presets}


@dataclass(slots=True)
class Work:
    """What one command has done so far.

    `up_to`: last id that `--limit` lets through. `counts`: per asset, counters of its runs. `checks`: check name → passed.
    `error`: what failed runs say. `embedded`: images for which a file was made since the last merge.
    """

    session: Session
    instance: dg.DagsterInstance
    began: float = field(default_factory=time.monotonic)
    outcomes: list[RunOutcome] = field(default_factory=list)
    up_to: str | None = None
    embedded: set[str] = field(default_factory=set)

    @property
    def root(self) -> DataRoot:
        return self.session.root

    @property
    def run_ids(self) -> list[str]:
        return [outcome.run_id for outcome in self.outcomes]

    @property
    def error(self) -> str | None:
        return "\n".join(dict.fromkeys(outcome.error for outcome in self.outcomes if outcome.error)) or None

    @property
    def interrupted(self) -> int | None:
        """Number of the signal that stopped a run, if one did."""
        return next((outcome.signal for outcome in self.outcomes if outcome.signal), None)

    @property
    def only_images_failed(self) -> bool:
        """Whether the runs so far ended well, or but for images that they name."""
        return not any(outcome.failures and not outcome.only_images_failed for outcome in self.outcomes)

    def seconds(self) -> float:
        return time.monotonic() - self.began

    def counts(self) -> dict[str, dict[str, int]]:
        return self.session.reading.counts(self.run_ids)

    def checks(self) -> dict[str, bool]:
        return {name: passed for outcome in self.outcomes for name, passed in outcome.checks.items()}

    def warnings(self) -> list[str]:
        """Names of the checks that warned when they were last evaluated."""
        last = {name: name in outcome.warnings for outcome in self.outcomes for name in outcome.checks}
        return sorted(name for name, warned in last.items() if warned)

    def findings(self) -> list[str]:
        """What failed checks say, with remedies."""
        said = {name: text for outcome in self.outcomes for name, text in outcome.findings.items()}
        return [said[name] for name, passed in sorted(self.checks().items()) if not passed]

    @property
    def _data_root(self) -> DataRootResource:
        return DataRootResource(path=str(self.root.path), config_file="", output_base_dir="")

    @property
    def encoders(self) -> Encoders:
        return Encoders(data_root=self._data_root, overrides={})

    # ---- the two halves

    def embed(
        self,
        passes: Passes,
        *,
        limit: int | None = None,
        regenerate: Sequence[str] = (),
        recaption: bool = False,
        packs: bool = False,
    ) -> None:
        """Embed what is missing, invalid or stale, in name order, a few thousand images per run.

        Args:
            limit: at most so many images that have work. regenerate: kinds to make anew; those begun earlier go on.
            recaption: caption anew what another captioner, or another prompt, has captioned.
            packs: whether the command writes shards afterwards, which take disk space too.

        Raises:
            ModelMismatch: a configured model is not the recorded one. ModelUnusable: a model of a kind that has work, or the
                captioner's. NotEnoughSpace: by the forecast. All before any image is opened.
        """
        ledger = self.session.ledger
        with self._regenerating(passes.specs, regenerate):
            for spec in passes.specs:
                resume(ledger, spec.kind)
                self.encoders.check_recorded(spec)
            inventory = self.session.plan()
            scan = inventory.scan
            awaited = self._awaited(passes, scan, recaption)
            jobs = passes.select(all_jobs(passes.kinds_to_run(), inventory, ledger, awaited))
            if limit is not None:
                with_work = sorted({*ids_of(jobs), *(inventory.recorded.stage1 if passes.migrate else ())})
                self.up_to = with_work[:limit][-1] if with_work else ""
                jobs = {spec: [job for job in of_kind if job.image_id <= self.up_to] for spec, of_kind in jobs.items()}
            self._look_up_models(jobs)
            self._check_space(jobs, packs)
            for spec in passes.specs:  # where nothing is left to make, no run will come to say so
                finish(ledger, inventory.store(spec), scan.sources)
            unreported = self._unreported(passes.specs, ledger, scan.sources) if limit is None else set()
        wanted = sorted({*ids_of(jobs), *unreported})
        register(self.instance, images, sorted({*scan.sources, *wanted}))
        self._embed_in_ranges(passes, wanted, recaption)
        self.embedded = embedded_images(ledger.changes())

    def _awaited(self, passes: Passes, scan: Scan, recaption: bool) -> set[str]:
        """Images that T5's pass captions first."""
        if not any(spec.source == "caption" for spec in passes.specs):
            return set()
        captioner, ledger = CaptionerResource(data_root=self._data_root), self.session.ledger
        jobs = captioner.jobs(scan.sources, scan, ledger, anew=recaption)
        forget_problems(jobs, ledger)
        if jobs:
            captioner.made_by()  # a model that is not there is told before anything is made
        return {job.image_id for job in jobs}

    def _look_up_models(self, jobs: Mapping[EmbeddingSpec, Sequence[Job]]) -> None:
        """Refuse a model that cannot be used before the first image is opened: those of all kinds that have work."""
        for spec, of_kind in jobs.items():
            if any(job.needs_model for job in of_kind):
                self.encoders.look_up(spec)

    def _check_space(self, jobs: Mapping[EmbeddingSpec, Sequence[Job]], packs: bool) -> None:
        shards = self.root.shards if packs else None
        check_space(jobs, self.root.approved, self.root.derived, state=self.root.state, shards=shards)

    @contextmanager
    def _regenerating(self, specs: Sequence[EmbeddingSpec], kinds: Sequence[str]) -> Iterator[None]:
        """Mark these kinds. If the block refuses to go on, the marks that were set here are taken off again."""
        ledger, run_id, begun = self.session.ledger, f"of process {os.getpid()}", []
        identities = {spec.kind: self._can_regenerate(spec) for spec in specs if spec.kind in kinds}
        try:
            for kind, identity in identities.items():
                if regenerate(ledger, kind, run_id, identity):
                    begun.append(kind)
            refresh(self.root, ledger)
            yield
        except BaseException:
            for kind in begun:
                cancel(ledger, kind, run_id)
            refresh(self.root, ledger)
            raise

    def _can_regenerate(self, spec: EmbeddingSpec) -> ModelIdentity:
        """Return the identity of the configured model. Raises ModelUnusable or NotEnoughSpace before anything is marked."""
        identity, inventory = self.encoders.identify(spec), self.session.plan()
        ids = list(inventory.scan.sources)
        known = LedgerSnapshot.read(self.session.ledger, ids)
        plan = plan_embedding(spec, ids, inventory.scan, known, {}, inventory.files(spec), inventory.recorded)
        self._check_space({spec: plan.jobs}, packs=False)
        return identity

    def cancel_regeneration(self, kind: str) -> int:
        """Take the mark off a kind of which no file has been replaced; return how many files count again."""
        restored = cancel(self.session.ledger, kind, f"of process {os.getpid()}")
        refresh(self.root, self.session.ledger)
        return restored

    def _embed_in_ranges(self, passes: Passes, wanted: Sequence[str], recaption: bool) -> None:
        assert images.name
        specs = passes.kinds_to_run()
        up_to = {} if self.up_to is None else {"up_to": self.up_to}
        config = {**({} if passes.specs else {"extract_only": True}), **up_to}
        for part in plan_ranges(self.instance.get_dynamic_partitions(images.name), wanted, IMAGES_PER_RUN):
            if self.interrupted or not self.only_images_failed:  # the next range would meet the same
                return
            self._run(
                [spec.kind for spec in specs],
                deferred=True,
                partition_range=(part.first, part.last),
                **_asked(
                    {
                        spec.kind: config | ({"recaption": recaption} if spec.source == "caption" else {})
                        for spec in specs
                    }
                ),
            )

    def _unreported(self, specs: Sequence[EmbeddingSpec], ledger: Ledger, present: Container[str]) -> set[str]:
        """Images with a file that Dagster has not heard of: the last events before a kill, or a history that was removed."""
        missing: set[str] = set()
        for spec in specs:
            reported = self.instance.get_materialized_partitions(dg.AssetKey(spec.kind))
            missing.update(image_id for image_id, _ in ledger.files(spec.kind) if image_id not in reported)
        return {image_id for image_id in missing if image_id in present}

    def publish(self, passes: Passes) -> None:
        """Write the records, and the shards of every bucket whose samples changed."""
        self._plan_again()
        keys = buckets.get_partition_keys()
        self._run(
            published(excluding=self.session.config.near_duplicates.exclude),
            partition_range=(keys[0], keys[-1]),
            **_asked({"stage2_jsonl": self._records_config(passes)}),
        )

    def write_records(self, passes: Passes) -> None:
        """Write the records; after an interrupt what is finished, without opening another image."""
        self._plan_again()
        self._run(["stage2_jsonl"], **_asked({"stage2_jsonl": self._records_config(passes)}))

    def roll_back(self, options: RollbackOptions) -> None:
        """Put the Stage 1 file back."""
        self._run([], job=roll_back_to_stage1.name, **_asked({roll_back_records.name: options.given()}))

    def _plan_again(self) -> None:
        """List the folders again after runs that may have made files."""
        if self.outcomes:
            self.session.plan()

    def _records_config(self, passes: Passes) -> dict[str, Any]:
        """Return the options that differ from the defaults, which a run of the UI has."""
        kinds = [spec.kind for spec in passes.specs]
        return {
            "complete": False if self.interrupted else None,
            "migrate": None if passes.migrate else False,
            "up_to": self.up_to,
            "kinds": None if kinds == [spec.kind for spec in embedding_specs()] else kinds,
        }

    def pack(self, chosen: Sequence[str], **config: Any) -> None:
        """Write the shards of these buckets. Only they are reported, whatever lies between the first and the last."""
        self._run(
            ["bucket_shards"],
            partition_range=(chosen[0], chosen[-1]),
            deferred=True,
            **_asked({"bucket_shards": {"only": list(chosen), **config}}),
        )

    def make_preset(self, asset: str, key: str, **config: Any) -> None:
        """Materialise one partition of an asset of public data; a partition that is not there yet is made."""
        register(self.instance, _DEFINITIONS[asset], [key])
        self._run([asset], partition=key, **_asked({asset: config}))

    def infer_ranks(
        self, mission: str, numbers: Sequence[int], world_size: int, *, summarizer: str | None, **config: Any
    ) -> None:
        """Let these ranks of a mission work: in one run, or in several where others were registered in between."""
        assert ranks.name
        keys = {rank_key(mission, rank, world_size) for rank in numbers}
        register_missions(self.instance, [mission], world_size)
        for first, last in _side_by_side(self.instance.get_dynamic_partitions(ranks.name), keys):
            if self.interrupted or not self.only_images_failed:
                return
            self._run(
                [RANKS],
                partition_range=(first, last),
                **_asked({RANKS: config}, _summarizer(summarizer)),
            )

    def merge_groups(self, mission: str, *, summarizer: str | None, **config: Any) -> None:
        """Merge what the ranks of a mission have left."""
        register_missions(self.instance, [mission], 0)
        self._run([GROUPS], partition=mission, **_asked({GROUPS: config}, _summarizer(summarizer)))

    def _run(
        self, assets: Sequence[str], *, partition: str | None = None, tags: Mapping[str, str] | None = None, **how: Any
    ) -> None:
        given = {**command_tags(), **({PARTITION_TAG: partition} if partition else {}), **(tags or {})}
        self.outcomes.append(run_here(self.instance, assets, tags=given, **how))


def _side_by_side(keys: Sequence[str], wanted: Container[str]) -> list[tuple[str, str]]:
    """First and last of each row of wanted keys that nothing else lies between, in order of registration."""
    rows = [list(row) for is_wanted, row in groupby(keys, lambda key: key in wanted) if is_wanted]
    return [(row[0], row[-1]) for row in rows]


def _asked(by_asset: Mapping[str, Mapping[str, Any]], run_config: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Run configuration and tags for what the command gives each asset, without what was left to its default."""
    ops, tags = {}, {}
    for asset, given in by_asset.items():
        config, options = split_options(given)
        ops[asset] = {"config": config}
        tags |= options
    return {"run_config": {"ops": ops, **(run_config or {})}, "tags": tags}


def _summarizer(kind: str | None) -> dict[str, Any]:
    """Run configuration of the summarizer, where it is not the configured one."""
    return {"resources": {"summarizer": {"config": {"kind": kind}}}} if kind else {}


@contextmanager
def open_work(session: Session, *, may_begin: bool = False) -> Iterator[Work]:
    """A data root with its Dagster history, for one command. A wrong configuration is refused before anything begins.

    Args:
        may_begin: whether the command may create a data root in a folder without one.
    """
    root = session.root
    refuse_no_root(root, may_begin=may_begin)
    _ = session.config
    refuse_no_folder("derived", root.derived)
    refuse_read_only(root.state)
    with open_instance(root) as instance:
        sweep_state(root)
        try:
            yield Work(session, instance)
        except SystemExit as end:
            if not end.code:
                _complete_copies(session)
            raise
        else:
            _complete_copies(session)


def _complete_copies(session: Session) -> None:
    """Write the second copies of the settings that could not be written earlier. Raises ImagemillError if they still cannot."""
    if session.root.ledger.exists():
        refresh(session.root, session.ledger, required=True)
