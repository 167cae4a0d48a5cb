"""Checks of the Stage 2 records: every line by every rule, and the whole table by its schema."""

import dagster as dg

from assets.stage2_jsonl import stage2_jsonl
from imagemill.domain.embedding_specs import T5, mask_length
from imagemill.pipeline.image_states import limited_shares
from imagemill.pipeline.problem_list import problems_of_records
from imagemill.validation.findings import Finding, broken, collect
from imagemill.validation.lines import Findings
from imagemill.validation.stage2 import blocks_packing, stage2_records
from imagemill.validation.tables import validate_ledger_tables, validate_stage2_table
from io_managers import refusals
from io_managers.check_results import as_result
from io_managers.viewer import page_shown
from resources.data_root import DataRootResource


@dg.asset_check(asset=stage2_jsonl, blocking=True)
def records_valid(data_root: DataRootResource) -> dg.AssetCheckResult:
    """Every line is strict JSON with the eight fields, a mask, a known bucket, no inline embedding, and a unique id.

    Stops packing if the file cannot be read, or if imagemill wrote an invalid record. Records that packing skips are a warning.
    """
    path, session = data_root.root().stage2_jsonl, data_root.session
    blocking: list[Finding] = []

    def noted(findings: Findings) -> Findings:
        for found in findings:
            if isinstance(found, Finding) and not blocking and blocks_packing(found, session.reading):
                blocking.append(found)
            yield found

    findings = stage2_records(path, migrating=True, tokens=mask_length([session.in_force(T5)]))
    result = as_result(collect(path.name, "stage2", noted(findings)))
    if blocking or result.passed:
        return result
    links = page_shown("inputs with a problem", "images", show="problems")
    return result._replace(severity=dg.AssetCheckSeverity.WARN, metadata={**result.metadata, **links})


@dg.asset_check(asset=stage2_jsonl)
def table_valid(data_root: DataRootResource) -> dg.AssetCheckResult:
    """The records and their ledger rows as tables: column types, ranges, uniqueness. Unchanged rows are not always read again."""
    root, session = data_root.root(), data_root.session
    in_question = session.overview().in_question(session.ledger)
    return as_result(
        collect(root.stage2_jsonl.name, "stage2 table", validate_stage2_table(root.stage2_jsonl, migrating=True)),
        collect(root.ledger.name, "ledger tables", broken(validate_ledger_tables(session.ledger, in_question))),
    )


@dg.asset_check(asset=stage2_jsonl)
def within_limits(data_root: DataRootResource) -> dg.AssetCheckResult:
    """No filter of the viewer has a larger share of the images than `limits` in imagemill.yaml permits."""
    shares = limited_shares(data_root.session)
    exceeded = [share for share in shares if share.share > share.limit]
    texts = [f"{one.name} {one.share:.1%} ({one.images:,}), limit {one.limit:.1%}" for one in exceeded or shares]
    links = page_shown(exceeded[0].name.replace("_", " "), "images", show=exceeded[0].name) if exceeded else {}
    return dg.AssetCheckResult(
        passed=not exceeded,
        severity=dg.AssetCheckSeverity.WARN,
        description="; ".join(texts) or "imagemill.yaml sets no limits",
        metadata={f"{share.name} (share)": round(share.share, 4) for share in shares} | links,
    )


@dg.asset_check(asset=stage2_jsonl)
def inputs_accepted(data_root: DataRootResource) -> dg.AssetCheckResult:
    """Every entry of approved/ has its record; the others are named with reason, remedy and date."""
    session = data_root.session
    return refusals.inputs_accepted(problems_of_records(session.overview(), session.ledger))
