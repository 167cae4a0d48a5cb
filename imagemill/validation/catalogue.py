"""The rules of the validator as data: requirement, kinds of file, severity and remedy.

To add a rule: one row in rules.toml, one `finding(…)` in the module that checks its kind, and a passing and a failing
case in tests/validation/test_catalogue.py, which requires both for every row.

This module contains the table and creates findings from its rows. The checks are in stage2.py, presets.py, images.py,
stage_a.py, shards.py, files.py, tables.py and reports.py.

Spec: docs/spec/validation.md#checks
"""

import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from imagemill.domain.buckets import BUCKETS
from imagemill.domain.preset_records import PRESET_RULES, PRESET_WARNINGS
from imagemill.domain.violations import TEXT_WARNINGS, Violation
from imagemill.validation.findings import Finding


class Rule(NamedTuple):
    """One requirement. `severity`: an `error` fails the file, a `warning` does not."""

    kinds: tuple[str, ...]
    description: str
    remedy: str
    severity: str = "error"


LINES = ("stage2", "preset", "stage-a")


def _read_rules() -> Iterator[tuple[str, Rule]]:
    """Yield the rows of rules.toml, and those that the definitions of records contain."""
    document = tomllib.loads(Path(__file__).with_name("rules.toml").read_text("utf-8"))
    for name, row in document.items():
        remedy = row["remedy"].format(buckets=", ".join(BUCKETS))
        yield name, Rule(tuple(row["kinds"]), row["description"], remedy, row.get("severity", "error"))
    for name, (description, remedy) in TEXT_WARNINGS.items():
        yield name, Rule(("stage2", "preset"), description, remedy, "warning")
    for rules, severity in ((PRESET_RULES, "error"), (PRESET_WARNINGS, "warning")):
        yield from ((name, Rule(("preset",), rule.description, rule.remedy, severity)) for name, rule in rules.items())


RULES: dict[str, Rule] = dict(_read_rules())

# Largest number of characters of a message and of an id in a report, so that a line of a gigabyte stays small.
_MESSAGE, _ITEM = 500, 200


def finding(
    rule: str, message: str, *, file: str, line: int = 0, field: str = "", item: str = "", remedy: str | None = None
) -> Finding:
    """Return a finding for a row; `remedy` replaces the row's remedy."""
    row = RULES[rule]
    return Finding(
        file, rule, message[:_MESSAGE], remedy or row.remedy, line, field[:_ITEM], item[:_ITEM], row.severity
    )


def findings_of(violations: Iterable[Violation], at: Mapping[str, Any]) -> Iterator[Finding]:
    """Yield the findings of a record's violations; `at`: file, line and item."""
    return (finding(v.rule, v.message, field=v.field, remedy=v.remedy, **at) for v in violations)
