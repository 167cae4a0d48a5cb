"""Check of the latent statistics: possible numbers, and `all.json` equal to the merge of its buckets."""

import dagster as dg

from assets.latent_statistics import latent_statistics
from imagemill.pipeline.curation.latent_statistics import ASSET
from imagemill.validation import reports
from imagemill.validation.findings import collect
from io_managers.check_results import as_result
from resources.data_root import DataRootResource


@dg.asset_check(asset=latent_statistics)
def statistics_agree(data_root: DataRootResource) -> dg.AssetCheckResult:
    """Every document is complete, its numbers are finite and possible, and `all.json` equals the merge of its buckets."""
    return as_result(collect(ASSET, "latent statistics", reports.latent_statistics(data_root.root().derived)))
