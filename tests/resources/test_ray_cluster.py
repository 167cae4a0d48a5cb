"""Clusters that cannot be joined, without a cluster. Those that can are in tests/cli/test_ray.py."""

import json
import socket
import subprocess
import sys

import pytest

from imagemill.errors import WrongUsage
from resources import ray_cluster
from resources.ray_cluster import ClusterUnusable, answer, check_address, join
from tests.helpers.product import imagemill, photos


def joined(address, **how):
    join(address, **{"insecure": False, "least_memory": 1, **how})


def test_missing_ray_is_named_with_the_extra(monkeypatch):
    """Spec: docs/spec/engines.md#refused"""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)

    with pytest.raises(WrongUsage, match="ray is not installed") as refusal:
        check_address("auto")
    assert "imagemill[ray]" in str(refusal.value.do)


@pytest.mark.parametrize("address", ["ray://head:10001", "head", "head:port", ":6379"])
def test_address_of_another_form_is_refused(address):
    """Spec: docs/spec/engines.md#refused"""
    with pytest.raises(WrongUsage, match=r"Ray Client|neither"):
        joined(address)


def test_address_where_nothing_listens_is_refused():
    """Spec: docs/spec/engines.md#refused"""
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]

    with pytest.raises(ClusterUnusable, match=f"no Ray cluster answers at 127.0.0.1:{port}"):
        joined(f"127.0.0.1:{port}")


def test_computer_without_a_node_is_refused_before_ray_looks_for_one(monkeypatch, capsys):
    """Ray would look for a minute. Nodes of other tests may run here. Spec: docs/spec/engines.md#refused"""
    monkeypatch.setattr(ray_cluster, "_has_node", lambda: False)
    monkeypatch.setattr(sys, "argv", ["-c", "127.0.0.1:1"])
    answer()
    found = json.loads(capsys.readouterr().out)
    monkeypatch.setattr(ray_cluster, "_probe", lambda address: found)

    with socket.create_server(("127.0.0.1", 0)) as server, pytest.raises(ClusterUnusable) as refusal:
        joined(f"127.0.0.1:{server.getsockname()[1]}")
    assert "this computer is no node of the cluster" in str(refusal.value)


def test_cluster_that_does_not_answer_in_time_is_refused(monkeypatch):
    """The child process that joins first is ended. Spec: docs/spec/engines.md#refused"""
    monkeypatch.setattr(ray_cluster, "PROBE_SECONDS", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as server, pytest.raises(ClusterUnusable) as refusal:
        joined(f"127.0.0.1:{server.getsockname()[1]}")
    assert "does not let this process join: no answer within 0.1 s" in str(refusal.value)


FOUND = {"address": "10.0.0.5:6379", "memory": 10**9}


@pytest.mark.parametrize(
    ("found", "environment", "message"),
    [
        ({"error": "ConnectionError: Could not find any running Ray instance."}, {}, "no Ray cluster runs on this computer"),
        ({"error": "RuntimeError: Version mismatch: The cluster was started with:\n Ray: 2.59.0"}, {}, "another Ray or Python"),
        ({"error": "AuthenticationError: Invalid token"}, {}, "refuses the token"),
        ({"error": "Can't find a local Raylet"}, {}, "this computer is no node"),
        ({"error": "ValueError: something else"}, {}, "cannot be joined: ValueError: something else"),
        (FOUND, {"RAY_AUTH_MODE": "disabled"}, "joined without a token"),
        (FOUND | {"memory": 10**6}, {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "t"}, "object store of this computer has 1 MB"),
    ],
)  # fmt: skip
def test_answer_of_a_cluster_becomes_one_sentence(monkeypatch, found, environment, message):
    """Spec: docs/spec/engines.md#refused"""
    monkeypatch.setattr(ray_cluster, "_probe", lambda address: found)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)

    with pytest.raises(ClusterUnusable, match=message) as refusal:
        joined("auto", least_memory=256_000_000)
    assert "\n" not in refusal.value.what
    assert refusal.value.do


@pytest.mark.parametrize(
    ("environment", "token"),
    [
        ({"RAY_AUTH_MODE": "disabled", "RAY_AUTH_TOKEN": "t"}, False),
        ({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "t"}, True),
        ({"RAY_AUTH_TOKEN_PATH": "/token"}, True),
        ({}, False),
    ],
)
def test_token_is_that_of_ray(monkeypatch, tmp_path, environment, token):
    monkeypatch.setenv("HOME", str(tmp_path))

    assert ray_cluster._has_token(environment) is token


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("engine: {workers: 2}", "engine.workers belongs to engine.kind: ray"),
        ("engine: {kind: ray}\ndevices: all", "devices names GPUs of this machine"),
        ("engine: {kind: ray}\nencoders: {vae_latents: {device: 'cuda:1'}}", "encoders.vae_latents.device names GPUs"),
        ("engine: {kind: ray}\ncaptioner: {device: 'cuda:1'}", "captioner.device names GPUs of this machine"),
        ("engine: {kind: dask}", "kind"),
        ("engine: {kind: ray, cpus: -1}", "cpus"),
    ],
)
def test_setting_that_contradicts_the_engine_is_refused(data_root, text, message):
    photos(data_root.approved, 1)
    data_root.config_file.write_text(text)

    done = imagemill("run", "--data-root", data_root.path, stub=True)

    assert done.returncode == 2
    assert message in done.stderr
    assert "line " in done.stderr


@pytest.mark.parametrize(
    ("address", "code", "message"), [("ray://head:1", 2, "Ray Client"), ("127.0.0.1:1", 1, "no Ray cluster")]
)
def test_run_is_refused_before_any_work(data_root, tmp_path, address, code, message):
    """Spec: docs/spec/engines.md#refused"""
    photos(data_root.approved, 2)
    config = tmp_path / "imagemill.yaml"
    config.write_text(f"engine: {{kind: ray, address: '{address}'}}")

    done = imagemill("run", "--data-root", data_root.path, "--config", config, stub=True)

    assert done.returncode == code, done.stdout + done.stderr
    assert message in done.stderr
    assert f"where: {config}\n" in done.stderr
    assert not data_root.derived.exists()


def test_address_in_a_data_root_needs_consent(data_root):
    """Spec: docs/spec/engines.md#engines"""
    photos(data_root.approved, 2)
    data_root.config_file.write_text("engine: {kind: ray, address: '127.0.0.1:1'}")

    done = imagemill("run", "--data-root", data_root.path, stub=True)

    assert done.returncode == 1
    assert "need your consent" in done.stderr
    assert "engine.address: 127.0.0.1:1" in done.stderr


def test_ray_is_not_imported_without_need():
    code = "import dagster_project.definitions, imagemill.pipeline.stage2.embed_remote, sys; sys.exit('ray' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
