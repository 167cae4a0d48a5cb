"""The main job on the command line: the same assets in the same instance as in the UI, in as few runs as possible.

    survey ─> register partitions ─> embedding runs over ranges of images ─> one run for records, shards and checks

One run is implemented in assets/, its start in dagster_project/internals/runs.py, printing in cli/.
"""

import time
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import dagster as dg

from assets.command_options import split_options
from assets.partitions import IMAGES_PER_RUN, buckets, coord_presets, datasets, images, presets, ranks
from assets.stage_a_groups import RANKS, rank_key
from dagster_project.command_line import command_tags
from dagster_project.internals.batched_events import keeping_partitions
from dagster_project.internals.instance import open_instance
from dagster_project.internals.runs import RunOutcome, run_here
from dagster_project.jobs import embed_range, published, roll_back_records, roll_back_to_stage1
from dagster_project.partitions import register, register_missions
from dagster_project.snapshot import is_reported
from imagemill.domain.embedding_specs import EmbeddingSpec, embedding_specs
from imagemill.domain.encoder_settings import PREVIEW
from imagemill.domain.layout import DataRoot
from imagemill.errors import MissingInput
from imagemill.inputs.scan import Scan
from imagemill.options import RollbackOptions
from imagemill.pipeline.accounting import embedded_images
from imagemill.pipeline.forecast import Forecast, check_space, measure_sizes
from imagemill.pipeline.leases import holder_without_run
from imagemill.pipeline.malloc_tuning import return_freed_memory
from imagemill.pipeline.session import Session
from imagemill.pipeline.stage2.caption import forget_problems
from imagemill.pipeline.stage2.current_plans import jobs_in_parts
from imagemill.pipeline.stage2.inventory import Inventory
from imagemill.pipeline.stage2.models_in_use import preview_kinds, preview_notice
from imagemill.pipeline.stage2.passes import Passes
from imagemill.pipeline.stage2.plan import Job, LedgerSnapshot, ids_of, plan_embedding
from imagemill.pipeline.stage2.ranges import plan_ranges
from imagemill.pipeline.stage2.record_index import state_of
from imagemill.pipeline.stage2.regenerate import cancel, finish, regenerate, resume
from imagemill.pipeline.stage2.renames import Renamed
from imagemill.pipeline.stage2.reuse import find_donors, mark_linkable
from imagemill.pipeline.stage2.takeover import accept_renames
from imagemill.pipeline.stage_a.merge import ASSET as GROUPS
from imagemill.store.inputs import PixelRule
from imagemill.store.ledger import DONE, RECORDED, Ledger
from imagemill.store.locations import refuse_no_folder, refuse_no_root, refuse_read_only, sweep_state
from imagemill.store.provenance import ModelIdentity
from imagemill.store.second_copy import refresh
from imagemill.text.close_names import name_hint
from resources.captioner import CaptionerResource
from resources.dagster_internals.tags import PARTITION_TAG
from resources.data_root import DataRootResource
from resources.encoders import Encoders
from resources.engine import ConfiguredEngine
from resources.keys import ROOT_TAGS, asset_key, op_name

_DEFINITIONS = {"raw_dataset": datasets, "rescale_preset": presets, "derived_preset": coord_presets}


