"""Parquet files, as Hugging Face's imagefolder and SimpleTuner have them. Needs `imagemill[parquet]`."""

from collections.abc import Iterator
from pathlib import Path

from imagemill.inputs.metadata.rows import BadRow, Columns, MetadataRow, Unreadable, find_columns, row_of

FILE_NAMES = ("metadata.parquet",)
SUFFIXES = (".parquet",)

# Rows that are decoded at a time.
_BATCH = 4096


def read_rows(path: Path, columns: Columns, encoding: str) -> Iterator[MetadataRow | BadRow]:
    """Yield the rows; their numbers are their positions. Text in Parquet is UTF-8, so `encoding` has no effect."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise Unreadable(
            "pyarrow is not installed", do="install imagemill[parquet], then run imagemill again"
        ) from error
    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            found = find_columns(columns, file.schema_arrow.names)
            for batch in file.iter_batches(_BATCH, columns=list(dict.fromkeys(found))):
                for values in batch.to_pylist():
                    number += 1
                    yield row_of(number, values, found)
    except (pyarrow.ArrowException, UnicodeDecodeError) as error:
        first, *_ = str(error).splitlines() or [""]
        raise Unreadable(f"it is not Parquet: {first}", do="repair it, or move it elsewhere") from error
