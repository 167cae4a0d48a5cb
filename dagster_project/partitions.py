"""Registration of partition keys: images, presets and missions."""

from collections.abc import Iterable

import dagster as dg
from sqlalchemy.exc import IntegrityError

from assets.partitions import coord_presets, datasets, missions, presets, ranks
from assets.stage_a_groups import rank_key
from imagemill.pipeline.presets.preset_config import Presets, split_key

# Keys per insert. Single inserts would need one transaction per image.
_KEYS_PER_BATCH = 5000


def register_presets(instance: dg.DagsterInstance, configured: Presets) -> int:
    """Register partitions for the datasets and presets in `presets.yaml`; return the number of new ones."""
    bases = list(configured.presets)
    return (
        register(instance, datasets, {*configured.datasets, *(split_key(key)[0] for key in bases)})
        + register(instance, presets, bases)
        + register(instance, coord_presets, configured.keys())
    )


def register_missions(instance: dg.DagsterInstance, found: Iterable[str], world_size: int) -> int:
    """Register partitions for missions, and for their ranks in this world size; return the number of new ones."""
    names = list(found)
    keys = (rank_key(mission, rank, world_size) for mission in names for rank in range(world_size))
    return register(instance, missions, names) + register(instance, ranks, keys)


def register(instance: dg.DagsterInstance, definition: dg.DynamicPartitionsDefinition, keys: Iterable[str]) -> int:
    """Register new partition keys, in the order given; return their number."""
    assert definition.name
    known = set(instance.get_dynamic_partitions(definition.name))
    new = [key for key in keys if key not in known]
    for start in range(0, len(new), _KEYS_PER_BATCH):
        _add(instance, definition.name, new[start : start + _KEYS_PER_BATCH])
    return len(new)


def _add(instance: dg.DagsterInstance, definition: str, keys: list[str]) -> None:
    # Two commands on one folder may add the same key between Dagster's query and its insert: query again.
    while keys:
        try:
            instance.add_dynamic_partitions(definition, keys)
            return
        except IntegrityError:
            known = set(instance.get_dynamic_partitions(definition))
            if known.isdisjoint(keys):
                raise
            keys = [key for key in keys if key not in known]
