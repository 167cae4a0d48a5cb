"""The check of the published shards: every object of the current version, by name and size."""

import dagster as dg

from assets.published_shards import published_shards
from imagemill.pipeline.push import place_to_push, publisher
from imagemill.validation.published import published_objects
from io_managers.check_results import as_result
from resources.data_root import DataRootResource


@dg.asset_check(asset=published_shards)
def published_complete(data_root: DataRootResource) -> dg.AssetCheckResult:
    """The published version is that of the local sets, and has every object with its size.

    No object is read: `imagemill push --verify` compares every byte, and `imagemill validate URL` applies every rule.
    """
    session = data_root.session
    return as_result(published_objects(publisher(session, place_to_push(session))))
