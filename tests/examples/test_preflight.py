"""The launch script's preflight: several files in one process, and the job only where nothing is wrong.

Spec: docs/spec/validation.md#checks
"""

import subprocess
import sys

import pytest

from imagemill.pipeline.shards.shard_sets import bucket_folder
from tests.helpers.product import PROJECT
from tests.helpers.situations import SQUARE, preset, shards, stage_a


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Good files of every kind."""
    folder = tmp_path_factory.mktemp("data")
    made = preset(folder)
    root = shards(folder)
    return [made / "train.jsonl", made, root.stage2_jsonl, stage_a(folder), bucket_folder(root.shards, SQUARE)]


@pytest.fixture
def preflight(tmp_path):
    """Run the script; `.calls`: how often it started the program."""
    program, calls = tmp_path / "imagemill", tmp_path / "calls"
    program.write_text(f'#!/bin/sh\necho call >> "{calls}"\nexec "{sys.executable}" -m dagster_project.cli.main "$@"\n')
    program.chmod(0o755)

    def run(*arguments):
        calls.write_text("")
        done = subprocess.run(
            [PROJECT / "examples" / "preflight.sh", *map(str, arguments)], capture_output=True, text=True, check=False,
            cwd=PROJECT,
            env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(PROJECT), "IMAGEMILL": str(program), "HOME": str(tmp_path)},
        )  # fmt: skip
        done.calls = calls.read_text().count("call")
        return done

    return run


def test_job_runs_after_one_look_at_all_files(preflight, data):
    done = preflight(*data, "--", "echo", "training", "on it")

    assert (done.returncode, done.stdout, done.calls) == (0, "training on it\n", 1), done.stderr
    assert done.stderr.count(": passed: ") == len(data) + 1, "a preset's folder has a report of its own"


def test_job_does_not_run_on_bad_data_and_every_file_is_reported(preflight, data, tmp_path):
    bad = tmp_path / "train.coord.jsonl"
    bad.write_text("{\n")

    done = preflight(bad, tmp_path / "gone.jsonl", *data, "--", "echo", "training")

    assert (done.returncode, done.stdout, done.calls) == (1, "", 1)
    assert "train.coord.jsonl:1: strict_json" in done.stderr
    assert "nothing to validate" in done.stderr
    assert done.stderr.count(": passed: ") == len(data) + 1
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("arguments", [[], ["x.jsonl"], ["--"], ["--no-such", "x.jsonl", "--", "true"], ["--", "true"]])
def test_wrong_usage_is_2_and_the_job_does_not_run(preflight, arguments):
    done = preflight(*arguments)

    assert done.returncode == 2
    assert "sage:" in done.stderr
    assert done.stdout == ""
