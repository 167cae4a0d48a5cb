"""Every embedding file on disk: header, shape, dtype and length; the rest by the ledger where it vouches. Images without one."""

from contextlib import closing

import dagster as dg

from assets.embeddings import embedding_assets
from checks.results import as_result
from imagemill.embedding_specs import EmbeddingSpec, embedding_specs
from imagemill.formats.npy import NpyStore
from imagemill.pipeline.standing_problems import problems_of_kind
from imagemill.validation.files import embedding_files
from imagemill.validation.findings import collect
from io_managers import refusals
from io_managers.refusals import CHECK
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


def inputs_check(asset: dg.AssetsDefinition, spec: EmbeddingSpec) -> dg.AssetChecksDefinition:
    """The check that names the images without a file of one kind."""

    @dg.asset_check(
        asset=asset,
        name=CHECK,
        description=f"Every image has its file in derived/{spec.folder}; the others are named: reason, remedy, since when.",
    )
    def inputs_accepted(data_root: DataRootResource) -> dg.AssetCheckResult:
        with closing(data_root.ledger()) as ledger:
            return refusals.inputs_accepted(problems_of_kind(data_root.root(), ledger, spec))

    return inputs_accepted


_SPECS = {dg.AssetKey(spec.kind): spec for spec in embedding_specs()}

embedding_checks = [
    check(asset, _SPECS[asset.key]) for asset in embedding_assets for check in (files_check, inputs_check)
]