@dataclass(slots=True)
class CommandSession:
    """The runs of one command and their results.

    Attributes:
        session: session of the data root.
        instance: Dagster instance of the data root.
        began: start of the command on the monotonic clock.
        outcomes: outcomes of the runs so far.
        parent: run of the UI whose step executes the runs, or None for a command.
        up_to: last image id that `--limit` includes.
        ids: the only images to embed, or None for all.
        embedded: images for which a file was made since the last merge.
        accepted: renames that this command accepted.
    """

    session: Session
    instance: dg.DagsterInstance
    began: float = field(default_factory=time.monotonic)
    outcomes: list[RunOutcome] = field(default_factory=list)
    parent: dg.DagsterRun | None = None
    up_to: str | None = None
    ids: list[str] | None = None
    embedded: set[str] = field(default_factory=set)
    accepted: list[Renamed] = field(default_factory=list)

    @property
    def root(self) -> DataRoot:
        """The data root."""
        return self.session.root

    @property
    def run_ids(self) -> list[str]:
        """Ids of the runs so far."""
        return [outcome.run_id for outcome in self.outcomes]

    @property
    def error(self) -> str | None:
        """The messages of failed runs, None if no run failed."""
        return "\n".join(dict.fromkeys(outcome.error for outcome in self.outcomes if outcome.error)) or None

    @property
    def interrupted(self) -> int | None:
        """Number of the signal that stopped a run, or None."""
        return next((outcome.signal for outcome in self.outcomes if outcome.signal), None)

    @property
    def only_images_failed(self) -> bool:
        """Whether no run so far failed for another reason than single images."""
        return not any(outcome.failures and not outcome.only_images_failed for outcome in self.outcomes)

    def seconds(self) -> float:
        """Return the duration of the command so far."""
        return time.monotonic() - self.began

    def counts(self) -> dict[str, dict[str, int]]:
        """Return the counters of the runs, per asset."""
        return self.session.reading.counts(self.run_ids)

    def checks(self) -> dict[str, bool]:
        """Return whether each check passed when it was last evaluated, by name."""
        return {name: passed for outcome in self.outcomes for name, passed in outcome.checks.items()}

    def warnings(self) -> list[str]:
        """Return the names of the checks that warned when they were last evaluated."""
        last = {name: name in outcome.warnings for outcome in self.outcomes for name in outcome.checks}
        return sorted(name for name, warned in last.items() if warned)

    def findings(self) -> list[str]:
        """Return the messages of failed checks, with remedies."""
        texts = {name: text for outcome in self.outcomes for name, text in outcome.findings.items()}
        return [texts[name] for name, passed in sorted(self.checks().items()) if not passed]

    @property
    def _data_root(self) -> DataRootResource:
        return DataRootResource(path=str(self.root.path), config_file="", output_base_dir="")

    @property
    def encoders(self) -> Encoders:
        """Encoders of the data root's configuration."""
        return Encoders(data_root=self._data_root, overrides={})

    # ---- renamed images

    def accept_renames(self) -> None:
        """Let renamed images take over captions and withdrawals of their earlier names; records follow with `publish`."""
        scan, ledger = self.session.plan().scan, self.session.ledger
        threads = self.session.config.decoders
        self.accepted = accept_renames(self.root, scan, ledger, holder_without_run(), threads=threads)
        refresh(self.root, ledger)

    def end_former_names(self) -> None:
        """Delete the partitions of earlier names whose records have been written under the new ones."""
        ledger = self.session.ledger
        if not (ended := [rename.former for rename in ledger.renames(RECORDED)]):
            return
        assert images.name
        present = self.session.overview().scan.sources
        for former in set(ended).difference(present).intersection(self.instance.get_dynamic_partitions(images.name)):
            self.instance.delete_dynamic_partition(images.name, former)
        ledger.advance_renames(ended, DONE)

    # ---- the two halves

    def embed(
        self,
        passes: Passes,
        *,
        limit: int | None = None,
        ids: Sequence[str] | None = None,
        regenerate: Sequence[str] = (),
        recaption: bool = False,
        packs: bool = False,
        accept_node: str | None = None,
    ) -> None:
        """Embed images whose files are missing, invalid or stale, in name order, a few thousand images per run.

        Args:
            passes: passes to run.
            limit: maximum number of images that have work.
            ids: the only images to embed; None for all.
            regenerate: kinds to regenerate; regenerations begun earlier continue.
            recaption: caption again the images that another captioner, or another prompt, has captioned.
            packs: whether the command writes shards afterwards, which also need disk space.
            accept_node: node of the cluster that is right where nodes differ.

        Raises:
            MissingInput: if one of `ids` is not an image of `approved/`.
            ModelMismatch: if a configured model is not the recorded one.
            ModelUnusable: for a model of a kind that has work, and for the captioner's.
            WrongUsage, ClusterUnusable, NotTrusted: if the configured cluster cannot be joined, and a kind has work.
            NotEnoughSpace: by the forecast.

        All errors are raised before any image is opened.
        """
        all_reported = limit is not None or is_reported(self.session)  # before the ledger changes
        ledger = self.session.ledger
        for line in preview_notice(self._previews(passes.specs)):
            print(line, flush=True)
        with self._regenerating(passes.specs, regenerate):
            for spec in passes.specs:
                resume(ledger, spec.kind)
                self.encoders.check_recorded(spec)
            inventory = self.session.plan()
            scan = inventory.scan
            self.ids = None if ids is None else _known_ids(ids, scan)
            chosen = scan.sources.keys() if self.ids is None else set(self.ids)
            awaited = self._awaited(passes, scan, chosen, recaption)
            parts = self._jobs(passes, inventory, awaited, chosen, limit)
            with_work = self._check_work(parts, inventory, packs)
            for spec in passes.specs:  # if nothing is left to make, no run will finish the regeneration
                finish(ledger, inventory.store(spec), scan.sources)
            unreported = set() if all_reported else self._unreported(passes.specs, ledger, chosen)
        ids = sorted(with_work | unreported)
        register(self.instance, images, sorted({*scan.sources, *ids}))
        with keeping_partitions(self.instance):  # counting all keys for each range takes longer the more there are
            self._embed_in_ranges(passes, ids, recaption, _resources(accept_node=accept_node))
        return_freed_memory()
        self.embedded = embedded_images(ledger.changes())

    def _jobs(
        self, passes: Passes, inventory: Inventory, awaited: Set[str], chosen: Collection[str], limit: int | None
    ) -> Iterator[Mapping[EmbeddingSpec, Sequence[Job]]]:
        """Yield the jobs of the command in parts; with a limit, those of the first images that have work, and set `up_to`."""
        stage1 = inventory.recorded.stage1 if passes.migrate and self.ids is None else frozenset[str]()
        with_work: set[str] = set()
        for part in jobs_in_parts(passes.kinds_to_run(), inventory, self.session.ledger, awaited):
            jobs = passes.select(part.jobs)
            if self.ids is not None:
                jobs = {spec: [job for job in of_kind if job.image_id in chosen] for spec, of_kind in jobs.items()}
            if limit is None:
                yield jobs
                continue
            with_work.update(ids_of(jobs))
            first = sorted(with_work | stage1)[:limit]
            self.up_to = first[-1] if first else ""
            yield {spec: [job for job in of_kind if job.image_id <= self.up_to] for spec, of_kind in jobs.items()}
            if len(first) == limit and part.last is not None and self.up_to <= part.last:
                return

    def _check_work(
        self, parts: Iterable[Mapping[EmbeddingSpec, Sequence[Job]]], inventory: Inventory, packs: bool
    ) -> set[str]:
        """Return the images of these jobs, after all that may stop the command before an image is opened. Raises as `embed`."""
        expected = Forecast(self.root.derived, state=self.root.state, shards=self.root.shards if packs else None)
        with_work, idle, usable = set[str](), dict[EmbeddingSpec, bool](), set[EmbeddingSpec]()
        for part in parts:
            jobs = {spec: self._with_links(spec, of_kind) for spec, of_kind in part.items()}
            needed = [spec for spec, of_kind in jobs.items() if any(job.needs_model for job in of_kind)]
            for spec in needed:
                if spec not in usable:
                    self.encoders.look_up(spec)
            if needed and not usable:
                ConfiguredEngine(data_root=self._data_root, accept_node="").check()
            usable.update(needed)
            in_force = {self.encoders.in_force(spec): of_kind for spec, of_kind in jobs.items()}
            expected.add(in_force, measure_sizes(in_force, self.root.approved, known=inventory.header_sizes))
            with_work.update(ids_of(jobs))
            idle |= {spec: idle.get(spec, True) and not of_kind for spec, of_kind in jobs.items()}
        expected.require_space()
        for spec in (spec for spec, is_idle in idle.items() if is_idle):  # no step sweeps its folder
            inventory.store(spec).sweep()
        return with_work

    def _awaited(self, passes: Passes, scan: Scan, chosen: Collection[str], recaption: bool) -> set[str]:
        """Return the chosen images that the T5 pass captions first."""
        if not any(spec.source == "caption" for spec in passes.specs):
            return set()
        captioner, ledger = CaptionerResource(data_root=self._data_root), self.session.ledger
        jobs = captioner.jobs(chosen, scan, ledger, recaption=recaption)
        forget_problems(jobs, ledger)
        if jobs:
            captioner.made_by()  # a missing model raises before anything is made
        return {job.image_id for job in jobs}

    def _with_links(self, spec: EmbeddingSpec, jobs: Sequence[Job]) -> list[Job]:
        """Return the jobs; those for which a file of equal input can be linked are marked."""
        ledger = self.session.ledger
        donors = find_donors(spec, jobs, ledger, preview=self.encoders.settings(spec).model == PREVIEW)
        return mark_linkable(spec, jobs, donors, PixelRule.read(ledger))

    def _previews(self, specs: Sequence[EmbeddingSpec]) -> list[str]:
        """Return the kinds that preview models have made, or will make."""
        config, made = self.session.config, preview_kinds(self.session.reading)
        return [spec.kind for spec in specs if spec.kind in made or config.encoder(spec).model == PREVIEW]

    @contextmanager
    def _regenerating(self, specs: Sequence[EmbeddingSpec], kinds: Sequence[str]) -> Iterator[None]:
        """Mark these kinds as being regenerated. If the block raises, remove the marks that were set here."""
        ledger, run_id, begun = self.session.ledger, holder_without_run(), []
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
        jobs = {self.encoders.in_force(spec): plan.jobs}
        check_space(jobs, self.root.approved, self.root.derived, state=self.root.state)
        return identity

    def cancel_regeneration(self, kind: str) -> int:
        """Remove the mark from a kind of which no file has been replaced; return the number of files that count again."""
        restored = cancel(self.session.ledger, kind, holder_without_run())
        refresh(self.root, self.session.ledger)
        return restored

    def _embed_in_ranges(
        self, passes: Passes, ids: Sequence[str], recaption: bool, resources: Mapping[str, Any]
    ) -> None:
        assert images.name
        specs = passes.kinds_to_run()
        up_to = {} if self.up_to is None else {"up_to": self.up_to}
        only = {} if self.ids is None else {"ids": self.ids}
        config = {**({} if passes.specs else {"extract_only": True}), **up_to, **only}
        parts = list(plan_ranges(self.instance.get_dynamic_partitions(images.name), ids, IMAGES_PER_RUN))
        for number, part in enumerate(parts, 1):
            if self.interrupted or not self.only_images_failed:  # the next range would fail in the same way
                return
            whole = number < len(parts) and specs == embedding_specs()
            self._run(
                [] if whole else [spec.kind for spec in specs],
                **({"job": embed_range.name} if whole else {}),
                deferred=True,
                partition_range=(part.first, part.last),
                **_run_options(
                    {
                        op_name(spec.kind): config | ({"recaption": recaption} if spec.source == "caption" else {})
                        for spec in specs
                    },
                    resources,
                ),
            )

    def _unreported(self, specs: Sequence[EmbeddingSpec], ledger: Ledger, present: Container[str]) -> set[str]:
        """Return images with a file that Dagster does not know: after a kill before the last events, or with a new history."""
        missing: set[str] = set()
        for spec in specs:
            missing |= ledger.ids_with_file(spec.kind) - self.instance.get_materialized_partitions(asset_key(spec.kind))
        return {image_id for image_id in missing if image_id in present}

    def publish(self, passes: Passes) -> None:
        """Write the records, and the shards of every bucket whose samples changed."""
        self._list_made_files()
        keys = buckets.get_partition_keys()
        self._run(
            published(self.session.config),
            partition_range=(keys[0], keys[-1]),
            **_run_options({op_name("stage2_jsonl"): self._records_config(passes)}),
        )

    def write_records(self, passes: Passes) -> None:
        """Write the records. After an interrupt only finished images are written, without opening others."""
        self._list_made_files()
        self._run(["stage2_jsonl"], **_run_options({op_name("stage2_jsonl"): self._records_config(passes)}))

    def roll_back(self, options: RollbackOptions) -> None:
        """Restore the Stage 1 file."""
        self._run([], job=roll_back_to_stage1.name, **_run_options({roll_back_records.name: options.given()}))

    def _list_made_files(self) -> None:
        """Bring the listings up to date after runs. Images that have been added meanwhile wait for the next run.

        If the file of records has been edited meanwhile, everything is listed again: its captions replace the ledger's.
        """
        if not self.outcomes:
            return
        inventory = self.session.inventory()
        if inventory.records_state == state_of(self.root.stage2_jsonl):
            inventory.refresh()
        else:
            self.session.plan()

    def _records_config(self, passes: Passes) -> dict[str, Any]:
        """Return the options that differ from the defaults, which apply to a run of the UI."""
        kinds = [spec.kind for spec in passes.specs]
        return {
            "complete": False if self.interrupted or self.ids is not None else None,
            "migrate": None if passes.migrate and self.ids is None else False,
            "up_to": self.up_to,
            "kinds": None if kinds == [spec.kind for spec in embedding_specs()] else kinds,
        }

    def pack(self, chosen: Sequence[str], **config: Any) -> None:
        """Write the shards of these buckets. Only they are reported, even if the range contains others."""
        self._run(
            ["bucket_shards"],
            partition_range=(chosen[0], chosen[-1]),
            deferred=True,
            **_run_options({op_name("bucket_shards"): {"only": list(chosen), **config}}),
        )

    def make_preset(self, asset: str, key: str, **config: Any) -> None:
        """Materialise one partition of an asset of public data; register the partition if it is new."""
        register(self.instance, _DEFINITIONS[asset], [key])
        self._run([asset], partition=key, **_run_options({op_name(asset): config}))

    def infer_ranks(
        self,
        mission: str,
        numbers: Sequence[int],
        world_size: int,
        *,
        summarizer: str | None,
        accept_node: str | None = None,
        **config: Any,
    ) -> None:
        """Run these ranks of a mission: in one run, or in several if other ranks were registered in between."""
        assert ranks.name
        keys = {rank_key(mission, rank, world_size) for rank in numbers}
        register_missions(self.instance, [mission], world_size)
        for first, last in _contiguous_ranges(self.instance.get_dynamic_partitions(ranks.name), keys):
            if self.interrupted or not self.only_images_failed:
                return
            self._run(
                [RANKS],
                partition_range=(first, last),
                **_run_options({op_name(RANKS): config}, _resources(summarizer=summarizer, accept_node=accept_node)),
            )

    def merge_groups(self, mission: str, *, summarizer: str | None, **config: Any) -> None:
        """Merge the output of a mission's ranks."""
        register_missions(self.instance, [mission], 0)
        self._run(
            [GROUPS], partition=mission, **_run_options({op_name(GROUPS): config}, _resources(summarizer=summarizer))
        )

    def _run(
        self, assets: Sequence[str], *, partition: str | None = None, tags: Mapping[str, str] | None = None, **how: Any
    ) -> None:
        given = {**ROOT_TAGS, **command_tags(), **({PARTITION_TAG: partition} if partition else {}), **(tags or {})}
        self.outcomes.append(run_here(self.instance, assets, tags=given, parent=self.parent, **how))


