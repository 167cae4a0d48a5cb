"""Images that are nearly the same."""

from contextlib import closing

import dagster as dg
import msgspec

from assets.embeddings import dinov3_npy
from imagemill.options import NearDuplicateOptions
from imagemill.pipeline.curation.near_duplicates import ASSET, lines_path, near_duplicate_reports, plan_near_duplicates
from imagemill.pipeline.curation.reports import Reports
from imagemill.pipeline.leases import claimed_until_output
from resources.data_root import DataRootResource


class NearDuplicateConfig(dg.Config, NearDuplicateOptions):
    """Limits of the search."""


@dg.asset(
    deps=[dg.AssetDep(dinov3_npy, partition_mapping=dg.AllPartitionMapping())],
    io_manager_key="report_io",
    group_name="curation",
    kinds={"numpy", "json"},
    owners=["team:imagemill"],
    code_version="1",
    metadata={"place": f"{ASSET}.jsonl"},
)
def near_duplicates(
    context: dg.AssetExecutionContext, config: NearDuplicateConfig, data_root: DataRootResource
) -> Reports:
    """`derived/near_duplicates.jsonl`: groups of images whose DINOv3 vectors nearly agree, with a sheet of thumbnails.

    A report. Shards leave near duplicates out only where `imagemill.yaml` says `near_duplicates: {exclude: true}`.
    """
    root, given = data_root.root(), data_root.config()
    settings = msgspec.structs.replace(given.near_duplicates, **config.given())
    with closing(data_root.ledger()) as ledger, claimed_until_output(ledger, ASSET, ["all"], context.run.run_id):
        plan = plan_near_duplicates(root.derived, ledger, settings)
    stream = near_duplicate_reports(plan, root.approved, threads=given.decode_threads, search=given.model_threads)
    return Reports(lines_path(root.derived), stream)
