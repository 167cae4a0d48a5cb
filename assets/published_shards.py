"""The published version of the shards in object storage."""

from contextlib import suppress

import dagster as dg

from assets.bucket_shards import bucket_shards
from assets.partitions import asset
from imagemill.config import config_in_force
from imagemill.domain.layout import DataRoot
from imagemill.errors import ImagemillError
from imagemill.pipeline.push import PushRequest, place_to_push, publisher
from io_managers.figures import with_units
from resources.data_root import DataRootResource


@asset(
    deps=[dg.AssetDep(bucket_shards.key, partition_mapping=dg.AllPartitionMapping())],
    group_name="shards",
    kinds={"s3"},
)
def published_shards(context: dg.AssetExecutionContext, data_root: DataRootResource) -> dg.MaterializeResult:
    """All sets of shards at `push` of imagemill.yaml, as one version that readers see whole; only missing tars are sent.

    Without `push`, there is no such asset. `imagemill push` does the same, and deletes versions that are no longer needed.
    """
    session = data_root.session
    result = publisher(session, place_to_push(session), context.run.run_id).push(PushRequest())
    figures = {"tars": result.tars, "sent_tars": result.sent_tars, "sent_bytes": result.sent_bytes}
    shown = with_units(figures, "tars", sent_bytes="B")
    return dg.MaterializeResult(metadata={"version": result.version, "url": result.url, **shown})


def is_published(root: DataRoot | None = None, config_file: str | None = None) -> bool:
    """Return whether a data root's configuration has `push`. False if it cannot be read, which its use reports."""
    with suppress(ImagemillError):
        return config_in_force(root or DataRoot.resolve(), config_file).push is not None
    return False
