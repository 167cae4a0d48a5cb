"""`examples/scaling_table.py` on the output of the real command, and its arithmetic."""

import importlib.util
import json
import subprocess
import sys

import pytest

from tests.docs.console import ROOT
from tests.helpers.product import imagemill, photos

SCRIPT = ROOT / "examples" / "scaling_table.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("scaling_table", SCRIPT)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


SPEED = {
    "kind": "k",
    "prepare": 100,
    "model_alone": 50,
    "write": 1000,
    "stream": 40,
    "remaining": 10,
    "gigabytes": 1e-5,
}
CLUSTER = {"kind": "k", "driver_cpu": 0.001, "sent": 400_000, "returned": 5_000_000}


def test_table_of_the_commands_own_output(data_root, tmp_path):
    photos(data_root.approved, 4)
    done = imagemill("bench", "--json", "--images", 2, "--data-root", data_root.path, stub=True)
    (tmp_path / "speeds.json").write_text(done.stdout)

    shown = subprocess.run(
        [sys.executable, SCRIPT, tmp_path / "speeds.json", "--images", "1000"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout

    assert all(kind in shown for kind in ("dinov3_npy", "vae_latents", "t5_hidden"))
    assert "| 1,000 | 3,000 | 1 |" in shown


def test_link_or_driver_limits_a_cluster(script):
    assert script.driver_ceiling(CLUSTER, 1.25e9) == (250, "link")
    assert script.driver_ceiling(CLUSTER, 1.25e10) == (1000, "driver")


def test_hours_of_a_machine_of_shares_and_of_a_cluster(script):
    *_, row = script.images_table([SPEED], [CLUSTER], [3_600_000], nodes=50, shares=10)

    # 40 images/s; ten times that; 2,000 of the nodes, but 250 of the link and 1,000 of the driver.
    assert row == "| 3,600,000 | 25.0 h | 2.5 h | 4.0 h | 1.0 h |"


def test_requests_and_bytes(script):
    *_, row = script.storage_table([SPEED], [10_500], 1000)

    assert row == "| 10,500 | 10,500 | 11 | 33 | 10,500 | 0 GB |"
    assert script.file_bytes({**SPEED, "remaining": 0}) == 0


def test_cluster_is_optional(script, tmp_path, capsys, monkeypatch):
    (tmp_path / "speeds.json").write_text(json.dumps([SPEED]))
    monkeypatch.setattr(sys, "argv", ["scaling_table", str(tmp_path / "speeds.json"), "--images", "3600000"])

    script.main()

    assert "nodes," not in capsys.readouterr().out
