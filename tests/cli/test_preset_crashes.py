"""Presets killed at random moments: the next run completes them to the result of a clean run, without repeating work.

tests/pipeline/presets/test_derive.py tests coord and derived presets under kill -9. test_rescale.py in that folder
tests a kill at each rename.
Spec: docs/spec/conventions.md#atomic-names, docs/spec/presets.md#strictness
"""

import os
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress

import psutil
import pytest

from imagemill.domain.layout import DataRoot
from imagemill.fs.atomic import temporaries
from imagemill.pipeline.presets.preset_images import INDEX
from imagemill.store.public_data import Dataset, read_preset_manifest
from imagemill.validation.validator import validate_preset
from tests.helpers.presets import inodes, rescale_here
from tests.helpers.product import PROJECT, imagemill, start
from tests.helpers.public import picture, put_image, put_records, record

IMAGES = 160
ENDS_WITHIN = 120  # seconds; detects a run that hangs, even on a busy machine

# Two processes and small batches allow many different moments.
RUN = """
import sys
from pathlib import Path
from imagemill.pipeline.presets import rescale
from imagemill.pipeline.presets.rescale_plan import choose_parameters
from imagemill.store.public_data import Dataset
from resources.engine import LocalProcesses

rescale.BATCH = 8
dataset = Dataset(Path(sys.argv[1]))
plan = rescale.plan_rescale(dataset, "p", choose_parameters(dataset.preset("p"), library="pillow"))
print("ready", flush=True)
rescale.run_rescale(plan, LocalProcesses(workers=2).map_batches)
"""


