"""WebDataset tars per aspect bucket."""

import os
from collections.abc import Iterator
from pathlib import Path

import dagster as dg

from assets.partitions import buckets, ranged_asset
from assets.stage2_jsonl import stage2_jsonl
from imagemill.fs.atomic import sweep_temporaries
from imagemill.options import ShardOptions
from imagemill.pipeline.leases import Leased
from imagemill.pipeline.malloc_tuning import return_freed_memory
from imagemill.pipeline.shards.conflicts import refuse_conflicts
from imagemill.pipeline.shards.packing import dry_run, plan_packing, scanned
from imagemill.pipeline.shards.readiness import ASSET, Readiness
from imagemill.pipeline.shards.shard_plan import PackPlan
from imagemill.store.ledger import Ledger
from io_managers.viewer import page_shown
from resources.dagster_internals.events import ExplainedFailure
from resources.data_root import DataRootResource


class ShardConfig(dg.Config, ShardOptions):
    """Parameters of one packing run."""


def shards_asset(*upstream: dg.AssetsDefinition) -> dg.AssetsDefinition:
    """Return the asset of the shards, which are packed after the records and after these assets."""

    @ranged_asset(
        deps=[stage2_jsonl, *upstream],
        partitions_def=buckets,
        io_manager_key="tar_io",
        group_name="shards",
        kinds={"webdataset"},
        look=page_shown("samples as cropped", "images", show="in_shards", crop="1"),
        output_required=False,
    )
    def bucket_shards(
        context: dg.AssetExecutionContext, config: ShardConfig, data_root: DataRootResource
    ) -> Iterator[dg.Output[Leased]]:
        """`shards/bucket_<bucket>/shard-NNNNNN.tar` with index and manifest, from every record whose files are valid and current.

        The job `resume_missing` packs every bucket whose samples changed, after it has made what is missing.
        """
        if config.dry_run:
            _rehearse(context, config, data_root)
        else:
            yield dg.Output(_packing(context, config, data_root))

    return bucket_shards


bucket_shards = shards_asset()


def _packing(context: dg.AssetExecutionContext, config: ShardConfig, data_root: DataRootResource) -> Leased:
    """Return the leased work: the plan, checked for conflicts. Omitted samples and adopted files are recorded in the ledger."""
    packing = config.packing(context.partition_keys, data_root.shards_folder(config.output_dir))
    session, run_id = data_root.session, context.run.run_id

    def plan() -> PackPlan:
        return_freed_memory()  # of embeddings and records
        found, shard_set = plan_packing(session.overview(), session.config, session.ledger, packing)
        _record(session.ledger, run_id, found, adopting=packing.existing != "withdraw")
        shard_set.empty_captions = session.root.empty_captions
        shard_set.workers = config.workers or session.config.pack_threads
        sweep_temporaries(packing.output, folders=True)
        refuse_conflicts(shard_set)
        return shard_set

    return Leased(session.ledger, ASSET, packing.buckets, run_id, plan)


def _record(ledger: Ledger, run_id: str, found: Readiness, *, adopting: bool) -> None:
    if adopting:  # withdrawing packs no files, and files of a kind that is being regenerated must stay old
        ledger.record_files(found.adopted, made=False)
    if found.filtered:
        ledger.clear_problems(ASSET, (sample.image_id for sample in found.ready))
        ledger.record_problems(found.problems)
    else:
        ledger.replace_problems(ASSET, found.problems)
    ledger.record_counts(run_id, ASSET, scanned(found))


def _rehearse(context: dg.AssetExecutionContext, config: ShardConfig, data_root: DataRootResource) -> None:
    """Log the counters. Raises ExplainedFailure if the real run would refuse; the command line then exits with 1."""
    session = data_root.session
    output = Path(os.path.abspath(config.output_dir)) if config.output_dir else session.root.shards
    packing = config.packing(context.partition_keys, output)
    found = dry_run(session.overview(), session.config, session.reading, packing)
    context.log.info("dry run, nothing written: " + " ".join(f"{name}={n}" for name, n in found.counts.items()))
    if found.conflicts:
        raise ExplainedFailure("a real run would refuse: " + "; ".join(found.conflicts))
