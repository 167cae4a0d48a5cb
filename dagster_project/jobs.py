"""The two halves of the main job. One run has one partitions definition, so images and buckets cannot share one."""

import dagster as dg

from assets.bucket_shards import bucket_shards
from assets.embeddings import embedding_assets
from assets.partitions import buckets, images
from assets.stage2_jsonl import stage2_jsonl
from io_managers.events import DEFER_TAG

embed_images = dg.define_asset_job(
    "embed_images",
    selection=dg.AssetSelection.assets(*embedding_assets),
    partitions_def=images,
    tags={DEFER_TAG: "true"},
    description="All embeddings of a range of images.",
)

publish_shards = dg.define_asset_job(
    "publish_shards",
    selection=dg.AssetSelection.assets(stage2_jsonl, bucket_shards),
    partitions_def=buckets,
    description="The Stage 2 records, and the shards of every bucket whose samples changed.",
)
