"""The statistics of the latents: possible numbers, and `all.json` the merge of its buckets."""

import dagster as dg

from assets.latent_statistics import latent_statistics
from imagemill.pipeline.curation.latent_statistics import ASSET
from imagemill.validation import reports
from imagemill.validation.findings import collect
from io_managers.check_results import as_result
from resources.data_root import DataRootResource


@dg.asset_check(asset=latent_statistics)
def statistics_agree(data_root: DataRootResource) -> dg.AssetCheckResult:
    """Every document whole, its numbers finite and possible; `all.json` equal to its buckets put together."""
    return as_result(collect(ASSET, "latent statistics", reports.latent_statistics(data_root.root().derived)))
