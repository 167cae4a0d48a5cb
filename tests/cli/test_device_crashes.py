"""Kills at random moments of runs with several workers: of the run, of its process group, or of one worker.

Each trial continues to the end. Every image is there once, with the bytes of an undisturbed run, and repacking gives the bytes of
packing from scratch.

Spec: docs/spec/conventions.md#atomic-names, docs/spec/stage2.md#determinism
"""

import contextlib
import os
import random
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from imagemill.domain.embedding_specs import embedding_specs
from imagemill.domain.layout import DataRoot
from imagemill.fs.fingerprints import fingerprint_file
from imagemill.store.ledger import Ledger
from tests.helpers.product import SEARCH_PATH, contents, imagemill, photos, start

STUBBED = Path(__file__).parents[1] / "helpers" / "stubbed"
FIRST, ADDED = 24, 8
KILLS = 3  # before and after images are added


class Setting:
    """Configuration and environment of the runs of one trial."""

    def __init__(self, batch_size=4, *, stub=True, sleep=0.05):
        kinds = "".join(f"  {spec.kind}: {{batch_size: {batch_size}}}\n" for spec in embedding_specs())
        self.config = f"threads: 1\nshard_size: 10\ndevices: [cpu, cpu]\nencoders:\n{kinds}"
        path = os.pathsep.join([str(STUBBED), SEARCH_PATH]) if stub else SEARCH_PATH
        self.environment = {"PYTHONPATH": path, "IMAGEMILL_STUB_SLEEP": sleep if stub else 0}


def fill(root, setting, source):
    root.approved.mkdir(parents=True)
    root.config_file.write_text(setting.config)
    add(root, source, range(FIRST))


def add(root, source, numbers):
    for number in numbers:
        for suffix in ("jpg", "txt"):
            shutil.copy2(source / f"photo{number:04d}.{suffix}", root.approved)


def run(root, setting):
    done = imagemill("run", "--data-root", root.path, **setting.environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("source")
    photos(folder, FIRST + ADDED)
    return folder


def undisturbed(folder, setting, source):
    """Return the contents after the first images, after more of them, and after repacking; and the seconds of each run."""
    root, found, seconds = DataRoot(folder / "undisturbed" / "data"), [], []
    fill(root, setting, source)
    for numbers in (range(0), range(FIRST, FIRST + ADDED)):
        add(root, source, numbers)
        began = time.monotonic()
        run(root, setting)
        seconds.append(time.monotonic() - began)
        found.append(contents(root))
    done = imagemill("shards", "--repack", "--data-root", root.path, **setting.environment)
    assert done.returncode == 0, done.stderr
    return [*found, contents(root)], seconds


@pytest.fixture(scope="module")
def expected(tmp_path_factory, source):
    return undisturbed(tmp_path_factory.mktemp("expected"), Setting(), source)


def workers_of(pid):
    """Return the worker processes below a process, which may be ending."""
    found = []
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children = [int(child) for child in file.read_text().split()]
            found += [c for c in children if b"spawn_main" in Path(f"/proc/{c}/cmdline").read_bytes()]
        except OSError:
            continue
    return found


def kill_something(process, chosen, longest):
    """Kill the run, its group or a worker at a random moment; wait for the run to end."""
    try:
        process.communicate(timeout=chosen.uniform(0.3, 1.0) * longest)
        return
    except subprocess.TimeoutExpired:
        pass
    victim = chosen.choice(["run", "group", "worker", "worker"])
    workers = workers_of(process.pid)
    if victim == "worker" and workers:
        with contextlib.suppress(ProcessLookupError):
            os.kill(chosen.choice(workers), signal.SIGKILL)
        process.communicate(timeout=300)
    elif victim == "group":
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    else:
        process.kill()
        process.communicate()


def killed(root, setting, source, expected, seed, kills=KILLS):
    """One trial over the first images, and one over more of them, whose shards are updated."""
    stages, seconds = expected
    chosen = random.Random(seed)
    fill(root, setting, source)
    for numbers, wanted, longest in zip((range(0), range(FIRST, FIRST + ADDED)), stages, seconds, strict=False):
        add(root, source, numbers)
        for _ in range(kills):
            kill_something(start("run", "--data-root", root.path, stub=False, **setting.environment), chosen, longest)
        run(root, setting)
        assert_same(root, wanted)
    assert imagemill("shards", "--repack", "--data-root", root.path, **setting.environment).returncode == 0
    assert contents(root) == stages[-1]


def assert_same(root, wanted):
    """The files of an undisturbed run, each once in the ledger, in the records and in a tar; tars may be cut elsewhere."""
    found = contents(root)
    arrays = {name for name in wanted if name.endswith(".npy")}
    assert {name for name in found if name.endswith(".npy")} == arrays
    assert {name: found[name] for name in arrays} == {name: wanted[name] for name in arrays}
    records = str(root.stage2_jsonl.relative_to(root.path))
    assert found[records] == wanted[records]
    with Ledger(root.ledger) as ledger:
        for spec in embedding_specs():
            rows = {row.image_id: row.content for row in ledger.files(spec.kind).values()}
            paths = {path.stem: path for path in (root.derived / spec.folder).glob("*.npy")}
            assert rows == {image_id: fingerprint_file(path) for image_id, path in paths.items()}
    assert not [name for name in found if ".tmp-" in name]
    done = imagemill("verify", "--data-root", root.path)
    assert done.returncode == 0, done.stdout + done.stderr


def test_killed_run_with_two_workers_is_continued_without_loss(tmp_path, source, expected):
    """A worker is killed before images are added, and the run afterwards."""
    killed(DataRoot(tmp_path / "data"), Setting(), source, expected, seed=9, kills=1)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(100, 130))
def test_killed_run_with_two_workers_is_continued_without_loss_many_times(tmp_path, source, expected, seed):
    """Thirty trials with six kills each."""
    killed(DataRoot(tmp_path / "data"), Setting(), source, expected, seed)


@pytest.mark.soak
@pytest.mark.parametrize("batch_size", [1, 8])
def test_killed_run_with_preview_models_makes_the_bytes_of_an_undisturbed_one(tmp_path, source, batch_size):
    """Two trials with six kills each per batch size, float32 on the CPU."""
    setting = Setting(batch_size, stub=False)
    expected = undisturbed(tmp_path, setting, source)
    for seed in (1, 2):
        killed(DataRoot(tmp_path / f"killed{seed}" / "data"), setting, source, expected, seed)
