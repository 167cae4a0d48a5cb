"""One asset per embedding kind in use: one npy per image."""

from collections.abc import Sequence
from pathlib import Path

import dagster as dg

from assets.approved_images import approved_images
from assets.command_options import ImageOptions, read_options
from assets.partitions import GPU_POOL, IMAGES_PER_RUN, images, ranged_asset
from imagemill.domain.embedding_specs import EmbeddingSpec, embedding_specs
from imagemill.domain.encoder_settings import PREVIEW
from imagemill.models import CAPTIONER
from imagemill.options import CaptionedOptions, EmbeddingOptions
from imagemill.pipeline.forecast import check_space, measure_sizes, with_sizes, work_of
from imagemill.pipeline.leases import Leased
from imagemill.pipeline.shards.copies import with_copies
from imagemill.pipeline.stage2.caption import (
    CaptionJob,
    CaptionWorker,
    forget_problems,
    keep_captions,
    look_again,
    lost_caption,
)
from imagemill.pipeline.stage2.embed import EmbeddingStream, EmbedWorker
from imagemill.pipeline.stage2.examine import lost_row
from imagemill.pipeline.stage2.plan import plan_for
from imagemill.pipeline.stage2.regenerate import regenerate, resume
from imagemill.pipeline.stage2.reuse import find_donors, mark_linkable
from imagemill.progress import Progress
from imagemill.store.ledger import Ledger
from imagemill.store.provenance import record_identity
from imagemill.store.second_copy import refresh
from io_managers.viewer import page_shown
from resources.captioner import CaptionerResource
from resources.dagster_internals.events import STREAMED_TAG
from resources.data_root import DataRootResource
from resources.encoders import Encoders
from resources.engine import Engine

# Batches that a worker process gets together, so that its device seldom waits for the next ones, and images if it finds the size
# of batches itself.
BATCHES_AT_ONCE = 8
IMAGES_AT_ONCE = 256


class ImageConfig(dg.Config, EmbeddingOptions):
    """Files to make besides those that are missing, invalid or stale."""


class CaptionedConfig(dg.Config, CaptionedOptions):
    """Files to make, and captions to make again."""


def embedding_asset(spec: EmbeddingSpec) -> dg.AssetsDefinition:
    """Return the asset of one embedding kind. It plans the missing files and streams them to the npy IO manager."""
    config_class = CaptionedConfig if spec.source == "caption" else ImageConfig

    @ranged_asset(
        name=spec.kind,
        deps=[approved_images],
        partitions_def=images,
        backfill_policy=dg.BackfillPolicy.multi_run(IMAGES_PER_RUN),
        io_manager_key="npy_io",
        pool=GPU_POOL,
        group_name="stage2",
        tags={STREAMED_TAG: ""},
        kinds={"numpy", "pytorch"},
        description=f"{spec.description} The model is `encoders.{spec.kind}` of imagemill.yaml, such as `{spec.default_model}`; "
        "without it, a preview model with random weights. `model` below is the one that made the latest file. "
        "Missing files of scattered images are made by the job `resume_missing` in one run, with records and shards.",
        metadata={"folder": f"derived/{spec.folder}", "dtype": spec.dtype},
        look=page_shown("images that wait", "images", show="waiting"),
    )
    def embedding(
        context: dg.AssetExecutionContext,
        config: config_class,  # type: ignore[valid-type]
        data_root: DataRootResource,
        encoders: Encoders,
        captioner: CaptionerResource,
        engine: Engine,
    ) -> Leased:
        given, session = read_options(context, ImageOptions), data_root.session
        root, ledger, run_id = session.root, session.ledger, context.run.run_id
        keys = context.partition_keys  # read from the history each time
        ids = [i for i in keys if given.includes(i)]
        if config.regenerate:
            regenerate(ledger, spec.kind, run_id, encoders.identify(spec))
            refresh(root, ledger)

        def plan() -> EmbeddingStream:
            regenerating = resume(ledger, spec.kind)
            encoders.check_recorded(spec)
            each = [
                {**own, "extract_only": given.extract_only, "regenerate": regenerating}
                for own in encoders.options_of_devices(spec)
            ]
            options = each[0]
            size = options["settings"].batch_size
            inventory = session.inventory()
            if spec.kind not in inventory.swept:
                options["store"].sweep()
                inventory.swept.add(spec.kind)
            inventory.worked_on.update(ids)
            scan = inventory.scan
            if isinstance(config, CaptionedConfig):
                if not captioner.settings().enabled:
                    look_again(ids, scan, ledger, root.approved)
                caption(
                    context, captioner.jobs(ids, scan, ledger, recaption=config.recaption), captioner, engine, ledger
                )
            plan = plan_for(spec, ids, inventory, ledger)
            if given.extract_only:
                plan.jobs = [job for job in plan.jobs if job.inline]
            plan.jobs = with_copies(plan.jobs, root.shards)
            donors = find_donors(options["spec"], plan.jobs, ledger, preview=options["settings"].model == PREVIEW)
            plan.jobs = mark_linkable(options["spec"], plan.jobs, donors, options["pixels"])
            for own in each:
                own["donors"] = donors
            jobs = {options["spec"]: plan.jobs}
            sizes = measure_sizes(jobs, root.approved, known=inventory.header_sizes)
            check_space(jobs, root.approved, root.derived, state=root.state, sizes=sizes)
            if isinstance(root.approved, Path):  # else most sizes are assumed
                plan.jobs = with_sizes(plan.jobs, sizes)
            rows = engine.map_devices(
                EmbedWorker,
                plan.jobs,
                each=each,
                batch_size=IMAGES_AT_ONCE if size == "auto" else BATCHES_AT_ONCE * size,
                lost_key=lost_row,
            )
            work = work_of(options["spec"], plan.jobs, sizes)
            return EmbeddingStream(options["store"], plan, rows, scan.sources.keys(), work, workers=len(each) > 1)

        return Leased(ledger, spec.kind, keys, run_id, plan)

    return embedding


def caption(
    context: dg.AssetExecutionContext,
    jobs: Sequence[CaptionJob],
    captioner: CaptionerResource,
    engine: Engine,
    ledger: Ledger,
) -> None:
    """Caption the images of the jobs with the configured captioner, whose memory is free again afterwards."""
    forget_problems(jobs, ledger)
    if not jobs:
        return
    made_by, each = captioner.made_by(), captioner.options_of_devices()
    record_identity(ledger, made_by)
    rows = engine.map_devices(
        CaptionWorker,
        jobs,
        each=each,
        batch_size=each[0]["images_per_call"],  # a call takes seconds, and a kill loses the calls of one batch
        lost_key=lost_caption,
    )
    with Progress("captions", len(jobs)) as progress:
        counts = keep_captions(
            rows,
            ledger,
            model_key=made_by.key,
            preview=made_by.preview,
            run_id=context.run.run_id,
            on_row=progress.advance,
        )
    ledger.record_counts(context.run.run_id, CAPTIONER, dict(counts))
    # Not metadata of the output, which would be that of every image of the run.
    context.log.info(f"{made_by.model} captioned {counts['captioned']} of {len(jobs)} images without a caption")


embedding_assets = [embedding_asset(spec) for spec in embedding_specs()]
