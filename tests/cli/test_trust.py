"""A data root from another person: its settings run no code before `imagemill trust`.

Spec: docs/spec/conventions.md#trust
"""

import json
import os
import subprocess
import sys

import pytest

from imagemill.domain.layout import DataRoot
from tests.helpers.product import PROJECT, imagemill, photos

COMMANDS = [["run"], ["shards"], ["ui", "--port", "39272"]]


@pytest.fixture
def foreign(tmp_path):
    """Create a data root whose `dagster.yaml` creates a file when Dagster reads it; return root and file."""
    root, marker = DataRoot(tmp_path / "data"), tmp_path / "executed"
    photos(root.approved, 1)
    root.dagster_home.mkdir()
    handler = {"()": "subprocess.Popen", "args": ["touch", str(marker)]}
    settings = {
        "python_logs": {"dagster_handler_config": {"handlers": {"evil": handler}}},
        "telemetry": {"enabled": False},
    }
    (root.dagster_home / "dagster.yaml").write_text(json.dumps(settings))
    return root, marker


@pytest.mark.parametrize("arguments", COMMANDS, ids=" ".join)
def test_class_in_dagster_yaml_is_not_constructed(foreign, arguments):
    root, marker = foreign

    done = imagemill(*arguments, "--data-root", root.path, stub=True)

    assert done.returncode == 1, done.stdout + done.stderr
    assert "python_logs.dagster_handler_config" in done.stderr
    assert f"imagemill trust {root.path}" in done.stderr
    assert "Traceback" not in done.stderr
    assert not marker.exists()
    assert sorted(os.listdir(root.path)) == [".dagster", "approved"]
    assert os.listdir(root.dagster_home) == ["dagster.yaml"]


def test_consent_is_displayed_recorded_and_invalidated_by_a_change_of_the_file(foreign):
    root, marker = foreign

    done = imagemill("trust", root.path)

    assert done.returncode == 0, done.stderr
    assert "subprocess.Popen" in done.stdout
    assert "recorded in" in done.stdout
    assert not marker.exists(), "consent runs nothing"
    imagemill("run", "--data-root", root.path, stub=True)
    assert marker.exists(), "the test's code can be executed"

    with open(root.dagster_home / "dagster.yaml", "a") as file:
        file.write("\n")
    assert imagemill("run", "--data-root", root.path, stub=True).returncode == 1


def test_dagster_home_implies_consent(foreign):
    root, marker = foreign
    imagemill("run", "--data-root", root.path, stub=True, DAGSTER_HOME=root.dagster_home)
    assert marker.exists()


def test_root_without_such_settings_requires_no_consent(data_root, tmp_path):
    done = imagemill("trust", data_root.path)
    assert (done.returncode, "needs consent" in done.stdout) == (0, True)
    assert os.listdir(data_root.path) == ["approved"]
    assert not (tmp_path / "user-config").exists()

    done = imagemill("trust", tmp_path / "nowhere")
    assert (done.returncode, "no such data root" in done.stderr) == (1, True)


def test_module_of_the_current_folder_is_not_imported(tmp_path, monkeypatch):
    """`python -m` adds the current folder at the start of sys.path."""
    (tmp_path / "planted.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'w')\nclass Mine: pass\n")
    images = tmp_path / "data" / "stage_a" / "input" / "m" / "审核通过" / "g"
    photos(images, 1)
    command = [
        sys.executable,
        "-m",
        "dagster_project.cli.main",
        "stage-a",
        "--mission",
        "m",
        "--summarizer",
        "planted:Mine",
    ]

    def run(path):
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)

    done = run([str(PROJECT)])
    assert done.returncode == 2, done.stderr
    assert "No module named 'planted'" in done.stderr
    assert not (tmp_path / "executed").exists()

    assert "No module named" not in run([str(PROJECT), str(tmp_path)]).stderr
    assert (tmp_path / "executed").exists()
