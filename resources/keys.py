"""Names of this data root in its Dagster history: asset keys, partition sets, groups and the tag of its runs.

In a root's own history they are plain names. In a history that several roots share, those of a root with a name begin with it:

    vae_latents  ->  animals/vae_latents     asset key; its step is animals__vae_latents
    images       ->  animals/images          partition set
    stage2       ->  animals/stage2          group

The name is determined when this module is imported, because keys of finished definitions cannot change. In the processes of a
service it is the one with which the service has been started, also after imagemill.yaml was edited.
"""

import os
from contextlib import suppress
from typing import Final

import dagster as dg

from imagemill.config import name_in_history
from imagemill.domain.layout import NAME_VARIABLE, DataRoot
from imagemill.errors import ImagemillError
from imagemill.inputs.scan import SOURCE_ASSET


def _name() -> str | None:
    if NAME_VARIABLE in os.environ:
        return os.environ[NAME_VARIABLE] or None
    with suppress(ImagemillError):  # reported when the configuration is needed
        return name_in_history(DataRoot.resolve())
    return None


NAME: Final = _name()
PREFIX: Final = [NAME] if NAME else []

# Names the root of a run in a shared history; runs of a root without a name lack it.
ROOT_TAG: Final = "imagemill/root"
ROOT_TAGS: Final = {ROOT_TAG: NAME} if NAME else {}


def asset_key(name: str) -> dg.AssetKey:
    """Return the key of an asset of this root."""
    return dg.AssetKey([*PREFIX, name])


def asset_name(key: dg.AssetKey) -> str:
    """Return an asset's name without the root's."""
    return key.path[-1]


def op_name(asset: str) -> str:
    """Return the name of an asset's op, which is also its step's key and that of its run configuration."""
    return "__".join([*PREFIX, asset])


def name_of_op(op: str) -> str:
    """Return the name of the asset of an op; the op's own name for any other."""
    return op.removeprefix(f"{NAME}__") if NAME else op


def check_name(key: dg.AssetCheckKey) -> str:
    """Return `asset:check`, without the root's name."""
    return f"{asset_name(key.asset_key)}:{key.name}"


def shared_name(name: str) -> str:
    """Return the name of a partition set or group of this root."""
    return "/".join([*PREFIX, name])


def is_of_this_root(run: dg.DagsterRun) -> bool:
    """Return whether a run is one of this root's."""
    return run.tags.get(ROOT_TAG) == NAME


APPROVED_IMAGES: Final = asset_key(SOURCE_ASSET)

# Partition set of the images of a root without a name.
IMAGES: Final = "images"
