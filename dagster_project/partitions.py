"""Images as Dagster sees them: registering keys, reporting sources, tagging ranges."""

from collections.abc import Iterable, Mapping

import dagster as dg
from dagster._core.storage.tags import ASSET_PARTITION_RANGE_END_TAG, ASSET_PARTITION_RANGE_START_TAG
from sqlalchemy.exc import IntegrityError

from assets.partitions import images

# Keys per insert: one statement each would be one transaction per image.
_KEYS_PER_BATCH = 5000


def register_images(instance: dg.DagsterInstance, ids: Iterable[str]) -> int:
    """Make partitions of the images that have none yet, in name order; returns how many."""
    assert images.name
    known = set(instance.get_dynamic_partitions(images.name))
    new = [image_id for image_id in ids if image_id not in known]
    for start in range(0, len(new), _KEYS_PER_BATCH):
        _add(instance, images.name, new[start : start + _KEYS_PER_BATCH])
    return len(new)


def _add(instance: dg.DagsterInstance, definition: str, keys: list[str]) -> None:
    # Two commands on one folder may add the same key between Dagster's look and its insert: look again.
    while keys:
        try:
            instance.add_dynamic_partitions(definition, keys)
            return
        except IntegrityError:
            known = set(instance.get_dynamic_partitions(definition))
            if known.isdisjoint(keys):
                raise
            keys = [key for key in keys if key not in known]


def range_tags(first: str, last: str) -> Mapping[str, str]:
    """A run over every partition from `first` to `last`, in order of registration."""
    return {ASSET_PARTITION_RANGE_START_TAG: first, ASSET_PARTITION_RANGE_END_TAG: last}
