"""The shards: checksums, members, index and manifest of every bucket, npy members against the files on disk."""

from contextlib import closing

import dagster as dg

from assets.bucket_shards import bucket_shards
from checks.results import as_result
from imagemill.validation.validator import validate_shards
from resources.data_root import DataRootResource


@dg.asset_check(asset=bucket_shards)
def shards_valid(data_root: DataRootResource) -> dg.AssetCheckResult:
    """Every tar is what its manifest says, every sample where the index says, every npy the file's bytes."""
    output = data_root.shards_folder()
    with closing(data_root.ledger()) as ledger:
        return as_result(*validate_shards(output, data_root.root().derived, ledger))


shard_checks = [shards_valid]