def _known_ids(ids: Sequence[str], scan: Scan) -> list[str]:
    """Return the ids, sorted. Raises MissingInput if one is not that of an image."""
    if unknown := sorted(set(ids) - scan.sources.keys()):
        raise MissingInput(
            f"no image in approved/ has this id: {', '.join(unknown[:5])}",
            why=name_hint(unknown[0], scan.sources.keys()),
            do="name images by their ids, such as `a` for a.jpg",
        )
    return sorted(set(ids))


def _contiguous_ranges(keys: Sequence[str], selected: Container[str]) -> list[tuple[str, str]]:
    """Return the first and last key of each contiguous range of selected keys, in order of registration."""
    rows = [list(row) for is_selected, row in groupby(keys, lambda key: key in selected) if is_selected]
    return [(row[0], row[-1]) for row in rows]


def _run_options(by_op: Mapping[str, Mapping[str, Any]], run_config: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return run configuration and tags for the options that the command gives each op, without defaulted ones."""
    ops, tags = {}, {}
    for op, given in by_op.items():
        config, options = split_options(given)
        ops[op] = {"config": config}
        tags |= options
    return {"run_config": {"ops": ops, **(run_config or {})}, "tags": tags}


def _resources(*, summarizer: str | None = None, accept_node: str | None = None) -> dict[str, Any]:
    """Return the run configuration of resources, empty if they are as configured.

    Args:
        summarizer: kind of the summarizer.
        accept_node: node of the cluster that is right where nodes differ.
    """
    given = {"summarizer": {"kind": summarizer}, "engine": {"accept_node": accept_node}}
    changed = {name: {"config": config} for name, config in given.items() if any(config.values())}
    return {"resources": changed} if changed else {}


@contextmanager
def open_command(
    session: Session, *, may_begin: bool = False, parent: dg.DagsterRun | None = None
) -> Iterator[CommandSession]:
    """Open a data root with its Dagster history for one command. A wrong configuration is refused before any work.

    Args:
        session: session of the data root.
        parent: run of the UI whose step is the command.
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
            yield CommandSession(session, instance, parent=parent)
        except SystemExit as end:
            if not end.code:
                _complete_copies(session)
            raise
        else:
            _complete_copies(session)


def _complete_copies(session: Session) -> None:
    """Write the second copies of settings that could not be written earlier. Raises ImagemillError if they still cannot."""
    if session.root.ledger.exists():
        refresh(session.root, session.ledger, required=True)
