"""Comma-separated values with a row of column names."""

import csv
from collections.abc import Iterator
from pathlib import Path

from imagemill.inputs.metadata.rows import BadRow, Columns, MetadataRow, Unreadable, find_columns, row_of
from imagemill.inputs.metadata.text_files import MAX_FIELD, open_text

FILE_NAMES = ("metadata.csv",)
SUFFIXES = (".csv",)


def read_rows(path: Path, columns: Columns, encoding: str) -> Iterator[MetadataRow | BadRow]:
    """Yield the rows; their numbers are those of the lines at which they end."""
    csv.field_size_limit(MAX_FIELD)
    with open_text(path, encoding) as file:
        reader = csv.reader(file)
        try:
            names = next(reader, None)
            if not names:
                raise Unreadable("it is empty", do="write a line of column names, then one per image")
            found = find_columns(columns, names)
            for values in reader:
                if not values:
                    continue
                if len(values) != len(names):
                    yield BadRow(reader.line_num, f"{len(values)} values for {len(names)} columns")
                    continue
                yield row_of(reader.line_num, dict(zip(names, values, strict=True)), found)
        except csv.Error as error:
            raise Unreadable(f"line {reader.line_num}: {error}", do="write it as CSV (RFC 4180)") from error
