"""Real clusters that a run cannot join. Each is refused in one message, within 15 seconds, and nothing is written.

Spec: docs/spec/engines.md#refused
"""

import os
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager

import pytest

from tests.helpers.product import PROJECT, STUBS, photos
from tests.helpers.ray_nodes import RayNodes, can_make_nodes

pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(not can_make_nodes(), reason="nodes need root, unshare and nsenter"),
]


@contextmanager
def started(**how):
    """Start the head of a cluster."""
    with tempfile.TemporaryDirectory(prefix="ray", dir="/tmp") as folder:
        cluster = RayNodes(folder, [], **how)
        try:
            yield cluster
        finally:
            cluster.close()


def refused(cluster, root, tmp_path, *, prefix=None, engine="", **environment):
    """Run on a cluster, which is refused; return the message."""
    photos(root.approved, 2)
    config = tmp_path / "imagemill.yaml"
    config.write_text(f"engine: {{kind: ray, address: '{cluster.address}', {engine}}}")
    began = time.monotonic()

    done = subprocess.run(
        [*(prefix or cluster.prefix), sys.executable, str(STUBS), "run", "--data-root", root.path, "--config", config],
        cwd=PROJECT, env={**os.environ, **cluster.environment, **environment}, capture_output=True, text=True, check=False,
    )  # fmt: skip

    shown = done.stdout + done.stderr
    assert done.returncode == 1, shown
    assert time.monotonic() - began < 15, shown
    assert shown.count("imagemill: ") == 1
    assert f"where: {config}\n" in shown
    assert not any(sign in shown for sign in ("Traceback", "Check failed", "*** ", "(raylet)")), shown
    assert not root.derived.exists()
    return shown


def test_other_token(data_root, tmp_path):
    with started(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN="a" * 64) as cluster:
        shown = refused(cluster, data_root, tmp_path, RAY_AUTH_TOKEN="b" * 64)

    assert f"the cluster at {cluster.address} refuses the token of this process" in shown


def test_other_ray(data_root, tmp_path):
    earlier = tmp_path / "earlier"
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", earlier, "ray==2.58.0"]
    subprocess.run(install, check=True)

    with started(PYTHONPATH=str(earlier)) as cluster:
        shown = refused(cluster, data_root, tmp_path, PYTHONPATH=str(PROJECT))

    assert f"the cluster at {cluster.address} has another Ray or Python" in shown
    assert "2.58.0" in shown


def test_small_object_store(data_root, tmp_path):
    with started() as cluster:
        shown = refused(cluster, data_root, tmp_path, engine="in_flight_mb: 400")

    assert "the object store of this computer has 300 MB, and 400 MB are needed" in shown


def test_computer_that_is_no_node(data_root, tmp_path):
    with started(ip="10.77.0.1") as cluster:
        shown = refused(cluster, data_root, tmp_path, prefix=cluster.outside, engine="insecure: true")

    assert f"this computer is no node of the cluster at {cluster.address}" in shown
