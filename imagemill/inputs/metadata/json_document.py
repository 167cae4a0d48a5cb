"""One JSON document: captions by path, as diffusion-pipe, kohya's scripts and ai-toolkit write them, or a list of objects.

{"a.jpg": ["a dog", "a brown dog"]}   {"/train/a.jpg": {"caption": "a dog", "tags": "1dog, grass"}}
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from imagemill.inputs.metadata.rows import (
    FILE_COLUMNS,
    TEXT_COLUMNS,
    BadRow,
    Columns,
    MetadataRow,
    Unreadable,
    captioned,
    find_columns,
    row_of,
)
from imagemill.inputs.metadata.text_files import open_text

FILE_NAMES = ("captions.json",)
SUFFIXES = (".json",)

# A longer document is refused, because it is decoded as a whole.
MAX_BYTES = 256 << 20


def read_rows(path: Path, columns: Columns, encoding: str) -> Iterator[MetadataRow | BadRow]:
    """Yield the rows; their numbers are their positions."""
    if path.stat().st_size > MAX_BYTES:
        raise Unreadable("it is larger than 256 MiB", do="write it as JSON Lines, one object per line")
    try:
        with open_text(path, encoding) as file:
            found = msgspec.json.decode(file.read())
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError) as error:
        raise Unreadable(f"it is not JSON: {error}", do="repair it, or move it elsewhere") from error
    if isinstance(found, dict):
        for number, (name, value) in enumerate(found.items(), 1):
            yield _captions_of(number, name, value, columns)
    elif isinstance(found, list) and found and isinstance(found[0], dict):
        names = find_columns(columns, found[0])
        for number, value in enumerate(found, 1):
            yield row_of(number, value, names) if isinstance(value, dict) else BadRow(number, "not an object")
    else:
        raise Unreadable(
            f"it has neither captions by path nor rows with {FILE_COLUMNS[0]} and {TEXT_COLUMNS[0]}",
            do="see docs/how-to/captions.md, or move it elsewhere",
        )


def _captions_of(number: int, path: str, value: Any, columns: Columns) -> MetadataRow | BadRow:
    """Return the row of one path, whose value is a caption, a list of captions, or an object with one."""
    if not isinstance(value, dict):
        return captioned(number, path, value, f"the value of {path[:80]}")
    name = columns.text or next((each for each in TEXT_COLUMNS if each in value), "")
    row, tags = captioned(number, path, value.get(name), f"{name or 'caption'} of {path[:80]}"), value.get("tags")
    if isinstance(row, BadRow) or name == "tags" or not isinstance(tags, str) or not tags.strip():
        return row
    return captioned(number, path, [f"{each}, {tags}" for each in row.captions] or tags, "tags")
