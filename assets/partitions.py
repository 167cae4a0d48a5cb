"""How the work is cut: by image, by bucket, by preset, by mission and rank."""

import warnings
from functools import partial
from typing import Any

import dagster as dg

from imagemill.domain.buckets import BUCKETS

# One key per approved image. Keys are never deleted: a vanished source keeps its outputs.
images = dg.DynamicPartitionsDefinition(name="images")

buckets = dg.StaticPartitionsDefinition(list(BUCKETS))

# Runs take ranges of at most this many images: 0.3 ms of bookkeeping per image instead of a run each.
IMAGES_PER_RUN = 8192

# Public datasets; base presets, `<dataset>/<preset>`; and presets by what their coordinates are made of: base ones in place,
# derived ones with a limit on objects.
datasets = dg.DynamicPartitionsDefinition(name="datasets")
presets = dg.DynamicPartitionsDefinition(name="presets")
coord_presets = dg.DynamicPartitionsDefinition(name="coord_presets")

# Stage-A: missions, and `<mission>/<r>of<W>`: the world size is part of the key, as W ranks cut a mission otherwise than V do.
missions = dg.DynamicPartitionsDefinition(name="missions")
ranks = dg.DynamicPartitionsDefinition(name="ranks")


# Every asset's owner, and its code version while it has not changed: one that changes names its own.
asset: Any = partial(dg.asset, owners=["team:imagemill"], code_version="1")


def ranged_asset(**options: Any) -> Any:
    """Return `asset(**options)` whose partitions share a run, if `backfill_policy` does not limit them.

    Without the warning that `backfill_policy` is marked beta in the pinned releases.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", dg.BetaWarning)
        return asset(**{"backfill_policy": dg.BackfillPolicy.single_run(), **options})
