"""Validation of whole tables. Single records are checked in domain/stage2_records.py."""

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import Any

from imagemill.domain.embedding_specs import default_specs, embedding_specs
from imagemill.domain.stage2_records import (
    DECODER,
    FIELD_RULES,
    FORMAT_VERSION,
    FieldRule,
    Record,
    is_plain,
    is_stage1,
    usual_masks,
)
from imagemill.formats.jsonl import parse_object, read_jsonl, read_typed
from imagemill.pipeline.shards.shard_sets import INDEX
from imagemill.pipeline.stage2.record_index import last_index, unfinished
from imagemill.store.ledger import ColumnRule, Ledger, ValueRule
from imagemill.validation.catalogue import finding
from imagemill.validation.lines import Findings

COLUMNS = tuple(field for field in FIELD_RULES if field != "t5_attention_mask")  # a list is not a cell
_ID = COLUMNS.index("image_id")
TAR_BLOCK = 512

_Row = Sequence[str | int | None]


def stage2_schema():
    """Return the pandera schema of the Stage 2 metadata, derived from the rules for single records."""
    import pandera.pandas as pa

    return pa.DataFrameSchema(
        {
            field: pa.Column(None, pa.Check(partial(_keeps, rule), name=rule.rule), unique=field == "image_id")
            for field, rule in FIELD_RULES.items()
            if field in COLUMNS
        },
        strict=False,
    )


def _keeps(rule: FieldRule, column: Any) -> Any:
    return ~column.isin([value for value in column.unique() if rule.problem(value) is not None])


def _ledger_columns(kinds: Collection[str]) -> dict[str, dict[str, ColumnRule]]:
    """Return the rules of the ledger's tables of images, captions, files and problems. `kinds`: permitted in `files`."""
    text, side, fingerprint = ValueRule.TEXT, ValueRule.POSITIVE, ValueRule.FINGERPRINT
    return {
        "sources": {
            "image_id": text, "file_name": text, "fingerprint": fingerprint, "height": side, "width": side,
        },
        "captions": {"image_id": text, "text": text, "origin": text, "fingerprint": fingerprint},
        "files": {"kind": tuple(sorted(kinds)), "image_id": text, "content": text, "maker": text},
        "problems": {
            "item": text, "asset": text, "outcome": ("refused", "failed"), "reason": text, "remedy": text,
        },
    }  # fmt: skip


def ledger_schema(columns: Mapping[str, ColumnRule]):
    """Return the pandera schema of one of the ledger's tables. Its ids are unique, because they are its primary key."""
    import pandera.pandas as pa

    checks = {
        ValueRule.TEXT: (str, pa.Check(lambda column: column.str.strip().str.len() > 0, name="not blank")),
        ValueRule.FINGERPRINT: (str, pa.Check.str_contains(":")),
        ValueRule.POSITIVE: (int, pa.Check.gt(0)),
    }
    return pa.DataFrameSchema(
        {
            name: pa.Column(*checks[rule]) if isinstance(rule, ValueRule) else pa.Column(str, pa.Check.isin(rule))
            for name, rule in columns.items()
        }
    )


def index_schema():
    """Return the pandera schema of a set's index: unique positions and multiples of the tar block size."""
    import pandera.pandas as pa

    text = pa.Check(lambda column: column.str.strip().str.len() > 0, name="not blank")
    on_block = pa.Check(lambda column: column % TAR_BLOCK == 0, name="on a block of 512 bytes")
    name = pa.Column(str, text)
    offset, size = pa.Column(int, [pa.Check.ge(0), on_block]), pa.Column(int, [pa.Check.gt(0), on_block])
    columns = {"image_id": name, "key": name, "shard": name, "offset": offset, "size": size, "digest": name}
    return pa.DataFrameSchema(columns, unique=["shard", "offset"], strict=False)


