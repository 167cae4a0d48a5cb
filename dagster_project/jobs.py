"""The two halves of the main job, and reading everything back.

One run has one partitions definition, so images and buckets cannot share one.
"""

import dagster as dg

from assets.bucket_shards import bucket_shards
from assets.embeddings import embedding_assets
from assets.near_duplicates import near_duplicates
from assets.stage2_jsonl import stage2_jsonl
from dagster_project.internals.coordinator import EMBED_JOB, PUBLISH_JOB
from imagemill.pipeline.stage2.damage import note_damage
from imagemill.validation.contents import RecordedContents
from imagemill.validation.findings import as_text
from imagemill.validation.validator import verify_stage2
from resources.dagster_internals.tags import DEFER_TAG
from resources.data_root import DataRootResource

embed_images = dg.define_asset_job(
    EMBED_JOB,
    selection=dg.AssetSelection.assets(*embedding_assets),
    tags={DEFER_TAG: "true"},
    description="All embeddings of a range of images.",
)


@dg.op
def read_back(context: dg.OpExecutionContext, data_root: DataRootResource) -> None:
    """Read every record and every npy file; note damaged files for the next run."""
    root, ledger = data_root.root(), data_root.session.ledger
    contents = RecordedContents(ledger)
    report = verify_stage2(root.stage2_jsonl, root.derived, contents)
    for line in as_text(report):
        context.log.info(line)
    if contents.damaged:
        context.log.info(note_damage(ledger, contents.damaged))
    if not report.passed:
        raise dg.Failure(f"{report.errors} findings; the first ones are in this run's log")


@dg.job(description="Read back every Stage 2 record and every npy file it names; fails on any finding.")
def verify_stage2_files() -> None:
    read_back()


publish_shards = dg.define_asset_job(
    PUBLISH_JOB,
    selection=dg.AssetSelection.assets(stage2_jsonl, near_duplicates, bucket_shards),
    description="The Stage 2 records, near duplicates, and the shards of every bucket whose samples changed.",
)


def published(*, excluding: bool) -> list[str]:
    """Names of the assets that bring records and shards up to date; `excluding`: whether shards leave near duplicates out."""
    return ["stage2_jsonl", *(["near_duplicates"] if excluding else []), "bucket_shards"]
