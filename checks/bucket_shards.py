"""Checks of the shards: checksums, members, index and manifest of every bucket, npy members against the files on disk."""

from pathlib import Path

import dagster as dg

from assets.bucket_shards import bucket_shards
from imagemill.pipeline.shards.shard_sets import INDEX
from imagemill.validation.findings import Report, broken, collect
from imagemill.validation.shard_sets import set_folders, validate_shards
from imagemill.validation.tables import validate_index_table
from io_managers.check_results import as_result
from resources.data_root import DataRootResource


@dg.asset_check(asset=bucket_shards)
def shards_valid(data_root: DataRootResource) -> dg.AssetCheckResult:
    """Every tar matches its manifest, every sample is where the index says, and every npy member equals its file.

    Sets are read if a file changed since they were written or last read; `imagemill verify` reads all of them.
    """
    folders, ledger = set_folders(data_root.shards_folder()), data_root.session.ledger
    return as_result(*validate_shards(folders, data_root.root().derived, ledger, also=_index_table))


def _index_table(folder: Path) -> Report:
    """Return a report on the index of a set; its samples are counted elsewhere."""
    findings = validate_index_table(folder) if (folder / INDEX).exists() else ()
    return collect(str(folder), "shard index", broken(findings))
