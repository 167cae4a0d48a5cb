"""Shards killed at random moments: a reader sees the complete old or new set, and the next run completes the work.

Spec: docs/spec/conventions.md#atomic-names, docs/spec/shards.md#replacement
"""

import os
import random
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from imagemill.domain.layout import DataRoot
from imagemill.fs.atomic import temporaries
from imagemill.fs.fingerprints import fingerprint_file
from imagemill.pipeline.shards.shard_sets import agrees, list_tars, read_manifest
from tests.helpers.product import PROJECT, imagemill, start
from tests.helpers.shard_runs import SQUARE, TALL, bucket_folders, packed_here, written
from tests.helpers.stage2 import foreign, record_of

BUCKETS = (SQUARE, TALL)
SAMPLES = 100  # per bucket: 16 MB
OLD, NEW = 40, 15  # samples per tar: three tars before, seven after

# The work of `imagemill shards` after start-up. It reports when this many samples are packed, continues slowly, and
# waits at the end, so that each kill hits the writing.
WRITER = """
    import signal, sys, time
    from pathlib import Path
    sys.path.insert(0, {project!r})
    from imagemill.config import Config
    from imagemill.domain.layout import DataRoot
    from imagemill.store.ledger import Ledger
    from imagemill.pipeline.shards.packing import PackRequest, plan_packing
    from imagemill.pipeline.shards.shard_writer import write_bucket
    from imagemill.pipeline.stage2.inventory import Inventory
    from imagemill.pipeline.shards.conflicts import refuse_conflicts

    root, shards = DataRoot(Path({root!r})), Path({shards!r})
    with Ledger(root.ledger) as ledger:
        request = PackRequest({buckets!r}, shards, {existing!r}, {{"shard_size": {size}}})
        shard_set = plan_packing(Inventory(root), Config(), ledger, request)[1]
    shard_set.workers = 2
    refuse_conflicts(shard_set)
    packed = []

    def on_sample(size):
        packed.append(size)
        if len(packed) == {moment}:
            print("now", flush=True)
        elif len(packed) > {moment}:
            time.sleep(0.0003)

    for plan in shard_set.plans:
        write_bucket(shard_set, plan, root.derived, {{}}, on_sample=on_sample)
    signal.pause()
"""


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """Records and files of two buckets in the ledger; the output of undisturbed runs by samples per tar."""
    root = DataRoot(tmp_path_factory.mktemp("prepared") / "data")
    sizes = {"square": (24, 24), "tall": (24, 36)}
    foreign(root, *(record_of(f"{name}{n:04d}", size=size) for name, size in sizes.items() for n in range(SAMPLES)))
    sets = {}
    for size in (OLD, NEW):
        output = root.path / f"of_{size}"
        assert packed_here(root, shard_size=size, output_dir=str(output)).success
        sets[size] = sets_in(output)
    return root, sets


def sets_in(output):
    """Return bucket → its files, byte for byte, after checking that manifest and checksums match the tars."""
    folders = {path.name: path for path in output.glob("bucket_*")}
    for folder in folders.values():
        manifest = read_manifest(folder)
        assert manifest
        assert agrees(list_tars(folder), manifest), "a foreign tar, or none where there should be one"
        for shard in manifest.shards:
            assert fingerprint_file(folder / shard.name) == shard.checksum
    return {name: written(folder) for name, folder in folders.items()}


def start_writer(root, shards, existing, moment):
    script = textwrap.dedent(WRITER).format(
        project=str(PROJECT), root=str(root.path), shards=str(shards), buckets=BUCKETS, existing=existing, size=NEW,
        moment=moment,
    )  # fmt: skip
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, cwd=PROJECT, text=True)
    assert process.stdout
    assert process.stdout.readline() == "now\n"
    return process


def kill_the_writer(root, shards, existing, seed):
    """Kill half of the runs near a random sample, the others near the end of a bucket: flush, index, exchange."""
    choose = random.Random(seed)
    moment = choose.choice([choose.randint(1, 2 * SAMPLES), SAMPLES, 2 * SAMPLES])
    with start_writer(root, shards, existing, moment) as process:
        time.sleep(choose.uniform(0, 0.03))
        process.kill()
    assert process.returncode == -signal.SIGKILL


def killed_during_write(prepared, shards, seed):
    root, sets = prepared

    kill_the_writer(root, shards, "refuse", seed)

    found = sets_in(shards)
    assert found.items() <= sets[NEW].items(), "whole, or not there"
    complete_and_clean(root, shards, sets[NEW], existing="update")


def killed_during_overwrite(prepared, shards, seed):
    root, sets = prepared
    assert packed_here(root, shard_size=OLD, output_dir=str(shards)).success

    kill_the_writer(root, shards, "replace", seed)

    assert_old_or_new(shards, sets)
    complete_and_clean(root, shards, sets[NEW], existing="replace")


def assert_old_or_new(shards, sets):
    found = sets_in(shards)
    assert found.keys() == sets[OLD].keys()
    for name, files in found.items():
        assert files in (sets[OLD][name], sets[NEW][name]), f"{name} is neither the old set nor the new one"


def complete_and_clean(root, shards, expected, *, existing):
    """Run again until completion."""
    assert packed_here(root, existing=existing, shard_size=NEW, output_dir=str(shards)).success
    assert sets_in(shards) == expected
    assert bucket_folders(shards) == sorted(expected), "no folder of another name, no temporary"
    assert temporaries(shards) == []


@pytest.mark.parametrize("seed", [0, 1])
def test_killed_write_is_completed_by_the_next_one(prepared, tmp_path, seed):
    killed_during_write(prepared, tmp_path / "shards", seed)


@pytest.mark.parametrize("seed", [0, 1])
def test_killed_overwrite_leaves_the_old_set_or_the_new_one(prepared, tmp_path, seed):
    killed_during_overwrite(prepared, tmp_path / "shards", seed)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(100, 120))
def test_killed_write_is_completed_by_the_next_one_twenty_times(prepared, tmp_path, seed):
    """The full count."""
    killed_during_write(prepared, tmp_path / "shards", seed)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(100, 120))
def test_killed_overwrite_leaves_the_old_set_or_the_new_one_twenty_times(prepared, tmp_path, seed):
    """The full count."""
    killed_during_overwrite(prepared, tmp_path / "shards", seed)


def test_killed_command_is_completed_by_the_same_command(prepared, tmp_path):
    """`imagemill shards --overwrite` itself is killed while it writes, then run again."""
    root, sets = prepared
    shards = tmp_path / "shards"
    assert packed_here(root, shard_size=OLD, output_dir=str(shards)).success
    command = ["shards", "--overwrite", "--shard-size", NEW, "--output-dir", shards, "--data-root", root.path]

    process = start(*command)
    while process.poll() is None and not temporaries(shards):
        time.sleep(0.001)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()

    assert process.returncode == -signal.SIGKILL
    assert_old_or_new(shards, sets)
    done = imagemill(*command)
    assert done.returncode == 0, done.stdout + done.stderr
    assert sets_in(shards) == sets[NEW]
    assert temporaries(shards) == []
