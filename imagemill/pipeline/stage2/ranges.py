"""Scattered images as few contiguous ranges of partitions, because a run takes one range.

What lies inside a range and needs nothing costs the asset a look at the ledger, so one wide range beats many narrow ones.
"""

from collections.abc import Collection, Sequence
from typing import NamedTuple


class KeyRange(NamedTuple):
    """First and last partition key, both inclusive, and how many wanted keys lie between."""

    first: str
    last: str
    wanted: int


def plan_ranges(keys: Sequence[str], wanted: Collection[str], size: int) -> list[KeyRange]:
    """Cover the wanted keys by ranges of at most `size` wanted keys each.

    Args:
        keys: all partition keys in the order of their registration.
    """
    members = set(wanted)
    chosen = [key for key in keys if key in members]
    chunks = (chosen[i : i + size] for i in range(0, len(chosen), size))
    return [KeyRange(chunk[0], chunk[-1], len(chunk)) for chunk in chunks]
