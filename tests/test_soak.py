"""The plan of `make soak N=…`, and its stored results."""

import collections
import json

import pytest

from tests import soak
from tests.helpers.disk_faults import Fault
from tests.helpers.fault_trials import Trial, remedies
from tests.helpers.writing_commands import COMMANDS


def test_a_fifth_as_many_of_each_other_fault_over_all_commands():
    keys = soak.keys_of(1000)

    assert collections.Counter(mode for mode, _ in keys.values()) == {"kill": 1000, "enospc": 200, "eio": 200}
    for mode in ("kill", "enospc", "eio"):
        assert {name for fault, name in keys.values() if fault == mode} == set(COMMANDS)


def test_trial_of_a_key_is_the_same_at_any_count():
    few, many = soak.keys_of(100), soak.keys_of(1000)

    assert few.items() <= many.items()


class Shop:
    """Trials that pass, except for one command."""

    def __init__(self, folder):
        pass

    def choose(self, name, mode, seed):
        return Fault(mode, 7)

    def try_fault(self, name, fault):
        return Trial(name, fault, "write /x", "broken" if name == "shards" else "")

    def close(self):
        pass


@pytest.fixture
def results(tmp_path, monkeypatch):
    monkeypatch.setattr(soak, "Workshop", Shop)
    path = tmp_path / "trials.jsonl"
    soak.work(soak.keys_of(25), 1, path, {})
    return path


def test_passed_trials_are_not_repeated_and_failed_ones_are(results):
    recorded = soak.read_results(results)

    assert len(recorded) == 35
    again = soak.untried(soak.keys_of(25), recorded)
    assert set(again) == {key for key, line in recorded.items() if line["failure"]}
    assert {name for _, name in again.values()} == {"shards"}


def test_last_result_of_a_trial_counts(results):
    first = soak.read_results(results)["kill-10"]
    assert first["failure"]
    with open(results, "a") as file:
        file.write(json.dumps({**first, "failure": ""}) + "\n")

    assert not soak.read_results(results)["kill-10"]["failure"]


def test_commands_of_the_last_remedy_are_found():
    text = "a\n  do:   imagemill repair\nb\n  do:   `imagemill shards --overwrite`, or imagemill run"

    assert remedies(text) == [["shards", "--overwrite"], ["run"]]
    assert remedies("no remedy") == []
