"""Counters as metadata for a reader of the UI: names in words, each with its unit."""

from collections.abc import Mapping


def with_units(counts: Mapping[str, int], unit: str, **units: str) -> dict[str, int]:
    """Name each counter in words with its unit: `mask_corrected` of records becomes `mask corrected (records)`.

    Args:
        unit: of all counters but those that `units` names.
    """
    return {_named(name.replace("_", " "), units.get(name, unit)): count for name, count in counts.items()}


def _named(name: str, unit: str) -> str:
    return name if unit in name.split() else f"{name} ({unit})"


def kilobytes(size: int) -> dict[str, float]:
    """The size of a small file, given in bytes."""
    return {"size (kB)": round(size / 1e3, 1)}


def megabytes(size: int) -> dict[str, float]:
    """The size of a folder, given in bytes."""
    return {"size (MB)": round(size / 1e6, 3)}
