"""Columns of a large table as text: compared whole in one go, split only where somebody asks for a value.

A hundred thousand equal values are the usual case of a table held against another one, and objects made for each, and taken
apart again, would be nearly all the work.
"""

from collections.abc import Iterable
from functools import cached_property

# No file name holds one, and no fingerprint; each value ends with it, so that empty values count.
END = "/"


class Column:
    """Values each followed by a slash, which none of them holds."""

    def __init__(self, text: str = "") -> None:
        self.text = text

    @classmethod
    def of(cls, values: Iterable[str]) -> "Column":
        """Of values without a slash."""
        values = list(values)
        column = cls(END.join([*values, ""]))
        column.values = values
        return column

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Column) and self.text == other.text

    __hash__ = None  # type: ignore[assignment]

    @cached_property
    def values(self) -> list[str]:
        return self.text.split(END)[:-1]
