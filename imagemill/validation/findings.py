"""Findings and reports of the validator: place, rule, message and remedy, as text for people and JSON for programs."""

from collections import Counter
from collections.abc import Iterable, Iterator

import msgspec


class Finding(msgspec.Struct, frozen=True):
    """One violated rule. `line` counts from 1 and is 0 if the finding concerns the whole file."""

    file: str
    rule: str
    message: str
    remedy: str
    line: int = 0
    field: str = ""
    item: str = ""
    severity: str = "error"

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}" if self.line else self.file
        subject = " ".join(part for part in (self.item, self.field) if part)
        return f"{place}: {self.rule}: {subject + ': ' if subject else ''}{self.message}\n  do: {self.remedy}"


class Report(msgspec.Struct):
    """Findings of one file.

    All are counted, and a limited number per rule is kept, so that a million bad lines need little memory.
    """

    file: str
    kind: str
    checked: int = 0
    errors: int = 0
    warnings: int = 0
    rules: dict[str, int] = {}
    findings: list[Finding] = []

    @property
    def passed(self) -> bool:
        """Whether there are no errors."""
        return self.errors == 0


# Number of findings of one rule that a report keeps; all of them are counted.
KEPT_FINDINGS = 100


def collect(file: str, kind: str, findings: Iterable[Finding | int]) -> Report:
    """Consume a validator: an int counts checked items; a Finding is counted and, up to a limit per rule, kept."""
    report = Report(file, kind)
    rules: Counter[str] = Counter()
    for finding in findings:
        if isinstance(finding, int):
            report.checked += finding
            continue
        rules[finding.rule] += 1
        if finding.severity == "error":
            report.errors += 1
        else:
            report.warnings += 1
        if rules[finding.rule] <= KEPT_FINDINGS:
            report.findings.append(finding)
    report.rules = dict(rules)
    return report


def broken(findings: Iterable[Finding | int]) -> Iterator[Finding]:
    """Return the findings without the counts, for a second check of items that another validator counts."""
    return (finding for finding in findings if isinstance(finding, Finding))


def as_text(report: Report) -> Iterator[str]:
    """Yield the lines of the report for a terminal."""
    yield from (str(finding) for finding in report.findings)
    hidden = sum(report.rules.values()) - len(report.findings)
    if hidden:
        yield f"{report.file}: {hidden} more findings ({', '.join(f'{rule} {n}' for rule, n in sorted(report.rules.items()))})"
    verdict = "passed" if report.passed else "FAILED"
    yield f"{report.file}: {verdict}: {report.kind}, {report.checked} checked, {report.errors} errors, {report.warnings} warnings"


def as_json(report: Report) -> bytes:
    """Return one JSON line for programs; all keys of a report and of its findings are always present."""
    return msgspec.json.encode({"passed": report.passed, **msgspec.structs.asdict(report)})
