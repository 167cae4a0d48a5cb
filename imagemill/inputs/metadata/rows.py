"""Rows of metadata files, which every format yields, and the columns that contain their values.

Spec: docs/spec/stage2.md#metadata-files
"""

import importlib
import pkgutil
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

from imagemill.domain.inputs import distinct_captions
from imagemill.errors import ImagemillError

# The first of these that a file has is used, unless a setting names another.
FILE_COLUMNS: Final = ("file_name", "image_path", "image", "filename", "file", "path", "key")
TEXT_COLUMNS: Final = ("text", "caption", "captions", "prompt", "description")

_PACKAGE: Final = "imagemill.inputs.metadata"


class Columns(NamedTuple):
    """Names of the columns with the image's path and its caption; blank: found by name."""

    file: str = ""
    text: str = ""


class MetadataRow(NamedTuple):
    """One row.

    Attributes:
        number: of its line, or its position in the file, from 1.
        path: of the image, as written.
        captions: white space normalised, each once, without blank ones.
    """

    number: int
    path: str
    captions: tuple[str, ...]


class BadRow(NamedTuple):
    """A row that cannot be used, and why."""

    number: int
    why: str


class Unreadable(ImagemillError, ValueError):
    """A metadata file of which no row can be used."""


class Format(Protocol):
    """A module that reads one format.

    Attributes:
        FILE_NAMES: names that `captions.metadata: auto` recognises.
        SUFFIXES: extensions of files that `captions.metadata` may name.
    """

    FILE_NAMES: tuple[str, ...]
    SUFFIXES: tuple[str, ...]

    def read_rows(self, path: Path, columns: Columns, encoding: str) -> Iterator[MetadataRow | BadRow]:
        """Yield the rows of a file, streaming.

        Args:
            path: the file.
            columns: names of its columns.
            encoding: of text that is not Unicode; blank: such a file is refused.

        Raises:
            Unreadable: if no row can be used.
            OSError: if the file cannot be read.
        """
        ...


@cache
def formats() -> tuple[Format, ...]:
    """Return the formats, in order of their names."""
    package = importlib.import_module(_PACKAGE)
    modules = (importlib.import_module(f"{_PACKAGE}.{each.name}") for each in pkgutil.iter_modules(package.__path__))
    return tuple(module for module in modules if hasattr(module, "FILE_NAMES"))  # pyright: ignore[reportReturnType]


@cache
def file_names() -> frozenset[str]:
    """Return the names of the files that are metadata by themselves."""
    return frozenset(name for each in formats() for name in each.FILE_NAMES)


def format_of(path: str) -> Format | None:
    """Return the format of a file by its extension, or None."""
    return next((each for each in formats() if path.lower().endswith(each.SUFFIXES)), None)


def find_columns(columns: Columns, present: Collection[str]) -> Columns:
    """Return the names of both columns.

    Raises:
        Unreadable: if one of them is not present.
    """
    return Columns(
        _find("file_column", columns.file, FILE_COLUMNS, present),
        _find("text_column", columns.text, TEXT_COLUMNS, present),
    )


def _find(setting: str, chosen: str, usual: Iterable[str], present: Collection[str]) -> str:
    found = next((name for name in ([chosen] if chosen else usual) if name in present), None)
    if found is None:
        shown = ", ".join(sorted(map(str, present))[:20]) or "none"
        what = f"no column {chosen}" if chosen else f"none of the columns {', '.join(usual)}"
        raise Unreadable(f"{what}; it has {shown}", do=f"name the column as captions.{setting} in imagemill.yaml")
    return found


def row_of(number: int, values: Mapping[Any, Any], columns: Columns) -> MetadataRow | BadRow:
    """Return a row with named values."""
    path, text = values.get(columns.file), values.get(columns.text)
    if not isinstance(path, str) or not path:
        return BadRow(number, f"{columns.file} is not a path")
    return captioned(number, path, text, columns.text)


def captioned(number: int, path: str, text: Any, name: str) -> MetadataRow | BadRow:
    """Return the row of a path, with one caption, a list of captions, or none."""
    texts = [] if text is None else [text] if isinstance(text, str) else text
    if not isinstance(texts, (list, tuple)) or not all(isinstance(each, str) for each in texts):
        return BadRow(number, f"{name} is neither text nor a list of texts")
    return MetadataRow(number, path, distinct_captions(texts))
