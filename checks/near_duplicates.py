"""Check of the near-duplicate report: valid groups, and lines that match its summary."""

import dagster as dg

from assets.near_duplicates import near_duplicates
from imagemill.pipeline.curation.near_duplicates import ASSET
from imagemill.validation import reports
from imagemill.validation.findings import collect
from io_managers.check_results import as_result
from resources.data_root import DataRootResource


@dg.asset_check(asset=near_duplicates)
def groups_valid(data_root: DataRootResource) -> dg.AssetCheckResult:
    """Each group has at least two members including its representative, and no image is in two groups."""
    return as_result(collect(ASSET, "near duplicates", reports.near_duplicates(data_root.root().derived)))
