"""Images that are nearly the same."""

import dagster as dg
import msgspec

from assets.embeddings import dinov3_npy
from assets.launchpad import LaunchpadConfig, unset
from imagemill.pipeline.curation.near_duplicates import ASSET, lines_path, near_duplicate_reports, plan_near_duplicates
from imagemill.pipeline.curation.reports import Reports
from imagemill.pipeline.leases import Leased
from resources.data_root import DataRootResource


class NearDuplicateConfig(LaunchpadConfig):
    """What counts as a near duplicate in this run."""

    threshold: float | None = unset(
        0.0, "Cosine from which two images are near duplicates; {unset}: imagemill.yaml (0.97).", gt=0, le=1
    )


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
) -> Leased:
    """`derived/near_duplicates.jsonl`: groups of images whose DINOv3 vectors nearly agree, with a sheet of thumbnails.

    A report. Shards leave near duplicates out only where `imagemill.yaml` says `near_duplicates: {exclude: true}`.
    """
    session = data_root.session
    root, given = session.root, session.config
    settings = given.near_duplicates
    if config.threshold is not None:
        settings = msgspec.structs.replace(settings, threshold=config.threshold)

    def plan() -> Reports:
        plan = plan_near_duplicates(root.derived, session.ledger, settings)
        stream = near_duplicate_reports(plan, root.approved, threads=given.decode_threads, search=given.model_threads)
        return Reports(lines_path(root.derived), stream)

    return Leased(session.ledger, ASSET, ["all"], context.run.run_id, plan)
