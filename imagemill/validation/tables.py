"""Whole tables, checked as tables. Single records are records.py's affair: this is for what only the whole can show."""

from collections.abc import Iterator
from pathlib import Path

from imagemill.buckets import BUCKETS
from imagemill.formats.jsonl import read_jsonl
from imagemill.records import FORMAT_VERSION, Record, is_stage1
from imagemill.validation.findings import Finding

COLUMNS = ("image_id", "image_path", "caption", "height", "width", "aspect_bucket", "format_version")


def stage2_schema():
    """pandera schema of the Stage 2 metadata."""
    import pandera.pandas as pa

    text = pa.Check(lambda column: column.str.strip().str.len() > 0, name="not blank")
    return pa.DataFrameSchema(
        {
            "image_id": pa.Column(str, text, unique=True),
            "image_path": pa.Column(str, text),
            "caption": pa.Column(str, text),
            "height": pa.Column(int, pa.Check.ge(8)),
            "width": pa.Column(int, pa.Check.ge(8)),
            "aspect_bucket": pa.Column(str, pa.Check.isin(BUCKETS)),
            "format_version": pa.Column(int, pa.Check.eq(FORMAT_VERSION)),
        },
        strict=False,
    )


def validate_stage2_table(jsonl: Path, *, migrating: bool = False) -> Iterator[Finding | int]:
    """The table of all parsable records against `stage2_schema`; `migrating`: those of Stage 1 are left out."""
    import pandas as pd
    import pandera.errors

    lines = (line.value for line in read_jsonl(jsonl) if line.value is not None)
    rows = [[_cell(record, name) for name in COLUMNS] for record in lines if not (migrating and is_stage1(record))]
    table = pd.DataFrame(rows, columns=list(COLUMNS))
    yield len(table)
    if table.empty:
        return
    try:
        stage2_schema().validate(table, lazy=True)
    except pandera.errors.SchemaErrors as errors:
        for failure in errors.failure_cases.itertuples():
            position = failure.index
            item = str(table["image_id"].get(position, "")) if position is not None else ""
            yield Finding(
                file=jsonl.name, rule="table", item=item, field=str(failure.column),
                message=f"{failure.check}: {failure.failure_case!r}", remedy="run imagemill stage2",
            )  # fmt: skip


def _cell(record: Record, name: str) -> str | int | None:
    """A value that a table can hold. Lists and objects are no cells; what they are is told record by record."""
    value = record.get(name, FORMAT_VERSION if name == "format_version" else None)
    return value if type(value) in (str, int) else None
