"""Statistics of the VAE latents per bucket."""

import dagster as dg

from assets.partitions import buckets, ranged_asset
from imagemill.domain.embedding_specs import VAE
from imagemill.pipeline.curation.latent_statistics import ALL, ASSET, plan_statistics, statistics_reports
from imagemill.pipeline.curation.reports import Reports
from imagemill.pipeline.leases import Leased, wait_for_claim
from imagemill.store.provenance import read_identity
from resources.data_root import DataRootResource
from resources.keys import asset_key


@ranged_asset(
    deps=[dg.AssetDep(asset_key(VAE.kind), partition_mapping=dg.AllPartitionMapping())],
    partitions_def=buckets,
    io_manager_key="report_io",
    group_name="curation",
    kinds={"numpy", "json"},
    metadata={"place": ASSET},
)
def latent_statistics(context: dg.AssetExecutionContext, data_root: DataRootResource) -> Leased:
    """`derived/latent_statistics/<bucket>.json` and `all.json`: mean, standard deviation, min and max per latent channel.

    The statistics are given for the values as stored, and after the model's own scaling. `all.json` is merged from the buckets
    without reading a latent again.
    """
    session, run_id = data_root.session, context.run.run_id
    derived, ledger = session.root.derived, session.ledger

    def claim_all() -> None:
        wait_for_claim(ledger, ASSET, [ALL], run_id)

    def plan() -> Reports:
        plan = plan_statistics(derived, ledger, read_identity(ledger, VAE.kind), context.partition_keys)
        stream = statistics_reports(plan, threads=session.config.decoders, before_merge=claim_all)
        return Reports(derived / ASSET, stream)

    return Leased(ledger, ASSET, context.partition_keys, run_id, plan)