def crowded(folder, count=IMAGES, size=(400, 300)):
    """Two splits; every fifth image already has its target size."""
    dataset = Dataset(folder)
    shrunk, copied = picture(*size), picture(320, 256)
    records = []
    for n in range(count):
        put_image(dataset, f"{n:04d}.jpg", copied if n % 5 == 0 else shrunk)
        records.append(record(f"{n:04d}.jpg", *((320, 256) if n % 5 == 0 else size)))
    put_records(dataset, records[: count * 3 // 4])
    put_records(dataset, records[count // 2 :], split="val")
    return dataset


def contents(preset):
    """Return the bytes of every file under a final name, except the index, which is a cache of times and inodes."""
    names = {str(path.relative_to(preset.path)): path.name for path in preset.path.rglob("*")}
    files = {at: preset.path / at for at, name in names.items() if not name.startswith(".tmp-") and name != INDEX}
    return {at: path.read_bytes() for at, path in files.items() if path.is_file()}


def leftovers(dataset):
    return [path for folder in (dataset.path, *dataset.path.glob("*/"), *dataset.path.glob("*/images/"))
            for path in temporaries(folder)]  # fmt: skip


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Output of a clean run, and its duration after start-up."""
    dataset = crowded(tmp_path_factory.mktemp("undisturbed") / "coco")
    process, began = start_rescale(dataset), time.monotonic()
    assert process.wait() == 0
    return contents(dataset.preset("p")), time.monotonic() - began


def start_rescale(dataset):
    command = [sys.executable, "-c", RUN, str(dataset.path)]
    process = subprocess.Popen(command, cwd=PROJECT, stdout=subprocess.PIPE, start_new_session=True)
    assert process.stdout
    assert process.stdout.readline() == b"ready\n"
    return process


def kill(process, *, alone):
    """Kill only this process, as the out-of-memory killer does; return its workers, which survive for a moment."""
    workers = []
    with suppress(psutil.NoSuchProcess, ProcessLookupError):  # the process has already ended
        workers = psutil.Process(process.pid).children()
        os.kill(process.pid, signal.SIGKILL) if alone else os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    if not alone:  # a worker that waits for the disk dies a moment later
        psutil.wait_procs(workers, ENDS_WITHIN)
    return workers


def kill_and_rerun(folder, undisturbed, seed):
    clean, seconds = undisturbed
    dataset, choose = crowded(folder / "coco"), random.Random(seed)
    preset = dataset.preset("p")
    process = start_rescale(dataset)
    time.sleep(choose.uniform(0, seconds * 1.05))
    workers = kill(process, alone=choose.random() < 0.5)
    done = inodes(preset)
    whole = {name: data for name, data in contents(preset).items() if name != preset.manifest.name}
    assert whole.items() <= clean.items(), "whole files under final names only"
    assert preset.manifest.is_file() == preset.path.exists(), "the folder appears together with its manifest"

    report = rescale_here(dataset)
    psutil.wait_procs(workers, ENDS_WITHIN)

    assert contents(preset) == clean
    assert leftovers(dataset) == []
    assert done.items() <= inodes(preset).items(), "nothing is done twice"
    assert report.counts["kept"] + report.counts["adopted"] >= len(done)


@pytest.mark.parametrize("seed", [0, 1])
def test_killed_rescale_is_completed_by_the_next_run(tmp_path, undisturbed, seed):
    kill_and_rerun(tmp_path, undisturbed, seed)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(100, 120))
def test_killed_rescale_is_completed_by_the_next_run_twenty_times(tmp_path, undisturbed, seed):
    """The full count."""
    kill_and_rerun(tmp_path, undisturbed, seed)


# ---- the program itself


def start_until(root, preset, more):
    """Start the command; return it with its worker processes once it has published some images."""
    before = len(inodes(preset))
    process = start(*COMMAND, "--workers", 2, "--data-root", root.path, stub=False)
    while len(inodes(preset)) < before + more:
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.01)
    children = psutil.Process(process.pid).children(recursive=True)
    return process, [child for child in children if "spawn_main" in " ".join(child.cmdline())]


COMMAND = ("preset", "rescale", "coco", "--preset", "p", "--library", "pillow")


def test_command_recovers_from_a_killed_worker_and_from_its_own_death(tmp_path):
    """A dead worker ends the run in bounded time with a clear error. After a kill of all, the next run continues."""
    root = DataRoot(tmp_path / "data")
    dataset = crowded(root.public_data / "coco", 320, (800, 600))
    preset = dataset.preset("p")

    process, _ = start_until(root, preset, 10)
    killed = set()
    while process.poll() is None:  # every worker that it starts
        with suppress(psutil.NoSuchProcess):
            for worker in psutil.Process(process.pid).children():
                if "spawn_main" in " ".join(worker.cmdline()):
                    worker.kill()
                    killed.add(worker.pid)
        time.sleep(0.02)
    said, _ = process.communicate(timeout=ENDS_WITHIN)
    assert process.returncode == 1
    assert any(f"worker process {pid} was ended by SIGKILL" in said for pid in killed)
    assert "run the same command again" in said
    assert "Traceback" not in said
    assert preset.splits() == []
    done = inodes(preset)

    process, _ = start_until(root, preset, 10)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert done.items() <= inodes(preset).items()
    done = inodes(preset)

    last = imagemill(*COMMAND, "--workers", 2, "--data-root", root.path)

    assert last.returncode == 0, last.stderr
    assert done.items() <= inodes(preset).items(), "nothing is done twice"
    assert leftovers(dataset) == []
    assert [report for report in validate_preset(preset.path) if not report.passed] == []
    rescale_here(dataset, "clean")
    assert result(preset) == result(dataset.preset("clean"))


def test_interrupted_command_reports_it_and_the_next_run_continues(tmp_path):
    """Exit codes 130 and 143; finished images are kept. Spec: docs/spec/conventions.md#exit-codes"""
    root = DataRoot(tmp_path / "data")
    dataset = crowded(root.public_data / "coco", 320, (800, 600))
    preset, done = dataset.preset("p"), {}
    for number in (signal.SIGINT, signal.SIGTERM):
        process, workers = start_until(root, preset, 10)
        process.send_signal(number)
        said, _ = process.communicate(timeout=ENDS_WITHIN)

        assert process.returncode == 128 + number
        assert "run the same command to resume" in said
        assert "Traceback" not in said
        psutil.wait_procs(workers, ENDS_WITHIN)
        assert not any(worker.is_running() for worker in workers)
        assert done.items() <= inodes(preset).items()
        assert preset.splits() == []
        done = inodes(preset)

    rescale_here(dataset)

    assert done.items() <= inodes(preset).items(), "nothing is done twice"
    assert leftovers(dataset) == []


def result(preset):
    """Return everything except the name of the preset: images, records, and recorded results of the stages."""
    made = {name: data for name, data in contents(preset).items() if name.startswith("images/") or name.endswith("l")}
    return made, (read_preset_manifest(preset) or {})["stage_stats"]
