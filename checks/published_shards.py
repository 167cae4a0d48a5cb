"""The check of the published shards: every object of the current version, by name and size."""

import dagster as dg

from assets.published_shards import published_shards
from imagemill.fs.location import FOR_WRITING, parse_location
from imagemill.pipeline.push import publisher, refuse_no_url
from imagemill.validation.published import published_objects
from io_managers.check_results import as_result
from resources.data_root import DataRootResource


@dg.asset_check(asset=published_shards)
def published_complete(data_root: DataRootResource) -> dg.AssetCheckResult:
    """The published version is that of the local sets, and has every object with its size.

    No object is read: `imagemill push --verify` compares every byte, and `imagemill validate URL` applies every rule.
    """
    session = data_root.session
    location = parse_location(refuse_no_url(session.config.push), "push", schemes=FOR_WRITING)
    return as_result(published_objects(publisher(session, location)))
