"""Conversion of scattered images to few contiguous ranges of partitions, because a run takes one range.

An image inside a range that needs no work costs only a ledger lookup, so one wide range is cheaper than many narrow ones.
"""

from collections.abc import Collection, Sequence
from typing import NamedTuple


class KeyRange(NamedTuple):
    """First and last partition key, both inclusive, and the number of wanted keys between them."""

    first: str
    last: str
    wanted: int


def plan_ranges(keys: Sequence[str], wanted: Collection[str], size: int) -> list[KeyRange]:
    """Cover the wanted keys by ranges of at most `size` wanted keys each.

    Args:
        keys: all partition keys in the order of their registration.
        wanted: the keys to cover.
        size: most wanted keys per range.
    """
    members = set(wanted)
    chosen = [key for key in keys if key in members]
    chunks = (chosen[i : i + size] for i in range(0, len(chosen), size))
    return [KeyRange(chunk[0], chunk[-1], len(chunk)) for chunk in chunks]
