"""Several worker processes under the command: embeddings and captions.

Spec: docs/spec/stage2.md#determinism
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from imagemill.domain.embedding_specs import DINOV3, VAE
from tests.helpers.product import PROJECT
from tests.helpers.stage2 import photos

IDS = [f"i{n:02d}" for n in range(6)]


def start(root, *arguments):
    command = [sys.executable, "-m", "dagster_project.cli.main", *arguments, "--data-root", str(root.path)]
    return subprocess.Popen(
        command, cwd=PROJECT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )


def workers_of(pid):
    """Return the worker processes below a process."""
    children = Path(f"/proc/{pid}/task").glob("*/children")
    below = [int(child) for file in children for child in file.read_text().split()]
    return [child for child in below if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes()]


def files(root, spec):
    return {path.stem: path.read_bytes() for path in Path(root.derived, spec.folder).glob("*.npy")}


def test_command_with_two_workers_survives_the_death_of_one_and_makes_the_same_bytes(data_root):
    """Preview models on a CPU: the files are those of a single process. No image is lost."""
    photos(data_root, *IDS, size=(256, 192))
    settings = "threads: 1\nencoders: {vae_latents: {batch_size: 1}}\n"
    data_root.config_file.write_text(settings)
    alone = start(data_root, "stage2", "--pass", "vae")
    said, _ = alone.communicate(timeout=300)
    assert alone.returncode == 0, said
    expected = files(data_root, VAE)
    data_root.config_file.write_text(settings + "devices: [cpu, cpu]\n")

    several = start(data_root, "stage2", "--pass", "vae", "--regenerate", "vae")
    until = time.monotonic() + 60
    while not (workers := workers_of(several.pid)) and several.poll() is None and time.monotonic() < until:
        time.sleep(0.02)
    os.kill(workers[0], signal.SIGKILL)
    said, _ = several.communicate(timeout=300)

    assert several.returncode == 0, said
    assert files(data_root, VAE) == expected
    assert sorted(expected) == IDS


def test_device_that_does_not_exist_is_refused_before_any_work(data_root):
    photos(data_root, "a")
    data_root.config_file.write_text("devices: [cpu, 'cuda:99']\n")

    refused = start(data_root, "stage2", "--pass", "dinov3")
    said, _ = refused.communicate(timeout=300)

    assert refused.returncode == 2, said
    assert "has no cuda:99" in said
    assert "do:    choose from" in said
    assert not (data_root.derived / DINOV3.folder).exists()
