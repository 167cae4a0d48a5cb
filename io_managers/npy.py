"""IO manager of embedding files: drains the stream of a pass, and reports each published image to Dagster.

    stream of rows ──> publish (ledger, final names) ──> one event per image ──> counts, and a Failure if images are missing

Files are made and published in imagemill/pipeline/stage2/embed.py; events are stored in resources/dagster_internals/events.py.
"""

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import dagster as dg
from pydantic import PrivateAttr

from imagemill.domain.embedding_specs import embedding_specs
from imagemill.formats.npy import NpyStore
from imagemill.fs.fingerprints import signature_bytes
from imagemill.pipeline.leases import Leased
from imagemill.pipeline.stage2.embed import EmbeddingStream
from imagemill.pipeline.stage2.examine import EmbedRow
from imagemill.pipeline.stage2.models_in_use import PREVIEW_TEXT, ProgressOfBatches, file_model_text
from imagemill.pipeline.stage2.plan import EmbeddingPlan
from imagemill.pipeline.stage2.publish import count_rows, publish_on_thread
from imagemill.pipeline.stage2.regenerate import finish
from imagemill.progress import Progress
from imagemill.store.ledger import FileRow, Ledger, Problem, SourceRow
from imagemill.store.provenance import read_identity
from imagemill.store.second_copy import refresh
from io_managers.embedding_results import evaluations
from io_managers.refusals import not_arrived
from io_managers.viewer import image_shown
from resources.dagster_internals.events import (
    StreamedEvents,
    announced,
    deferred,
    images_failed,
    launched_in_ui,
    report_without_run,
)
from resources.data_root import DataRootResource
from resources.keys import APPROVED_IMAGES, asset_name

# Partitions that are looked up by name together.
LOOKED_UP = 1000
# To look up a partition takes about as long as to list so many.
LISTED_MEANWHILE = 8

# Detail and remedy of a partition without an image.
_ABSENT = ("no image in approved/ has this id", "restore the image, or leave the partition out")


