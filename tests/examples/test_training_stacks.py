"""The examples for Accelerate, Lightning and torchdata: devices, ranks, and resuming within an epoch."""

import importlib.util
import os
import re
import socket
import subprocess
import sys
from collections import Counter

import pytest

from imagemill.reading import ShardDataset
from tests.helpers.product import PROJECT
from tests.helpers.shard_sets import shard_set

IDS = [f"i{n}" for n in range(11)]


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    """Eleven samples of one bucket in four tars."""
    return shard_set(tmp_path_factory.mktemp("stacks") / "data", dict.fromkeys(IDS, (64, 64))).shards


def needs(module):
    """Skip without a library that is not a dependency. It is not imported here, because it changes global state."""
    return pytest.mark.skipif(
        importlib.util.find_spec(module) is None, reason=f"{module} is not installed: pip install {module}"
    )


def start(code, *arguments, **environment):
    command = [sys.executable, *(["-c", code] if isinstance(code, str) else [str(code)]), *map(str, arguments)]
    return subprocess.Popen(
        command, cwd=PROJECT, env=os.environ | environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def finish(process):
    output, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    return output, errors


def ids_of(output):
    """Return the ids of each step."""
    return [line.split() for line in re.findall(r"^step .* loss \S+  (.+)$", output, re.MULTILINE)]


def planned(shards, steps, **settings):
    """Return the ids of the plan's first steps."""
    dataset = ShardDataset(shards, 2, members=("t5m",), tail="pad", repeat=True, **settings)
    return [batch["image_id"] for batch, _ in zip(dataset, range(steps), strict=False)]


# ---- Accelerate


@needs("accelerate")
def test_accelerate_does_not_divide_the_batches_again(shards):
    """Two processes: every sample of an epoch, in the plan's batches."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    processes = [
        start(
            PROJECT / "examples" / "train_with_accelerate.py", shards, "--steps", 3, "--batch-size", 2,
            RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=port,
            ACCELERATE_USE_CPU="true",
        )
        for rank in range(2)
    ]  # fmt: skip
    delivered = [ids_of(finish(process)[0]) for process in processes]

    assert delivered == [planned(shards, 3, rank=rank, world_size=2) for rank in range(2)]
    assert Counter(i for rank in delivered for batch in rank for i in batch).keys() == set(IDS)


PREPARED = """
import sys, torch
from accelerate import Accelerator, PartialState
from imagemill.reading import ShardDataset

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
PartialState().device = torch.device("meta")
dataset = ShardDataset(sys.argv[1], 2, latents="crop", rank=1, world_size=2)
loader = accelerator.prepare(dataset.loader(num_workers=1))
model = torch.nn.Linear(1, 1)
for batch in loader:
    with accelerator.accumulate(model):
        synced, step = accelerator.sync_gradients, dataset.state_dict()["step"]
        print(batch["vae"].device, batch["t5m"].device, batch["caption"][0], synced, step)
"""


@needs("accelerate")
def test_prepared_loader_moves_tensors_and_keeps_the_position(shards):
    """The device `meta` is unlike that of the batches. The last batch of an epoch synchronises the gradients."""
    output, _ = finish(start(PREPARED, shards))

    lines = [line.split(" ", 2) for line in output.splitlines()]
    assert [line[:2] for line in lines] == [["meta", "meta"]] * 3
    assert [line[2].split()[-2:] for line in lines] == [["False", "1"], ["False", "2"], ["True", "0"]]
    assert all(line[2].startswith("a picture called i") for line in lines)


# ---- Lightning


@needs("lightning")
def test_lightning_resumes_within_an_epoch(shards, tmp_path):
    example, checkpoint = PROJECT / "examples" / "train_with_lightning.py", tmp_path / "last.ckpt"

    parts = [
        finish(start(example, shards, "--steps", steps, "--batch-size", 2, "--checkpoint", checkpoint))[0]
        for steps in (2, 9, 14)
    ]

    assert [len(ids_of(part)) for part in parts] == [2, 7, 5]
    assert [batch for part in parts for batch in ids_of(part)] == planned(shards, 14)


# ---- torchdata


@needs("torchdata")
@pytest.mark.parametrize("workers", [pytest.param(0, marks=pytest.mark.soak), 2])
def test_stateful_data_loader_resumes_without_reading_again(shards, tmp_path, workers):
    """Also at a step that is no multiple of the workers, and in a later epoch; no warning about fast-forwarding."""
    example, state = PROJECT / "examples" / "train_with_torchdata.py", tmp_path / "loader.pt"

    parts = [
        finish(start(example, shards, "--steps", n, "--batch-size", 2, "--workers", workers, "--state", state))
        for n in (3, 6, 4)
    ]

    assert [batch for output, _ in parts for batch in ids_of(output)] == planned(shards, 13)
    assert not any("fast-forward" in errors for _, errors in parts)
