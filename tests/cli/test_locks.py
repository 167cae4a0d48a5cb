"""Two real processes on one data root: equal partitions run one after the other, different ones at the same time.

Spec: docs/spec/conventions.md#leases
"""

import os
import re
import signal
import subprocess
import sys
import textwrap
import time

import dagster as dg
import pytest

from dagster_project.internals.instance import open_instance
from imagemill.domain.embedding_specs import embedding_specs
from imagemill.domain.layout import DataRoot
from imagemill.formats.npy import NpyStore
from tests.helpers.product import PROJECT, contents, imagemill, photos, start

IMAGES = 12
WIDE, TALL = "1216x832", "832x1216"
# One image per model call makes the number of calls equal that of images.
ONE_BY_ONE = "encoders: {" + ", ".join(f"{spec.kind}: {{batch_size: 1}}" for spec in embedding_specs()) + "}\n"


@pytest.fixture
def root(data_root):
    photos(data_root.approved, IMAGES)
    data_root.config_file.write_text(ONE_BY_ONE)
    return data_root


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    alone = DataRoot(tmp_path_factory.mktemp("undisturbed") / "data")
    photos(alone.approved, IMAGES)
    alone.config_file.write_text(ONE_BY_ONE)
    assert imagemill("run", "--data-root", alone.path, stub=True).returncode == 0
    return contents(alone)


def begin(root):
    """Start a run, wait for the middle of its first pass, and return it with its run id."""
    process = start("run", "--data-root", root.path, IMAGEMILL_STUB_SLEEP=0.6)
    while process.poll() is None and not list(root.derived.glob("*/*.npy")):
        time.sleep(0.01)
    assert process.poll() is None, process.communicate()[0]
    with open_instance(root) as instance:
        (run,) = instance.get_runs(dg.RunsFilter(statuses=[dg.DagsterRunStatus.STARTED]))
    return process, run.run_id


def made(output, kind):
    """Return (files made, model calls) from a summary."""
    return tuple(map(int, re.search(rf"{kind} +(\d+) made in (\d+) model calls?", output).groups()))


def waiting_for(process):
    """Return the run id that a waiting command prints."""
    lines = []
    for line in process.stdout:
        lines.append(line)
        if found := re.search(r"waiting for run (\S+) \(process", line):
            return found[1]
    raise AssertionError("".join(lines))


def test_second_run_waits_for_the_first_and_every_image_is_processed_once(root, undisturbed):
    """It prints the run id of the first; both exit with 0."""
    first, run_id = begin(root)
    second = start("run", "--data-root", root.path)

    assert waiting_for(second) == run_id
    outputs = [process.communicate(timeout=120)[0] for process in (first, second)]

    assert [first.returncode, second.returncode] == [0, 0], outputs
    for spec in embedding_specs():
        assert [sum(both) for both in zip(*(made(output, spec.kind) for output in outputs), strict=True)] == [
            IMAGES
        ] * 2
    assert contents(root) == undisturbed


def test_waiting_run_continues_after_the_other_is_killed(root, undisturbed):
    """The claim of a dead process is ignored, and its finished work is kept."""
    first, run_id = begin(root)
    second = start("run", "--data-root", root.path)
    assert waiting_for(second) == run_id

    os.killpg(first.pid, signal.SIGKILL)
    first.communicate()
    kept = {spec.kind: len(NpyStore(root.derived / spec.folder, spec).listing()) for spec in embedding_specs()}
    output, _ = second.communicate(timeout=120)

    assert second.returncode == 0, output
    assert kept["dinov3_npy"] > 0
    assert {spec.kind: made(output, spec.kind)[0] + kept[spec.kind] for spec in embedding_specs()} == dict.fromkeys(
        kept, IMAGES
    )
    assert contents(root) == undisturbed


# ---- buckets


@pytest.fixture(scope="module")
def two_buckets(tmp_path_factory):
    """Records of wide and of tall photographs, not packed yet."""
    packed = DataRoot(tmp_path_factory.mktemp("buckets") / "data")
    photos(packed.approved, 4)
    photos(packed.path / "tall", 8, size=(32, 48))
    for n in range(4, 8):
        for suffix in (".jpg", ".txt"):
            (packed.path / "tall" / f"photo{n:04d}{suffix}").rename(packed.approved / f"photo{n:04d}{suffix}")
    assert imagemill("stage2", "--data-root", packed.path, stub=True).returncode == 0
    return packed


@pytest.fixture
def holder(two_buckets):
    """A live process that holds a claim on the wide bucket."""
    script = f"""
        import time
        from pathlib import Path
        from imagemill.store.ledger import Ledger
        ledger = Ledger(Path({str(two_buckets.ledger)!r}))
        assert not ledger.claim("bucket_shards", [{WIDE!r}], "run-of-other")
        print("claimed", flush=True)
        time.sleep(600)
    """
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.PIPE, text=True, cwd=PROJECT
    )
    assert process.stdout.readline() == "claimed\n"
    yield process
    process.kill()
    process.communicate()


def shards(root, *buckets, output):
    chosen = [argument for bucket in buckets for argument in ("--bucket", bucket)]
    return start("shards", *chosen, "--output-dir", output, "--data-root", root.path)


def sets_in(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_two_buckets_are_packed_side_by_side(two_buckets, tmp_path):
    """The result equals that of one run over both."""
    both = [shards(two_buckets, bucket, output=tmp_path / "apart") for bucket in (WIDE, TALL)]
    outputs = [process.communicate(timeout=120)[0] for process in both]
    together = shards(two_buckets, WIDE, TALL, output=tmp_path / "together")
    said = together.communicate(timeout=120)[0]

    assert [process.returncode for process in (*both, together)] == [0, 0, 0], [*outputs, said]
    assert not any("waiting" in output for output in outputs)
    assert sets_in(tmp_path / "apart") == sets_in(tmp_path / "together")
    folders = {name.split("/")[0] for name in sets_in(tmp_path / "apart") if "/" in name}
    assert folders == {f"bucket_{WIDE}", f"bucket_{TALL}"}


def test_command_waits_only_for_a_bucket_claimed_by_another_process(two_buckets, holder, tmp_path):
    other = shards(two_buckets, TALL, output=tmp_path)
    output, _ = other.communicate(timeout=120)
    assert other.returncode == 0, output
    assert "waiting" not in output

    same = shards(two_buckets, WIDE, output=tmp_path)
    assert waiting_for(same) == "run-of-other"
    assert same.poll() is None
    assert not (tmp_path / f"bucket_{WIDE}").exists()
    holder.kill()
    holder.wait()
    output, _ = same.communicate(timeout=120)

    assert same.returncode == 0, output
    assert (tmp_path / f"bucket_{WIDE}" / "shard-000000.tar").exists()
