"""Conversion of a validator's reports to the result of an asset check."""

import dagster as dg

from imagemill.validation.findings import Report

SHOWN = 10


def as_result(*reports: Report) -> dg.AssetCheckResult:
    """Return one result for several reports: counts, violated rules, the first findings."""
    findings = [str(finding) for report in reports for finding in report.findings]
    rules: dict[str, int] = {}
    for report in reports:
        for rule, count in report.rules.items():
            rules[rule] = rules.get(rule, 0) + count
    return dg.AssetCheckResult(
        passed=all(report.passed for report in reports),
        description="; ".join(f"{rule}: {count}" for rule, count in sorted(rules.items())) or "no findings",
        metadata={
            "checked": sum(report.checked for report in reports),
            "errors": sum(report.errors for report in reports),
            "warnings": sum(report.warnings for report in reports),
            "first findings": dg.MetadataValue.md("\n".join(f"- {text}" for text in findings[:SHOWN]) or "none"),
        },
    )
