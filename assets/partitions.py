"""Partition definitions: by image, by bucket, by preset, by mission and rank."""

import warnings
from collections.abc import Mapping
from typing import Any

import dagster as dg

from imagemill.domain.buckets import BUCKETS
from resources.keys import IMAGES, PREFIX, shared_name


def _dynamic(name: str) -> dg.DynamicPartitionsDefinition:
    return dg.DynamicPartitionsDefinition(name=shared_name(name))


# One key per approved image. The outputs of a deleted source stay, and so does its key; that of a renamed one is deleted.
images = _dynamic(IMAGES)

buckets = dg.StaticPartitionsDefinition(list(BUCKETS))

# Maximum number of images in the range of a run: 0.3 ms of bookkeeping per image instead of one run per image.
IMAGES_PER_RUN = 8192

# Pool of the runs that load models: in a queue with several places, one of them at a time.
GPU_POOL = "gpu"

# Public datasets; base presets, `<dataset>/<preset>`; and presets with coordinates: base presets in place, and derived presets
# with a limit on objects.
datasets = _dynamic("datasets")
presets = _dynamic("presets")
coord_presets = _dynamic("coord_presets")

# Stage-A: missions, and `<mission>/<r>of<W>`. The key contains the world size, because it determines each rank's images.
missions = _dynamic("missions")
ranks = _dynamic("ranks")


def asset(*, group_name: str, code_version: str = "1", look: Mapping[str, Any] | None = None, **options: Any) -> Any:
    """Return `dg.asset` with the owner, the key prefix and the group that assets of this root have.

    Args:
        group_name: group without the root's name.
        code_version: that of an asset whose code has changed since its first release.
        look: metadata with a link to the viewer.
        options: of `dg.asset`.
    """
    metadata = {**options.pop("metadata", {}), **(look or {})}
    return dg.asset(
        key_prefix=PREFIX,
        group_name=shared_name(group_name),
        owners=["team:imagemill"],
        code_version=code_version,
        metadata=metadata,
        **options,
    )


def ranged_asset(**options: Any) -> Any:
    """Return `asset(**options)` whose partitions share a run, unless `backfill_policy` limits them.

    Suppresses the warning of the pinned releases that `backfill_policy` is in beta.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", dg.BetaWarning)
        return asset(**{"backfill_policy": dg.BackfillPolicy.single_run(), **options})
