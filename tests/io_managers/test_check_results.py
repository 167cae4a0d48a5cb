"""Several reports combined into one check result."""

import pytest

from imagemill.validation.findings import Finding, Report, collect
from io_managers.check_results import SHOWN, as_result


def report(name, *severities, rule="mask"):
    findings = (
        Finding(file=name, rule=rule, message="wrong", remedy="repair", line=n, severity=severity)
        for n, severity in enumerate(severities, start=1)
    )
    return collect(name, "k", [1, *findings])


def metadata(result):
    return {name: value.value for name, value in result.metadata.items()}


def test_no_reports_give_no_findings():
    result = as_result()

    assert result.passed
    assert (result.description, metadata(result)["first findings"]) == ("no findings", "none")


@pytest.mark.parametrize(
    ("reports", "passed"),
    [
        ([report("a")], True), ([report("a", "warning")], True), ([report("a"), report("b", "error")], False),
        ([report("a", "error"), report("b")], False),
    ],
)  # fmt: skip
def test_one_failed_report_fails_the_check(reports, passed):
    assert as_result(*reports).passed is passed


def test_counters_and_rules_of_all_reports_are_summed():
    result = as_result(report("a", "error", "error"), report("b", "warning"), report("c", "error", rule="id"))

    found = metadata(result)
    assert (found["checked"], found["errors"], found["warnings"]) == (3, 3, 1)
    assert result.description == "id: 1; mask: 3"


def test_only_the_first_findings_are_shown():
    text = metadata(as_result(report("a", *["error"] * 50)))["first findings"]

    assert text.count("\n- ") + 1 == SHOWN
    assert text.startswith("- a:1: mask: wrong")


def test_report_without_findings_is_left_out():
    assert metadata(as_result(Report("a", "k"), report("b", "error")))["first findings"].startswith("- b:1")
