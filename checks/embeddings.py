"""Checks of every embedding file on disk (header, shape, dtype, length; the rest by the ledger), and of images without one."""

import dagster as dg

from assets.embeddings import embedding_assets
from imagemill.domain.embedding_specs import EmbeddingSpec, embedding_specs
from io_managers.embedding_results import FILES, INPUTS, RESULTS
from resources.data_root import DataRootResource


def embedding_check(asset: dg.AssetsDefinition, spec: EmbeddingSpec, name: str) -> dg.AssetChecksDefinition:
    """Return one of the checks of one kind."""
    descriptions = {
        FILES: f"Every file of derived/{spec.folder}: {spec.dtype}, the shape of its image, whole, finite.",
        INPUTS: f"Every image has its file in derived/{spec.folder}; the others are named: reason, remedy, since when.",
    }

    @dg.asset_check(asset=asset, name=name, description=descriptions[name])
    def check(data_root: DataRootResource) -> dg.AssetCheckResult:
        return RESULTS[name](data_root.session, spec)

    return check


embedding_checks = [
    embedding_check(asset, spec, name)
    for asset, spec in zip(embedding_assets, embedding_specs(), strict=True)
    for name in (FILES, INPUTS)
]
