"""Statistics of the VAE latents, bucket by bucket."""

from contextlib import closing

import dagster as dg

from assets.embeddings import vae_latents
from assets.partitions import buckets, ranged_asset
from imagemill.domain.embedding_specs import VAE
from imagemill.pipeline.curation.latent_statistics import ALL, ASSET, plan_statistics, statistics_reports
from imagemill.pipeline.curation.reports import Reports
from imagemill.pipeline.leases import claimed_until_output, wait_for_claim
from imagemill.store.ledger import Ledger
from imagemill.store.provenance import read_identity
from resources.data_root import DataRootResource


@ranged_asset(
    deps=[dg.AssetDep(vae_latents, partition_mapping=dg.AllPartitionMapping())],
    partitions_def=buckets,
    backfill_policy=dg.BackfillPolicy.single_run(),
    io_manager_key="report_io",
    group_name="curation",
    kinds={"numpy", "json"},
    owners=["team:imagemill"],
    code_version="1",
    metadata={"place": ASSET},
)
def latent_statistics(context: dg.AssetExecutionContext, data_root: DataRootResource) -> Reports:
    """`derived/latent_statistics/<bucket>.json` and `all.json`: mean, standard deviation, min and max per latent channel.

    As stored, and after the model's own scaling. Buckets are counted apart and merged without reading a latent again.
    """
    root, config = data_root.root(), data_root.config()
    with (
        closing(data_root.ledger()) as ledger,
        claimed_until_output(ledger, ASSET, context.partition_keys, context.run.run_id),
    ):
        plan = plan_statistics(root.derived, ledger, read_identity(ledger, VAE.kind), context.partition_keys)

    def claim_all() -> None:
        with Ledger(root.ledger) as ledger:
            wait_for_claim(ledger, ASSET, [ALL], context.run.run_id)

    stream = statistics_reports(plan, threads=config.decode_threads, before_merge=claim_all)
    return Reports(root.derived / ASSET, stream)
