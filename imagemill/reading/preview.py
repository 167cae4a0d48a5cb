"""Refusal of sets whose arrays a preview model made, or may have made.

Belongs here: which kinds of a set count as preview.
Belongs elsewhere: the manifest that records the models (pipeline/shards/shard_manifest.py).
"""

from pathlib import Path

from imagemill.domain.embedding_specs import embedding_specs
from imagemill.domain.layout import DataRoot
from imagemill.errors import ImagemillError
from imagemill.pipeline.shards.shard_manifest import Maker, Manifest
from imagemill.pipeline.shards.shard_sets import MANIFEST
from imagemill.store.ledger import Ledger
from imagemill.store.provenance import read_identity


def refuse_preview(folder: Path, manifest: Manifest) -> None:
    """Raises ImagemillError if a preview model made a kind of this set, or if that cannot be excluded.

    A manifest without a digest may have been edited. Its models count only if the data root around the set records the same.
    """
    if made := [kind for kind, maker in manifest.provenance.items() if maker.preview]:
        raise ImagemillError(
            f"{folder.name} holds what a preview model made: {', '.join(made)}",
            where=folder / MANIFEST,
            why="preview models have the shapes of the real ones and random weights: nothing can be learned from them",
            do="run imagemill with real models, or pass allow_preview=True to try a pipeline out",
        )
    if not manifest.sealed and (unproven := _unproven(folder, manifest)):
        raise ImagemillError(
            f"{folder.name} may hold what a preview model made: {', '.join(unproven)}",
            where=folder / MANIFEST,
            why="an earlier release wrote this manifest without a digest, and no data root around it records the same models",
            do="pack the set again with `imagemill shards --overwrite`, or pass allow_preview=True if you know the models",
        )


def _unproven(folder: Path, manifest: Manifest) -> list[str]:
    """Kinds of the set whose recorded model is not that of the data root."""
    root = DataRoot(folder.parent.parent)
    kinds = [spec.kind for spec in embedding_specs() if spec.member in manifest.members]
    return [kind for kind in kinds if not _agrees(root, kind, manifest.provenance.get(kind))]


def _agrees(root: DataRoot, kind: str, maker: Maker | None) -> bool:
    if maker is None or not root.ledger.is_file():
        return False
    try:
        with Ledger(root.ledger, read_only=True) as ledger:
            identity = read_identity(ledger, kind)
    except (OSError, ImagemillError):
        return False
    if identity is None:  # every file was adopted
        return maker.key is None
    return (identity.key, identity.model, identity.preview) == (maker.key, maker.model, maker.preview)