def validate_stage2_table(jsonl: Path, *, migrating: bool = False) -> Findings:
    """Check the table of all parsable records against `stage2_schema`; with `migrating`, leave out Stage 1 records."""
    index = last_index(jsonl)
    if index and index.is_usual and not unfinished(jsonl).exists():
        count, rows = len(index.lines), []
    else:
        count, rows = _unusual_records(jsonl, migrating=migrating)
    yield count - len(rows)
    yield from _checked("table", jsonl.name, rows, COLUMNS, stage2_schema, "image_id", dtype=object)


def _unusual_records(jsonl: Path, *, migrating: bool) -> tuple[int, list[_Row]]:
    """Return the number of records, and the cells of those that the schema judges: not certainly valid, or with an id again.

    Masks, which are most of a canonical line, are not parsed.
    """
    cells, masks, count = attrgetter(*COLUMNS), usual_masks(), 0
    valid: dict[str, tuple[int, _Row]] = {}
    unusual: list[tuple[int, _Row]] = []
    for record in read_typed(jsonl, DECODER):
        if not isinstance(record, bytes):
            row = cells(record)
        elif (value := parse_object(record)) is not None and not (migrating and is_stage1(value)):
            row = [_cell(value, name) for name in COLUMNS]
        else:
            continue
        count += 1
        if isinstance(record, bytes) or record.image_id in valid or not is_plain(record, masks):
            unusual.append((count, row))
        else:
            valid[record.image_id] = count, row
    again = valid.keys() & {row[_ID] for _, row in unusual}
    return count, [row for _, row in sorted([*unusual, *map(valid.__getitem__, again)], key=itemgetter(0))]


def validate_ledger_tables(ledger: Ledger, among: Collection[str] | None = None) -> Findings:
    """Check the tables of `.imagemill/ledger.sqlite` against their schemas, without writing to it.

    `among`: ids of the only images whose rows have changed since they were last checked; None: all rows are checked.
    """
    # A kind that was listed once has a recorded model; its files stay.
    kinds = {spec.kind for spec in (*default_specs(), *embedding_specs())}
    kinds |= {name.removeprefix("identity.") for name in ledger.settings() if name.startswith("identity.")}
    for name, columns in _ledger_columns(kinds).items():
        # SQLite finds the few rows that the schema judges, in a fifth of the time that all of them take in pandas.
        key, schema = "item" if name == "problems" else "image_id", partial(ledger_schema, columns)
        count, rows = ledger.unusual_rows(name, columns, among, key=key)
        yield count - len(rows)
        yield from _checked("ledger_table", f"{ledger.path.name}:{name}", rows, list(columns), schema, key)


def validate_index_table(folder: Path) -> Findings:
    """Check the index of one set against `index_schema`; shards.py compares it with the tars."""
    records = (line.value or {} for line in read_jsonl(folder / INDEX))
    columns = tuple(index_schema().columns)
    rows = [[_cell(record, name) for name in columns] for record in records]
    yield from _checked("index_table", f"{folder.name}/{INDEX}", rows, columns, index_schema, "image_id")


def _checked(
    rule: str,
    file: str,
    rows: Sequence[_Row],
    columns: Sequence[str],
    schema: Callable[[], Any],
    key: str,
    dtype: type | None = None,
) -> Findings:
    """Yield every failing cell of a table; `key` is the column that identifies a row. Without rows, pandas is not imported."""
    yield len(rows)
    if not rows:
        return
    import pandas as pd
    import pandera.errors

    table = pd.DataFrame(list(rows), columns=list(columns), dtype=dtype)
    try:
        schema().validate(table, lazy=True)
    except pandera.errors.SchemaErrors as errors:
        for failure in errors.failure_cases.itertuples():
            position = failure.index
            item = str(table[key].get(position, "")) if position is not None else ""
            message = f"{failure.check}: {failure.failure_case!r}"
            yield finding(rule, message, file=file, item=item, field=str(failure.column))


def _cell(record: Record, name: str) -> str | int | None:
    """Return a value that a table can hold; lists and objects become None, since record checks report them."""
    value = record.get(name, FORMAT_VERSION if name == "format_version" else None)
    return value if type(value) in (str, int) else None
