"""Checks of the Stage 2 records: every line by every rule, and the whole table by its schema."""

import dagster as dg

from assets.stage2_jsonl import stage2_jsonl
from imagemill.domain.embedding_specs import T5, mask_length
from imagemill.pipeline.problem_list import problems_of_records
from imagemill.validation.findings import broken, collect
from imagemill.validation.stage2 import stage2_records
from imagemill.validation.tables import validate_ledger_tables, validate_stage2_table
from io_managers import refusals
from io_managers.check_results import as_result
from resources.data_root import DataRootResource


@dg.asset_check(asset=stage2_jsonl)
def records_valid(data_root: DataRootResource) -> dg.AssetCheckResult:
    """Every line is strict JSON with the eight fields, a mask, a known bucket, no inline embedding, and a unique id."""
    path, tokens = data_root.root().stage2_jsonl, mask_length([data_root.session.in_force(T5)])
    return as_result(collect(path.name, "stage2", stage2_records(path, migrating=True, tokens=tokens)))


@dg.asset_check(asset=stage2_jsonl)
def table_valid(data_root: DataRootResource) -> dg.AssetCheckResult:
    """The records and their ledger rows as tables: column types, ranges and uniqueness over the whole."""
    root, ledger = data_root.root(), data_root.session.ledger
    return as_result(
        collect(root.stage2_jsonl.name, "stage2 table", validate_stage2_table(root.stage2_jsonl, migrating=True)),
        collect(root.ledger.name, "ledger tables", broken(validate_ledger_tables(ledger))),
    )


@dg.asset_check(asset=stage2_jsonl)
def inputs_accepted(data_root: DataRootResource) -> dg.AssetCheckResult:
    """Every entry of approved/ has its record; the others are named with reason, remedy and date."""
    session = data_root.session
    return refusals.inputs_accepted(problems_of_records(session.overview(), session.ledger))
