"""Shards killed at random moments: a reader sees the complete old or new set, and the next run completes the work.

Spec: docs/spec/conventions.md#atomic-names, docs/spec/shards.md#replacement
"""

import json
import os
import random
import shutil
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
from imagemill.store.ledger import Ledger
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
    request = PackRequest({buckets!r}, shards, {existing!r}, {{"shard_size": {size}}})
    shard_set = plan_packing(Inventory(root), Config(), Ledger(root.ledger), request)[1]
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


def root_of_two_buckets(folder):
    """Make records, and files in the ledger."""
    root = DataRoot(folder / "data")
    sizes = {"square": (24, 24), "tall": (24, 36)}
    foreign(root, *(record_of(f"{name}{n:04d}", size=size) for name, size in sizes.items() for n in range(SAMPLES)))
    return root


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """A data root, and the output of undisturbed runs by samples per tar."""
    root = root_of_two_buckets(tmp_path_factory.mktemp("prepared"))
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


def kill_the_writer(root, shards, existing, seed, samples=2 * SAMPLES):
    """Kill half of the runs near a random sample, the others near the end of a bucket: flush, index, exchange."""
    choose = random.Random(seed)
    moment = choose.choice([choose.randint(1, samples), samples // 2, samples])
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


@pytest.fixture(scope="module")
def updated(tmp_path_factory):
    """A folder of sets without every ninth sample; and its sets before and after an undisturbed update by these samples."""
    root = root_of_two_buckets(tmp_path_factory.mktemp("updated_root"))
    left_out = [line["image_id"] for n, line in enumerate(map(json.loads, root.stage2_jsonl.open())) if n % 9 == 4]
    with Ledger(root.ledger) as ledger:
        ledger.withdraw(left_out[::2])
    shards = tmp_path_factory.mktemp("updated") / "shards"
    assert packed_here(root, shard_size=NEW, output_dir=str(shards)).success
    before = sets_in(shards)
    with Ledger(root.ledger) as ledger:
        ledger.restore(left_out[::2])
        ledger.withdraw(left_out[1::2])
    after = shards.with_name("after")
    shutil.copytree(shards, after, copy_function=os.link)
    assert packed_here(root, existing="update", output_dir=str(after)).success
    return root, shards, before, sets_in(after)


def killed_during_update(updated, shards, seed):
    """Tars that are kept, written again and new; the update of each bucket is one step."""
    root, old, before, after = updated
    shutil.copytree(old, shards, copy_function=os.link)

    kill_the_writer(root, shards, "update", seed, samples=samples_written(before, after))

    assert_one_of(shards, before, after)
    complete_and_clean(root, shards, after, existing="update")
    assert packed_here(root, existing="repack", shard_size=NEW, output_dir=str(shards)).success
    scratch = shards.with_name("scratch")
    assert packed_here(root, shard_size=NEW, output_dir=str(scratch)).success
    assert sets_in(shards) == sets_in(scratch)


def samples_written(before, after):
    """Return the number of samples in the tars that the update writes."""
    count = 0
    for name, files in after.items():
        kept = {shard["checksum"] for shard in json.loads(before[name]["manifest.json"])["shards"]}
        shards = json.loads(files["manifest.json"])["shards"]
        count += sum(shard["samples"] for shard in shards if shard["checksum"] not in kept)
    return count


def assert_old_or_new(shards, sets):
    assert_one_of(shards, sets[OLD], sets[NEW])


def assert_one_of(shards, before, after):
    found = sets_in(shards)
    assert found.keys() == before.keys()
    for name, files in found.items():
        assert files in (before[name], after[name]), f"{name} is neither the old set nor the new one"


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


@pytest.mark.parametrize("seed", [0, 1])
def test_killed_update_leaves_the_old_set_or_the_new_one(updated, tmp_path, seed):
    killed_during_update(updated, tmp_path / "shards", seed)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(100, 200))
def test_killed_update_leaves_the_old_set_or_the_new_one_a_hundred_times(updated, tmp_path, seed):
    """The full count."""
    killed_during_update(updated, tmp_path / "shards", seed)


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
