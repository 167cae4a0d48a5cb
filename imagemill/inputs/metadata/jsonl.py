"""JSON Lines, one object per line: `{"file_name": "a.jpg", "text": "a dog"}`, as Hugging Face's imagefolder has them."""

from collections.abc import Iterator
from pathlib import Path

import msgspec

from imagemill.inputs.metadata.rows import BadRow, Columns, MetadataRow, Unreadable, find_columns, row_of
from imagemill.inputs.metadata.text_files import open_text

FILE_NAMES = ("metadata.jsonl",)
SUFFIXES = (".jsonl", ".ndjson")


def read_rows(path: Path, columns: Columns, encoding: str) -> Iterator[MetadataRow | BadRow]:
    """Yield the rows. A line that is no object is a bad row; the first object decides which columns are used."""
    found: Columns | None = None
    with open_text(path, encoding) as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                values = msgspec.json.decode(line)
            except (msgspec.DecodeError, UnicodeEncodeError, RecursionError) as error:
                yield BadRow(number, f"not JSON: {error}")
                continue
            if not isinstance(values, dict):
                yield BadRow(number, "not an object")
                continue
            found = found or find_columns(columns, values)
            yield row_of(number, values, found)
    if found is None:
        raise Unreadable("no line is a JSON object", do="write one object per line")
