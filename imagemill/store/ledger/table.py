"""Typed rows: a table's columns are the fields of a msgspec struct, in the same order."""

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, TypeVar

import msgspec

R = TypeVar("R", bound=msgspec.Struct)


class Codec(msgspec.Struct, frozen=True):
    """Conversion of one field to the value that SQLite stores, and back."""

    encode: Callable[[Any], Any]
    decode: Callable[[Any], Any]


class Table(Generic[R]):
    """One table and its row type.

    Attributes:
        name: of the table.
        columns: their names, comma-separated; a field that is renamed in the struct has that column name.
    """

    def __init__(self, name: str, row: type[R], **codecs: Codec) -> None:
        fields = msgspec.structs.fields(row)
        self.name, self._row = name, row
        self.names = tuple(field.encode_name for field in fields)
        self.columns = ", ".join(self.names)
        self._codecs = {n: codecs[field.name] for n, field in enumerate(fields) if field.name in codecs}
        self.insert = f"INSERT OR REPLACE INTO {name} ({self.columns}) VALUES ({', '.join('?' * len(fields))})"

    def values(self, rows: Iterable[R]) -> Iterator[tuple[Any, ...]]:
        """Yield the stored values of each row, in the order of the columns."""
        for row in rows:
            values = msgspec.structs.astuple(row)
            yield self._converted(values, encode=True) if self._codecs else values

    def rows(self, values: Iterable[tuple[Any, ...]]) -> Iterator[R]:
        """Yield a typed row for each tuple of `columns`."""
        if not self._codecs:
            return itertools.starmap(self._row, values)
        return (self._row(*self._converted(row, encode=False)) for row in values)

    def row(self, values: tuple[Any, ...]) -> R:
        """Return the typed row of one tuple of `columns`."""
        return self._row(*(self._converted(values, encode=False) if self._codecs else values))

    def _converted(self, values: tuple[Any, ...], *, encode: bool) -> tuple[Any, ...]:
        converted = list(values)
        for n, codec in self._codecs.items():
            converted[n] = (codec.encode if encode else codec.decode)(converted[n])
        return tuple(converted)


def qualified(table: Table[Any], alias: str) -> str:
    """Return the table's columns with an alias in front, for joins."""
    return ", ".join(f"{alias}.{name}" for name in table.names)


def split_columns(row: tuple[Any, ...], *tables: Table[Any]) -> list[tuple[Any, ...]]:
    """Split a joined row into the values of each table."""
    parts, start = [], 0
    for table in tables:
        end = start + len(table.names)
        parts.append(row[start:end])
        start = end
    return parts
