"""Partition definitions: by image, by bucket, by preset, by mission and rank."""

import warnings
from functools import partial
from typing import Any

import dagster as dg

from imagemill.domain.buckets import BUCKETS

# One key per approved image. The outputs of a deleted source stay, and so does its key; that of a renamed one is deleted.
images = dg.DynamicPartitionsDefinition(name="images")

buckets = dg.StaticPartitionsDefinition(list(BUCKETS))

# Maximum number of images in the range of a run: 0.3 ms of bookkeeping per image instead of one run per image.
IMAGES_PER_RUN = 8192

# Public datasets; base presets, `<dataset>/<preset>`; and presets with coordinates: base presets in place, and derived presets
# with a limit on objects.
datasets = dg.DynamicPartitionsDefinition(name="datasets")
presets = dg.DynamicPartitionsDefinition(name="presets")
coord_presets = dg.DynamicPartitionsDefinition(name="coord_presets")

# Stage-A: missions, and `<mission>/<r>of<W>`. The key contains the world size, because it determines each rank's images.
missions = dg.DynamicPartitionsDefinition(name="missions")
ranks = dg.DynamicPartitionsDefinition(name="ranks")


# Owner of every asset, and its initial code version; an asset whose code changes sets its own.
asset: Any = partial(dg.asset, owners=["team:imagemill"], code_version="1")


def ranged_asset(**options: Any) -> Any:
    """Return `asset(**options)` whose partitions share a run, unless `backfill_policy` limits them.

    Suppresses the warning of the pinned releases that `backfill_policy` is in beta.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", dg.BetaWarning)
        return asset(**{"backfill_policy": dg.BackfillPolicy.single_run(), **options})