class NpyIOManager(dg.ConfigurableIOManager):
    """Publishes the files of one kind and streams their events."""

    data_root: dg.ResourceDependency[DataRootResource]
    # Approved images that Dagster knows, of the earlier steps of this run.
    _known_sources: set[str] = PrivateAttr(default_factory=set)

    def handle_output(self, context: dg.OutputContext, obj: Leased) -> None:
        """Publish the files of the stream, record counts, and fail if images are missing."""
        with obj.claimed() as stream:
            self._store(context, stream, obj.ledger)

    def _store(self, context: dg.OutputContext, obj: EmbeddingStream, ledger: Ledger) -> None:
        kind, plan = obj.store.spec.kind, obj.plan
        counts = Counter(kept=len(plan.done), refused=len(plan.refused), absent=len(plan.absent))
        ledger.record_problems(p for p in plan.refused if p.asset == kind)
        try:
            with StreamedEvents(context) as events:
                used = _metadata_of_model(ledger, ProgressOfBatches(kind))
                news = list(self._news(context, obj, ledger))
                sources = ledger.sources([row.image_id for row in news]) if news else {}
                for row in news:
                    _report(events, row, used, sources)
                self._note_listing(kind, plan)
                made = _Made()
                failed = self._drain(context, obj, ledger, events, counts, made)
                if made.images:
                    events.observe(made.figures())
                self._report_sources(context.step_context.instance, plan, ledger, len(obj.present))
                stuck = finish(ledger, obj.store, obj.present)
                failed |= set(stuck)
                counts.update("failed" for _ in stuck)
                self._end(context, obj, ledger, events, failed)
        finally:
            ledger.record_counts(context.run_id, kind, dict(counts))
            refresh(self.data_root.root(), ledger)
        totals = ", ".join(f"{name}={count}" for name, count in counts.items())
        context.log.info(f"all images of this run, in {obj.store.folder}: {totals}")

    def _report_sources(self, instance: dg.DagsterInstance, plan: EmbeddingPlan, ledger: Ledger, total: int) -> None:
        """Report the approved images that were opened: those unknown to Dagster, and those read again in this step.

        Each gets a materialisation, which fills partition counts. One observation of them all is shown as the latest event in
        the graph. Observations of single images would take part in version comparisons: a replaced image would mark its T5 file
        stale, although that is made from the caption alone. Staleness is tracked in the ledger.
        """
        reread = {job.image_id for job in plan.jobs if job.facts is None}
        ids = (*plan.done, *(job.image_id for job in plan.jobs))
        opened = ledger.sources(
            [image_id for image_id in ids if image_id in reread or image_id not in self._known_sources]
        )
        unsure = [image_id for image_id in opened if image_id not in reread]
        unknown = set(unsure).difference(_materialized(instance, APPROVED_IMAGES, unsure, total))
        if news := [row for row in opened.values() if row.image_id in reread or row.image_id in unknown]:
            together = dg.AssetObservation(APPROVED_IMAGES, metadata={"opened (images)": len(news)})
            report_without_run(instance, [*map(_source_event, news), together])
        self._known_sources.update(opened)

    def load_input(self, context: dg.InputContext) -> NpyStore:
        """Return the files as a handle (a folder and a spec) instead of gigabytes of arrays."""
        spec = next(s for s in embedding_specs() if s.kind == asset_name(context.asset_key))
        return NpyStore(self.data_root.root().derived / spec.folder, self.data_root.session.in_force(spec))

    def _drain(
        self,
        context: dg.OutputContext,
        obj: EmbeddingStream,
        ledger: Ledger,
        events: StreamedEvents,
        counts: Counter[str],
        made: "_Made",
    ) -> set[str]:
        """Publish every row, and count what the model made; return the ids of images without a new file."""
        missing: set[str] = set()
        refreshed, root, regeneration = False, self.data_root.root(), ProgressOfBatches(obj.store.spec.kind)
        spec, work = obj.store.spec, obj.work
        unit = {"unit": "caption", "work_unit": "token"} if spec.source == "caption" else {}
        with Progress(spec.kind, len(obj.plan.jobs), work=sum(work.values()) if work else None, **unit) as progress:

            def advance(row: EmbedRow) -> None:
                progress.advance(
                    1, work.get(row.image_id), free=row.outcome in ("kept", "adopted", "extracted", "linked")
                )

            def take(batch: list[EmbedRow], connection: Ledger) -> None:
                nonlocal refreshed
                if not refreshed:  # the model's identity has been recorded by now
                    refresh(root, connection)
                    refreshed = True
                count_rows(counts, batch)
                used = _metadata_of_model(connection, regeneration)
                sources = {row.image_id: row.source for row in batch if row.source}
                unread = [row.image_id for row in batch if row.file and not row.source]
                sources |= connection.sources(unread) if unread else {}
                for row in batch:
                    if row.file:
                        _report(events, row.file, used, sources)
                        made.count(row, sources.get(row.image_id))
                    else:
                        missing.add(row.image_id)

            publish_on_thread(obj.rows, obj.store, ledger, take, run_id=context.run_id, leased=True, on_row=advance)
        if obj.workers:
            obj.store.sweep_own()
        return missing

    def _end(
        self,
        context: dg.OutputContext,
        obj: EmbeddingStream,
        ledger: Ledger,
        events: StreamedEvents,
        missing: Collection[str],
    ) -> None:
        """Fail the step if images failed; also if images were refused, in runs launched in the UI or not deferred.

        Raises:
            dg.Failure: naming the images with their reasons, after everything else is done and reported.
        """
        kind, plan = obj.store.spec.kind, obj.plan
        problems = [p for p in ledger.problems(sorted(missing)) if p.asset == kind]
        absent: list[str] = []
        if launched_in_ui(context) or not deferred(context):
            problems += plan.refused
            absent = plan.absent
        elif not any(problem.outcome == "failed" for problem in problems):
            return
        if problems or absent:
            for evaluation in evaluations(context.asset_key, self.data_root.session, obj.store.spec):
                events.add_check(evaluation)
            raise _failure(kind, sorted(problems, key=lambda problem: problem.item), absent)

    def _note_listing(self, kind: str, plan: EmbeddingPlan) -> None:
        """Note that the command's listing of a kind will no longer be that of its folder."""
        if plan.jobs and (planned := self.data_root.session.planned):
            planned.outdated.add(kind)

    def _news(self, context: dg.OutputContext, obj: EmbeddingStream, ledger: Ledger) -> Iterator[FileRow]:
        """Yield the existing files that Dagster does not know yet.

        A backfill counts a partition that its run does not report as failed, so a run of the UI reports all files.
        """
        if not obj.plan.done:
            return
        instance = context.step_context.instance
        known = (
            frozenset()
            if announced(context)
            else _materialized(instance, context.asset_key, obj.plan.done, len(obj.present))
        )
        news = [image_id for image_id in obj.plan.done if image_id not in known]
        rows = ledger.files(obj.store.spec.kind, news)
        for image_id in news:
            with suppress(FileNotFoundError):
                if row := rows.get((image_id, obj.store.stat(image_id))):
                    yield row


