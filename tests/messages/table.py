"""The table of all messages: docs/reference/messages.csv.

    python -m tests.messages.table [RECORDED]

keeps the verdict of each message that is unchanged and the test that produces it, adds the messages that are new and the tests
that were recorded (recorder.py), and removes the rows of messages that no longer exist. Verdicts are written by hand:

    read        each word was compared with the code around it
    mended      a word was false or unclear, and was corrected
    executed    tests/cli/test_remedies.py follows the remedy, which cures the fault
"""

import csv
import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from tests.messages.sites import ROOT, RULES, Site, sites

TABLE = ROOT / "docs/reference/messages.csv"
VERDICTS = {"read", "mended", "executed"}
COLUMNS = ("file", "function", "made_by", "reason", "message", "why", "do", "test", "verdict")

# The rules of these files are data that one test walks through.
_RULES = (
    *RULES,
    "imagemill/validation/catalogue.py",
    "imagemill/domain/preset_records.py",
    "imagemill/domain/stage2_records.py",
)
_TEST_OF_RULES = "tests/validation/test_catalogue.py::test_broken_rule_is_found_with_its_remedy_and_severity"


class Row(NamedTuple):
    file: str
    function: str
    made_by: str
    reason: str
    message: str
    why: str
    do: str
    test: str
    verdict: str

    @property
    def key(self) -> tuple[str, ...]:
        return self[:7]


def read_table() -> list[Row]:
    with open(TABLE, newline="", encoding="utf-8") as file:
        return [Row(*(line[name] for name in COLUMNS)) for line in csv.DictReader(file)]


def write_table(rows: Iterable[Row]) -> None:
    TABLE.parent.mkdir(parents=True, exist_ok=True)
    with open(TABLE, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows(sorted(set(rows)))


def read_recorded(path: Path | None) -> dict[str, set[str]]:
    """Tests by the place of the message that they produced."""
    tests: dict[str, set[str]] = defaultdict(set)
    for line in path.read_text("utf-8").splitlines() if path and path.exists() else ():
        place, _, test = line.partition("\t")
        tests[place].add(test.partition("[")[0])
    return tests


def updated(found: Iterable[Site], known: Iterable[Row], recorded: dict[str, set[str]]) -> list[Row]:
    """The rows of all messages, with what is known about them."""
    rows = {row.key: row for row in known}
    return [_row(site, rows.get(site.key), recorded.get(site.place, set())) for site in found]


def _row(site: Site, old: Row | None, tests: set[str]) -> Row:
    test = old.test if old else ""
    if site.function == "<module>" and site.file in _RULES:
        test = _TEST_OF_RULES
    elif tests and test not in tests:
        test = min(tests, key=lambda each: (_distance(site, each), each))
    return Row(*site.key, test, old.verdict if old else "")


def _distance(site: Site, test: str) -> tuple[bool, bool, bool]:
    """A test of the module itself is the nearest, then one without the command line."""
    file = Path(test.partition("::")[0])
    mirrored = file.stem == f"test_{Path(site.file).stem}"
    return not mirrored, "cli" in file.parts, "fuzz" in file.parts


if __name__ == "__main__":
    known = read_table() if TABLE.exists() else []
    recorded = read_recorded(Path(sys.argv[1]) if len(sys.argv) > 1 else None)
    made = updated(sites(), known, recorded)
    write_table(made)
    print(f"{len(made)} messages, {sum(not row.test for row in made)} without a test, "
          f"{sum(not row.verdict for row in made)} without a verdict")  # fmt: skip
