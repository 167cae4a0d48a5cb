"""The Stage 2 records: every line by every rule, and the table as a whole by its schema."""

import dagster as dg

from assets.stage2_jsonl import stage2_jsonl
from checks.results import as_result
from imagemill.validation.findings import collect
from imagemill.validation.tables import validate_stage2_table
from imagemill.validation.validator import validate
from resources.data_root import DataRootResource


@dg.asset_check(asset=stage2_jsonl)
def records_valid(data_root: DataRootResource) -> dg.AssetCheckResult:
    """Every line: strict JSON, the eight fields, a mask of 77, a known bucket, no inline embedding, no id twice."""
    return as_result(validate(data_root.root().stage2_jsonl, kind="stage2"))


@dg.asset_check(asset=stage2_jsonl)
def table_valid(data_root: DataRootResource) -> dg.AssetCheckResult:
    """The records as a table: column types, ranges and uniqueness over the whole file."""
    path = data_root.root().stage2_jsonl
    return as_result(collect(path.name, "stage2 table", validate_stage2_table(path)))


stage2_checks = [records_valid, table_valid]