@dataclass(slots=True)
class _Made:
    """Files that a model has made in this run, their bytes, and the pixels of their images."""

    images: int = 0
    bytes: int = 0
    pixels: int = 0
    began: float = field(default_factory=time.monotonic)

    def count(self, row: EmbedRow, source: SourceRow | None) -> None:
        """Count a published row."""
        if row.outcome == "computed" and row.file:
            self.images += 1
            self.bytes += signature_bytes(row.file.stat)
            self.pixels += source.width * source.height if source else 0

    def figures(self) -> dict[str, float]:
        """Return the numbers of the run, for plots."""
        seconds = max(time.monotonic() - self.began, 1e-6)
        return {
            "images_per_s": round(self.images / seconds, 3),
            "megapixels_per_s": round(self.pixels / 1e6 / seconds, 3),
            "bytes": self.bytes,
        }


_OfModel = Callable[[FileRow, SourceRow | None], dict[str, Any]]


def _metadata_of_model(ledger: Ledger, regeneration: ProgressOfBatches) -> _OfModel:
    """Return a function from a file's row, and that of its image, to the metadata about its model and the picture."""
    identity, progress = read_identity(ledger, regeneration.kind), regeneration.text(ledger)
    unfinished = {"regeneration (at that time)": progress} if progress else {}

    def metadata(row: FileRow, source: SourceRow | None) -> dict[str, Any]:
        text = file_model_text(row.model_key, identity)
        return {"model": text, **unfinished, **image_shown(row.image_id, source, preview=PREVIEW_TEXT in text)}

    return metadata


def _report(events: StreamedEvents, row: FileRow, used: _OfModel, sources: Mapping[str, SourceRow]) -> None:
    inputs = {APPROVED_IMAGES.to_user_string(): row.source} if row.source else None
    events.add(
        row.image_id,
        data_version=row.content,
        inputs=inputs,
        metadata=used(row, sources.get(row.image_id)),
    )


def _materialized(
    instance: dg.DagsterInstance, asset_key: dg.AssetKey, partitions: Sequence[str], total: int
) -> Collection[str]:
    """Return the partitions of an asset with a materialisation, at least those of these partitions. `total`: number of images."""
    if len(partitions) > LOOKED_UP and LISTED_MEANWHILE * len(partitions) > total:
        return instance.get_materialized_partitions(asset_key)
    materialized, log, found = dg.DagsterEventType.ASSET_MATERIALIZATION, instance.event_log_storage, set[str]()
    for begin in range(0, len(partitions), LOOKED_UP):
        part = set(partitions[begin : begin + LOOKED_UP])
        found.update(log.get_latest_storage_id_by_partition(asset_key, materialized, part))
    return found


def _source_event(row: SourceRow) -> dg.AssetMaterialization:
    facts = {"file": row.file_name, "width (px)": row.width, "height (px)": row.height}
    if row.profile:
        facts |= {"colour profile": row.profile, "conversion to sRGB changes it": row.converts}
    facts |= image_shown(row.image_id, row)
    return dg.AssetMaterialization(APPROVED_IMAGES, partition=row.image_id, metadata=facts)


def _failure(kind: str, problems: Sequence[Problem], absent: Sequence[str]) -> dg.Failure:
    """Return a failure that names the missing images with their reasons, details and remedies."""
    absences = [Problem(i, kind, "refused", "no input", *_ABSENT) for i in absent]
    named = [*problems, *absences]
    text = not_arrived(named, kind)
    # The check's table is in the same run.
    return images_failed(text, [p.item for p in named], {})
