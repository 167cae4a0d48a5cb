"""WebDataset tars per aspect bucket."""

from contextlib import closing

import dagster as dg
from pydantic import Field

from assets.near_duplicates import near_duplicates
from assets.partitions import buckets
from assets.stage2_jsonl import stage2_jsonl
from imagemill.pipeline.claims import claimed_until_output
from imagemill.pipeline.near_duplicates import excluded_images
from imagemill.pipeline.readiness import ASSET, find_ready, progress_lines
from imagemill.pipeline.shard_sets import ShardParameters
from imagemill.pipeline.shards import Existing, ShardSet, check_buckets, plan_shards, refuse_conflicts
from resources.data_root import DataRootResource

PARAMETERS = ShardParameters.__struct_fields__


class ShardConfig(dg.Config):
    """Parameters of one packing run."""

    only: list[str] = Field(
        [], description="Of the run's buckets only these; empty: all. A run takes one range of them."
    )
    shard_size: int | None = Field(
        None, ge=1, description="Samples per tar; unset: shard_size of imagemill.yaml (1000)."
    )
    shuffle: bool | None = Field(None, description="Reorder the ready samples before limit and grouping.")
    seed: int | None = Field(None, description="Seed of the shuffle; unset: 1337.")
    limit: int | None = Field(None, ge=1, description="Samples over all buckets, after the shuffle.")
    existing: str = Field(
        "update",
        description="Shards already there: `update` changed sets of ours, `refuse`, `replace`; `append` new tars and tombstones, "
        "`repack` to fold them in, `withdraw` for withdrawals alone.",
    )
    output_dir: str | None = Field(None, description="Folder for the shards; unset: the remembered one, else shards/.")
    workers: int | None = Field(
        None, ge=1, description="Tars written at a time; unset: pack_threads of imagemill.yaml."
    )
    progress_every: int = Field(500, ge=1, description="Ready records between two progress lines.")


@dg.asset(
    deps=[stage2_jsonl, near_duplicates],
    partitions_def=buckets,
    backfill_policy=dg.BackfillPolicy.single_run(),
    io_manager_key="tar_io",
    group_name="shards",
    kinds={"webdataset"},
    owners=["team:imagemill"],
    code_version="1",
)
def bucket_shards(context: dg.AssetExecutionContext, config: ShardConfig, data_root: DataRootResource) -> ShardSet:
    """`shards/bucket_<bucket>/shard-NNNNNN.tar` with index and manifest, from every record whose files are valid and current."""
    chosen = check_buckets(config.only or context.partition_keys)
    root = data_root.root()
    output = data_root.shards_folder(config.output_dir)
    asked = {name: value for name in PARAMETERS if (value := getattr(config, name)) is not None}
    parameters = ShardParameters(**{"shard_size": data_root.config().shard_size, **asked})
    existing: Existing = config.existing  # type: ignore[assignment]
    with closing(data_root.ledger()) as ledger, claimed_until_output(ledger, ASSET, chosen, context.run_id):
        say = progress_lines(config.progress_every)
        excluded = excluded_images(root.derived, ledger, data_root.config().near_duplicates)
        found = find_ready(root.stage2_jsonl, root.derived, ledger, buckets=chosen, excluded=excluded, on_ready=say)
        ledger.record_files(found.adopted)
        if found.filtered:
            ledger.clear_problems(ASSET, (sample.image_id for sample in found.ready))
            ledger.record_problems(found.problems)
        else:
            ledger.replace_problems(ASSET, found.problems)
        ledger.record_counts(
            context.run_id,
            ASSET,
            {
                "total_records": found.total_records,
                "ready_records": len(found.ready),
                "skipped_incomplete": found.skipped_incomplete,
                "filtered": found.filtered,
            },
        )
        shard_set = plan_shards(
            found.ready, chosen, output, parameters, existing, withdrawn=ledger.ids("withdrawn"),
            as_recorded=existing not in {"refuse", "replace"} and not asked,
        )  # fmt: skip
        shard_set.workers = config.workers or data_root.config().pack_threads
        refuse_conflicts(shard_set)
        for plan in shard_set.plans:
            context.add_asset_metadata(
                {"samples": plan.live, "new shards": len(plan.shards)}, partition_key=plan.bucket
            )
        return shard_set
