"""Jobs: the two halves of the main job, verification of all files, and the rollback to Stage 1.

A run has one partitions definition, so the main job is split into one job over images and one over buckets.
"""

import dagster as dg

from assets.bucket_shards import bucket_shards
from assets.embeddings import embedding_assets
from assets.near_duplicates import near_duplicates
from assets.published_shards import is_published, published_shards
from assets.stage2_jsonl import stage2_jsonl
from dagster_project.internals.coordinator import EMBED_JOB, EMBED_RANGE_JOB, PUBLISH_JOB
from imagemill.config import Config
from imagemill.domain.embedding_specs import DINOV3, embedding_specs
from imagemill.options import RollbackOptions
from imagemill.pipeline.leases import claimed
from imagemill.pipeline.stage2.damage import note_damage
from imagemill.pipeline.stage2.merge import ASSET
from imagemill.pipeline.stage2.rollback import roll_back
from imagemill.validation.contents import RecordedContents
from imagemill.validation.findings import as_text
from imagemill.validation.validator import verify_stage2
from io_managers.figures import with_units
from resources.dagster_internals.tags import DEFER_TAG
from resources.data_root import DataRootResource
from resources.keys import ROOT_TAGS, asset_key

embed_images = dg.define_asset_job(
    EMBED_JOB,
    selection=dg.AssetSelection.assets(*embedding_assets),
    tags={DEFER_TAG: "true", **ROOT_TAGS},
    description="All embeddings of a range of images.",
)

# Of the runs of a command over several ranges, all but the last: checks look at whole folders, so those of the last are enough.
embed_range = dg.define_asset_job(
    EMBED_RANGE_JOB,
    selection=dg.AssetSelection.assets(*embedding_assets).without_checks(),
    tags={DEFER_TAG: "true", **ROOT_TAGS},
    description="All embeddings of one range of several; without checks, which follow with the last range.",
)


@dg.op
def read_back(context: dg.OpExecutionContext, data_root: DataRootResource) -> None:
    """Read every record and every npy file; record damaged files for the next run."""
    root, ledger = data_root.root(), data_root.session.ledger
    contents = RecordedContents(ledger, data_root.session.in_force)
    report = verify_stage2(root.stage2_jsonl, root.derived, contents)
    for line in as_text(report):
        context.log.info(line)
    if contents.damaged:
        context.log.info(note_damage(ledger, contents.damaged))
    if not report.passed:
        raise dg.Failure(f"{report.errors} findings; the first ones are in this run's log")


@dg.job(tags=ROOT_TAGS, description="Read back every Stage 2 record and every npy file it names; fails on any finding.")
def verify_stage2_files() -> None:
    """Read back every Stage 2 record and every npy file that it names."""
    read_back()


verify_weekly = dg.ScheduleDefinition(
    name="verify_weekly",
    job=verify_stage2_files,
    cron_schedule="0 3 * * 0",
    default_status=dg.DefaultScheduleStatus.STOPPED,
    description="Verify all Stage 2 files on Sundays at 3:00 UTC. Off until it is switched on.",
)


class RollbackConfig(dg.Config, RollbackOptions):
    """Options of the rollback to Stage 1."""


@dg.op
def roll_back_records(context: dg.OpExecutionContext, config: RollbackConfig, data_root: DataRootResource) -> None:
    """Restore the Stage 1 file; the version 2 file is kept beside it."""
    root, ledger = data_root.root(), data_root.session.ledger
    with claimed(ledger, ASSET, ["all"], context.run_id):
        counts = roll_back(root, ledger, context.run_id, delete_embeddings=config.delete_embeddings)
        ledger.record_counts(context.run_id, ASSET, counts)
    shown = with_units(counts, "records", from_backup="files", deleted_files="files")
    path = dg.MetadataValue.path(str(root.stage2_jsonl))
    context.log_event(dg.AssetMaterialization(asset_key(ASSET), metadata={**shown, "path": path}))
    if config.delete_embeddings:
        context.instance.wipe_assets([asset_key(spec.kind) for spec in embedding_specs()])


@dg.job(tags=ROOT_TAGS, description="Go back to the Stage 1 file; with `delete_embeddings`, delete every npy file too.")
def roll_back_to_stage1() -> None:
    """Restore the Stage 1 file, and delete every npy file if requested."""
    roll_back_records()


publish_shards = dg.define_asset_job(
    PUBLISH_JOB,
    selection=dg.AssetSelection.assets(
        stage2_jsonl,
        *([near_duplicates] if DINOV3 in embedding_specs() else []),
        bucket_shards,
        *([published_shards] if is_published() else []),
    ),
    tags=ROOT_TAGS,
    description="The Stage 2 records, near duplicates, and the shards of every bucket whose samples changed.",
)


def published(config: Config) -> list[str]:
    """Return the names of the assets that update records and shards, and publish them if the configuration has `push`."""
    duplicates = ["near_duplicates"] if config.near_duplicates.exclude else []
    return ["stage2_jsonl", *duplicates, "bucket_shards", *(["published_shards"] if config.push else [])]
