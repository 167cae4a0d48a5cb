"""Findings and reports: all are counted, a limited number is kept.

Spec: docs/spec/validation.md#checks, docs/spec/validation.md#findings
"""

import itertools
import tracemalloc

import msgspec
import pytest

from imagemill.validation.findings import KEPT_FINDINGS, Finding, Report, as_json, as_text, broken, collect


def finding(**changes):
    return Finding(
        **{"file": "x.jsonl", "rule": "mask", "message": "contains no 1", "remedy": "run imagemill", **changes}
    )


def test_ints_count_what_was_checked_and_findings_what_is_wrong():
    report = collect("x", "stage2", [1, 1, finding(), 3, finding(rule="id"), finding(severity="warning")])

    assert (report.checked, report.errors, report.warnings) == (5, 2, 1)
    assert report.rules == {"mask": 2, "id": 1}
    assert not report.passed


def test_warnings_alone_pass():
    assert collect("x", "stage2", [1, finding(severity="warning")]).passed
    assert collect("x", "stage2", []).passed


@pytest.mark.slow
def test_endless_findings_are_counted_in_bounded_memory():
    """Memory stays bounded on a million bad lines."""
    many = (finding(line=number) for number in range(100_000))
    tracemalloc.start()
    try:
        report = collect("x", "stage2", many)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert report.errors == report.rules["mask"] == 100_000
    assert [kept.line for kept in report.findings] == list(range(KEPT_FINDINGS))
    assert peak < 300_000


def test_reports_do_not_share_their_lists():
    one, other = Report("a", "k"), Report("b", "k")
    one.findings.append(finding())
    one.rules["x"] = 1

    assert (other.findings, other.rules) == ([], {})


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({}, "x.jsonl: mask: contains no 1\n  do: run imagemill"),
        ({"line": 3, "item": "a"}, "x.jsonl:3: mask: a: contains no 1\n  do: run imagemill"),
        ({"line": 3, "item": "a", "field": "t5"}, "x.jsonl:3: mask: a t5: contains no 1\n  do: run imagemill"),
    ],
)  # fmt: skip
def test_finding_says_where_which_rule_what_and_what_to_do(changes, text):
    assert str(finding(**changes)) == text


def test_text_ends_with_the_verdict_and_counts_what_it_does_not_show():
    passed = list(as_text(collect("x", "stage2", [7])))
    assert passed == ["x: passed: stage2, 7 checked, 0 errors, 0 warnings"]

    lines = list(as_text(collect("x", "stage2", itertools.repeat(finding(), KEPT_FINDINGS + 5))))
    assert len(lines) == KEPT_FINDINGS + 2
    assert lines[-2:] == [
        f"x: 5 more findings (mask {KEPT_FINDINGS + 5})",
        f"x: FAILED: stage2, 0 checked, {KEPT_FINDINGS + 5} errors, 0 warnings",
    ]


def test_report_is_json_for_programs():
    report = collect("x", "stage2", [1, finding(line=2, item="a")])

    assert msgspec.json.decode(as_json(report), type=Report) == report
    assert msgspec.json.decode(as_json(report)) == {
        "passed": False, "file": "x", "kind": "stage2", "checked": 1, "errors": 1, "warnings": 0, "rules": {"mask": 1},
        "findings": [
            {"file": "x.jsonl", "rule": "mask", "message": "contains no 1", "remedy": "run imagemill", "line": 2, "field": "",
             "item": "a", "severity": "error"}
        ],
    }  # fmt: skip


def test_findings_of_one_rule_do_not_hide_those_of_another():
    report = collect("x", "stage2", [*itertools.repeat(finding(), KEPT_FINDINGS + 5), finding(rule="id")])

    assert report.findings[-1].rule == "id"
    assert report.rules == {"mask": KEPT_FINDINGS + 5, "id": 1}


def test_second_look_counts_nothing_and_finds_the_same():
    report = collect("x", "stage2", broken([3, finding(), 4]))

    assert (report.checked, report.findings) == (0, [finding()])
