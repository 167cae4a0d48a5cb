"""Dependencies of assets that follow the configuration when the code location is loaded."""

from collections.abc import Iterable
from typing import Any

import dagster as dg

from assets.bucket_shards import bucket_shards, shards_asset
from assets.near_duplicates import near_duplicates
from assets.published_shards import is_published, published_shards
from imagemill.config import config_in_force
from imagemill.domain.layout import DataRoot
from imagemill.errors import ImagemillError
from resources.data_root import DataRootResource


def with_lineage(assets: Iterable[Any], data_root: DataRootResource) -> list[Any]:
    """Return the assets in use: `near_duplicates` is upstream of `bucket_shards` only where shards leave near duplicates out."""
    if not _excludes_duplicates(data_root):
        return list(assets)
    # Another definition: dependencies added to a finished one are shown in the graph, but do not order the steps of a run.
    return [shards_asset(near_duplicates) if _has_key(asset, bucket_shards.key) else asset for asset in assets]


def without_unpublished(
    assets: Iterable[Any], checks: Iterable[Any], data_root: DataRootResource
) -> tuple[list[Any], list[Any]]:
    """Leave out `published_shards` and its checks where the configuration has no `push`."""
    if is_published(DataRoot.resolve(data_root.path or None), data_root.config_file or None):
        return list(assets), list(checks)
    key = published_shards.key
    return (
        [asset for asset in assets if not _has_key(asset, key)],
        [check for check in checks if key not in {one.asset_key for one in check.check_keys}],
    )


def _excludes_duplicates(data_root: DataRootResource) -> bool:
    """Return whether shards leave near duplicates out. False if the configuration cannot be read, which its use reports."""
    try:
        root, given = DataRoot.resolve(data_root.path or None), data_root.config_file or None
        return config_in_force(root, given).near_duplicates.exclude
    except ImagemillError:
        return False


def _has_key(asset: Any, key: dg.AssetKey) -> bool:
    return isinstance(asset, dg.AssetsDefinition) and key in asset.keys
