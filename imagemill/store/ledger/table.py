"""Typed rows: a table's columns are the fields of a msgspec struct, in the same order."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property
from typing import Any, Generic, TypeVar

import msgspec

from imagemill.parts import in_parts

R = TypeVar("R", bound=msgspec.Struct)


class Codec(msgspec.Struct, frozen=True):
    """Conversion of one field to the value that SQLite stores, and back; None if the value is stored as it is."""

    encode: Callable[[Any], Any] | None
    decode: Callable[[Any], Any]


# SQLite stores a bool as an integer by itself.
BOOL = Codec(None, bool)


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
        of_columns = {n: codecs[field.name] for n, field in enumerate(fields) if field.name in codecs}
        self._encoders = {n: codec.encode for n, codec in of_columns.items() if codec.encode}
        self._decoders = {n: codec.decode for n, codec in of_columns.items()}
        self.insert = f"INSERT OR REPLACE INTO {name} ({self.columns}) VALUES ({', '.join('?' * len(fields))})"

    def values(self, rows: Iterable[R]) -> Iterator[tuple[Any, ...]]:
        """Yield the stored values of each row, in the order of the columns."""
        values = map(msgspec.structs.astuple, rows)
        return (tuple(_converted(each, self._encoders)) for each in values) if self._encoders else values

    def rows(self, values: Iterable[tuple[Any, ...]]) -> Iterator[R]:
        """Yield a typed row for each tuple of `columns`."""
        if not self._decoders:
            return itertools.starmap(self._row, values)
        return (self._row(*_converted(row, self._decoders)) for row in values)

    @cached_property
    def together(self) -> msgspec.json.Decoder[list[R]]:
        """Decoder of many rows as one JSON array of arrays of `columns`. The row type is `array_like`, without codecs."""
        return msgspec.json.Decoder(list[self._row])  # type: ignore[name-defined]

    def row(self, values: tuple[Any, ...]) -> R:
        """Return the typed row of one tuple of `columns`."""
        return self._row(*(_converted(values, self._decoders) if self._decoders else values))


# Most values of one statement: any SQLite takes as many, and more gain little.
_VALUES_PER_STATEMENT = 999


def in_statements(insert: str, rows: Iterable[Iterable[Any]]) -> Iterator[tuple[str, list[Any]]]:
    """Yield statements that insert many rows each, with their values.

    Between two statements, `executemany` lets other threads run four times per row: beside busy threads, that takes longer than
    the insert.

    Args:
        insert: a statement for one row, with one `VALUES (?, …)`.
        rows: the values of each row.
    """
    before, _, rest = insert.partition("VALUES ")
    one, end, after = rest.partition(")")
    for part in in_parts(rows, _VALUES_PER_STATEMENT // one.count("?")):
        values = ", ".join([one + end] * len(part))
        yield f"{before}VALUES {values}{after}", list(itertools.chain.from_iterable(part))


def _converted(values: tuple[Any, ...], codecs: Mapping[int, Callable[[Any], Any]]) -> list[Any]:
    converted = list(values)
    for n, convert in codecs.items():
        converted[n] = convert(converted[n])
    return converted


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
