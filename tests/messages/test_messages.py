"""Every message of the product has a row in docs/reference/messages.csv: the test that produces it, and a verdict on its words.

After a change of a message: `python -m tests.messages.table`, then name the test and write the verdict in its row.
"""

import ast
import os
import subprocess
import sys
from functools import cache

import pytest

from tests.messages import recorder, sites, table
from tests.messages.sites import ROOT
from tests.messages.table import VERDICTS, Row, read_table, updated


def rows():
    return {row.key: row for row in read_table()}


@cache
def functions_of(file):
    """Names of the test functions of a file, those in classes as Class::name."""
    tree = ast.parse((ROOT / file).read_text("utf-8"))
    functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    classes = (node for node in tree.body if isinstance(node, ast.ClassDef))
    inner = {f"{node.name}::{each.name}" for node in classes for each in node.body if isinstance(each, ast.FunctionDef)}
    return functions | inner


def test_every_message_has_a_row_and_every_row_a_message():
    """A new, changed or removed message without its row fails here."""
    found = {site.key for site in sites.sites()}

    assert found - rows().keys() == set(), "run `python -m tests.messages.table`, then complete the new rows"
    assert rows().keys() - found == set(), "run `python -m tests.messages.table`: these messages are gone"


def test_every_row_names_a_test_that_exists():
    named = {row.test for row in read_table() if row.test}

    absent = {test for test in named if test.partition("::")[2] not in functions_of(test.partition("::")[0])}

    assert absent == set()
    assert [row.key for row in read_table() if not row.test] == []


def test_every_row_has_a_verdict():
    assert {row.key for row in read_table() if row.verdict not in VERDICTS} == set()


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ('raise WrongUsage("no such thing", do="give another")', ("WrongUsage", "no such thing", "give another")),
        ('raise MissingInput(f"no image {name!r}", why=None)', ("MissingInput", "no image {name}", "")),
        ('Problem(name, "a", "refused", "bad", "it is bad", REMEDY)', ("Problem", "it is bad", "{REMEDY}")),
        ('raise dg.Failure("nothing was written")', ("Failure", "nothing was written", "")),
        ('raise error("forwarded: " + text)', None),
        ("raise WrongUsage(error.what, do=error.do)", None),
    ],
)
def test_message_is_found_with_its_texts(source, expected):
    tree = ast.parse(f"def function(name):\n    {source}")

    found = sites._sites_of("imagemill/x.py", tree, sites._all_makers())

    assert [(site.made_by, site.message, site.do) for site in found] == ([expected] if expected else [])


def test_function_that_passes_text_on_is_not_a_message_and_its_calls_are():
    """`_refuse(name, "bad_id", …)` makes the message; the Problem inside `_refusal` only forwards it."""
    in_scan = [site for site in sites.sites() if site.file == "imagemill/inputs/scan.py"]

    assert "rename the file" in {site.do for site in in_scan if site.made_by == "_refuse"}
    assert not [site for site in in_scan if site.function == "_refusal"]


def test_row_keeps_its_test_and_verdict_until_its_words_change():
    site, changed = sites.sites()[0], sites.sites()[0]._replace(message="other words")
    known = [Row(*site.key, "tests/test_a.py::test_a", "read")]

    (same,) = updated([site], known, {})
    (other,) = updated([changed], known, {changed.place: {"tests/test_b.py::test_b"}})

    assert (same.test, same.verdict) == ("tests/test_a.py::test_a", "read")
    assert (other.test, other.verdict) == ("tests/test_b.py::test_b", "")


def test_test_of_the_module_itself_is_preferred():
    site = next(site for site in sites.sites() if site.file == "imagemill/inputs/scan.py")
    nearest, others = (
        "tests/inputs/test_scan.py::test_x",
        ["tests/a/test_a.py::test_a", "tests/cli/test_c.py::test_c"],
    )

    (row,) = updated([site], [], {site.place: {nearest, *others}})

    assert row.test == nearest


def test_recorder_names_the_test_that_produced_a_message(tmp_path):
    """In a process of its own, as the product's processes are."""
    program = (
        "from imagemill.domain.buckets import BUCKETS\n"
        "from imagemill.pipeline.shards.shard_plan import check_buckets\n"
        "check_buckets(BUCKETS)\n"
        "try:\n    check_buckets(['1x1'])\nexcept ValueError:\n    pass\n"
    )
    recorded = tmp_path / "recorded"
    environment = {**os.environ, recorder.VARIABLE: str(recorded), "PYTEST_CURRENT_TEST": "tests/x.py::test_x (call)"}
    begun = [sys.executable, "-c", "from tests.messages import recorder; recorder.begin()\n" + program]

    subprocess.run(begun, check=True, cwd=ROOT, env={**environment, "PYTHONPATH": str(ROOT)})

    (site,) = [site for site in sites.sites() if site.message == "unknown bucket {unknown[0]}"]
    assert table.read_recorded(recorded)[site.place] == {"tests/x.py::test_x"}
