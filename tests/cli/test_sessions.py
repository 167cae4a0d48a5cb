"""A command resolves configuration, folders and ledger once, and lists each folder once before and after changing it."""

import json
import subprocess
import sys

import pytest

from imagemill import demo
from imagemill.domain.buckets import BUCKETS
from imagemill.domain.embedding_specs import embedding_specs
from imagemill.domain.layout import DataRoot
from tests.helpers.product import PROJECT

KINDS = [f"derived/{spec.folder}" for spec in embedding_specs()]
SETS = [f"shards/bucket_{bucket}" for bucket in BUCKETS]


@pytest.fixture(scope="module")
def counted(tmp_path_factory):
    """The counts of a run over the 16 sample photographs, and of a second run without work."""
    folder = tmp_path_factory.mktemp("counted")
    demo.main([str(folder / "data")])
    DataRoot(folder / "data").config_file.write_text("threads: 2\n")

    def run(name):
        report = folder / f"{name}.json"
        command = [sys.executable, "-m", "tests.helpers.counted", report, folder / "data", "run"]
        done = subprocess.run(command, cwd=PROJECT, check=False, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return json.loads(report.read_text())

    assert not DataRoot(folder / "data").ledger.exists()
    return {name: run(name) for name in ("first", "second")}


@pytest.mark.parametrize("run", ["first", "second"])
def test_command_opens_the_ledger_twice_at_most_and_resolves_once(counted, run):
    assert counted[run]["ledger"] <= 2, "one for reading, before anything is decided; one for writing"
    assert counted[run]["config"] == 1
    assert counted[run].get("folders", 0) <= 1, "without a ledger, nothing is recorded of folders"


def test_first_run_lists_each_folder_once_after_changing_it(counted):
    listed = counted["first"]["listed"]

    assert listed["approved"] == 1
    assert {listed[folder] for folder in KINDS} == {1}, "the records use the listing of the check"
    assert {listed[folder] for folder in SETS} == {2}, "written, then checked"


def test_run_without_work_lists_each_folder_once(counted):
    listed = counted["second"]["listed"]

    assert {listed[folder] for folder in ("approved", *KINDS)} == {1}
    assert {listed[folder] for folder in SETS} == {1}
