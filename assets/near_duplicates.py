"""Report of near-duplicate images."""

import dagster as dg
import msgspec

from assets.partitions import asset
from imagemill.domain.embedding_specs import DINOV3
from imagemill.options import NearDuplicateOptions
from imagemill.pipeline.curation.near_duplicates import ASSET, lines_path, near_duplicate_reports, plan_near_duplicates
from imagemill.pipeline.curation.reports import Reports
from imagemill.pipeline.leases import Leased
from io_managers.viewer import page_shown
from resources.data_root import DataRootResource
from resources.keys import asset_key


class NearDuplicateConfig(dg.Config, NearDuplicateOptions):
    """Options of the search."""


@asset(
    deps=[dg.AssetDep(asset_key(DINOV3.kind), partition_mapping=dg.AllPartitionMapping())],
    io_manager_key="report_io",
    group_name="curation",
    kinds={"numpy", "json"},
    metadata={"place": f"{ASSET}.jsonl"},
    look=page_shown("groups side by side", "duplicates"),
)
def near_duplicates(
    context: dg.AssetExecutionContext, config: NearDuplicateConfig, data_root: DataRootResource
) -> Leased:
    """`derived/near_duplicates.jsonl`: groups of images whose DINOv3 vectors nearly agree, with a sheet of thumbnails.

    This is a report. Shards leave near duplicates out only if `imagemill.yaml` contains `near_duplicates: {exclude: true}`.
    """
    session = data_root.session
    root, given = session.root, session.config
    settings = msgspec.structs.replace(given.near_duplicates, **config.given())

    def plan() -> Reports:
        plan = plan_near_duplicates(root.derived, session.ledger, settings)
        stream = near_duplicate_reports(plan, root.approved, threads=given.decoders, search=given.model_threads)
        return Reports(lines_path(root.derived), stream)

    return Leased(session.ledger, ASSET, ["all"], context.run.run_id, plan)
