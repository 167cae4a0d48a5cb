"""Counters as metadata for the UI: names in words, each with its unit."""

from collections.abc import Mapping


def with_units(counts: Mapping[str, int], unit: str, **units: str) -> dict[str, int]:
    """Name each counter in words with its unit: `mask_corrected` of records becomes `mask corrected (records)`.

    Args:
        counts: the counters.
        unit: unit of all counters that `units` does not name.
        units: unit by counter name.
    """
    words = ((name.replace("_", " "), units.get(name, unit), count) for name, count in counts.items())
    return {name if of in name.split() else f"{name} ({of})": count for name, of, count in words}


def megabytes(size: int) -> dict[str, float]:
    """Return the metadata for the size of a folder, given in bytes."""
    return {"size (MB)": round(size / 1e6, 3)}
