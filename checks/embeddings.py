"""Every embedding file on disk: header, shape, dtype and length; the rest by the ledger where it vouches."""

from contextlib import closing

import dagster as dg

from assets.embeddings import embedding_assets
from checks.results import as_result
from imagemill.embedding_specs import EmbeddingSpec, embedding_specs
from imagemill.formats.npy import NpyStore
from imagemill.validation.files import embedding_files
from imagemill.validation.findings import collect
from resources.data_root import DataRootResource


def files_check(asset: dg.AssetsDefinition, spec: EmbeddingSpec) -> dg.AssetChecksDefinition:
    """The check of one kind's folder."""

    @dg.asset_check(
        asset=asset,
        name="files_valid",
        description=f"Every file of derived/{spec.folder}: {spec.dtype}, the shape of its image, whole, finite.",
    )
    def files_valid(data_root: DataRootResource) -> dg.AssetCheckResult:
        root = data_root.root()
        store = NpyStore(root.derived / spec.folder, spec)
        with closing(data_root.ledger()) as ledger:
            return as_result(collect(spec.folder, spec.kind, embedding_files(store, ledger)))

    return files_valid


_SPECS = {dg.AssetKey(spec.kind): spec for spec in embedding_specs()}

embedding_checks = [files_check(asset, _SPECS[asset.key]) for asset in embedding_assets]
