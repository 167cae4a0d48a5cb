"""A disk that fills up during work: a clear error, complete files, and a next run that finishes once there is space.

Spec: docs/spec/conventions.md#atomic-names, docs/spec/conventions.md#refused-and-failed
"""

import contextlib
import os
import subprocess
import time

import pytest

from imagemill.domain.embedding_specs import embedding_specs
from imagemill.domain.layout import DataRoot
from imagemill.formats.npy import NpyStore
from imagemill.pipeline.shards.shard_sets import read_manifest
from imagemill.store.ledger import Ledger
from tests.helpers.product import contents, imagemill, photos, snapshot, start

IMAGES = 40
MEGABYTE = 1 << 20


class SmallDisk:
    """A tmpfs of this many bytes, with ballast that leaves the free space that a test needs."""

    def __init__(self, path, size):
        self.path = path
        path.mkdir()
        mounted = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={size}", "small", path], capture_output=True, text=True, check=False
        )
        if mounted.returncode:
            pytest.skip(
                f"mounting a tmpfs needs root: unshare -rm .venv/bin/pytest {__file__} ({mounted.stderr.strip()})"
            )

    def free(self):
        disk = os.statvfs(self.path)
        return disk.f_bavail * disk.f_frsize

    def fill(self, *, leave):
        ballast = os.open(self.path / "ballast", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        # Written in pieces, because another process writes at the same time.
        with contextlib.suppress(OSError):
            while (more := self.free() - leave) > 0:
                os.write(ballast, bytes(min(more, 64 << 10)))
        os.close(ballast)

    def empty(self):
        (self.path / "ballast").unlink()

    def close(self):
        subprocess.run(["umount", "--lazy", self.path], check=True)


@pytest.fixture
def disk(tmp_path):
    small = SmallDisk(tmp_path / "small", 32 * MEGABYTE)
    yield small
    small.close()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Output of a run with enough space on the same photographs."""
    root = DataRoot(tmp_path_factory.mktemp("undisturbed") / "data")
    photos(root.approved, IMAGES)
    done = imagemill("run", "--data-root", root.path, stub=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return contents(root)


def run_until(root, count, *arguments):
    """Start a command, and return once this many npy files have their final names."""
    process = start(*arguments, "--data-root", root.path, IMAGEMILL_STUB_SLEEP=0.1)
    while process.poll() is None and sum(1 for _ in root.derived.glob("*/*.npy")) < count:
        time.sleep(0.01)
    assert process.poll() is None, process.communicate()[0]
    return process


def output_of(process):
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 1, output
    assert "Traceback" not in output
    return output


def assert_told(output):
    """Check that the message has a cause and a remedy. The forecast stops a pass that starts on a full disk."""
    assert any(words in output for words in ("No space left on device", "disk is full", "this job needs about"))
    assert "free space" in output


def assert_whole(root):
    """Check every file under a final name, and that the ledger opens and has no row of a missing file."""
    for spec in embedding_specs():
        store = NpyStore(root.derived / spec.folder, spec)
        for image_id in store.listing():
            store.check(image_id, 32, 48)
    with Ledger(root.ledger) as ledger:
        ledger.problems()


def assert_rerun_completes(root, undisturbed):
    done = imagemill("run", "--data-root", root.path, stub=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert contents(root) == undisturbed
    assert not list(root.derived.glob("*/.tmp-*")) + list(root.derived.glob("*.tmp")) + list(root.shards.glob(".tmp-*"))
    assert imagemill("verify", "--data-root", root.path).returncode == 0


def on(disk, root, name):
    """Put one folder of a data root on the small disk."""
    (disk.path / name).mkdir()
    root.path.mkdir(parents=True, exist_ok=True)
    (root.path / name).symlink_to(disk.path / name)


def test_job_too_large_for_the_disk_is_stopped_before_it_starts(disk, data_root):
    """Spec: docs/spec/stage2.md#disk-forecast"""
    on(disk, data_root, "derived")
    photos(data_root.approved, IMAGES)
    disk.fill(leave=MEGABYTE)

    done = imagemill("run", "--data-root", data_root.path, stub=True)

    assert done.returncode == 1
    assert "this job needs about" in done.stdout + done.stderr
    assert "--limit" in done.stdout + done.stderr
    assert not list(data_root.derived.rglob("*.npy"))


def test_output_disk_that_fills_up_stops_the_pass_without_truncated_files(disk, data_root, undisturbed):
    """Files with final names are kept, and the model is not called for the remaining images."""
    on(disk, data_root, "derived")
    photos(data_root.approved, 8)
    imagemill("run", "--data-root", data_root.path, stub=True)
    records = data_root.stage2_jsonl.read_bytes()
    before = snapshot(data_root.derived, data_root.shards)
    photos(data_root.approved, IMAGES)
    process = run_until(data_root, 3 * 8 + 4, "run")
    disk.fill(leave=64 << 10)

    output = output_of(process)

    assert_told(output)
    assert str(data_root.derived) in output
    assert_whole(data_root)
    assert data_root.stage2_jsonl.read_bytes().startswith(records)
    with Ledger(data_root.ledger) as ledger:
        failed = [problem for problem in ledger.problems() if problem.reason == "write_error"]
    assert len(failed) < IMAGES - 8, "the pass stopped"
    kept = snapshot(data_root.derived, data_root.shards)
    assert all(kept[name] == before[name] for name in before if name.endswith((".npy", ".tar")))
    disk.empty()
    assert_rerun_completes(data_root, undisturbed)


@pytest.mark.parametrize("leave", [0, pytest.param(100_000, marks=pytest.mark.soak), MEGABYTE])
def test_full_disk_under_the_data_root_is_reported_and_the_next_run_recovers(disk, undisturbed, leave):
    """Ledger and Dagster history have no space either."""
    root = DataRoot(disk.path / "data")
    photos(root.approved, IMAGES)
    process = run_until(root, 4, "run")
    disk.fill(leave=leave)

    output = output_of(process)

    assert_told(output)
    disk.empty()  # Reading the ledger requires space for SQLite's own files.
    assert_whole(root)
    assert_rerun_completes(root, undisturbed)


@pytest.mark.parametrize("command", [["run"], ["stage2"], ["shards", "--overwrite"]])
def test_command_that_starts_on_a_full_disk_changes_nothing(disk, command):
    root = DataRoot(disk.path / "data")
    photos(root.approved, 8)
    imagemill("run", "--data-root", root.path, stub=True)
    before = snapshot(root.derived, root.shards)
    photos(root.approved, 10)
    disk.fill(leave=0)

    done = imagemill(*command, "--data-root", root.path, stub=True)

    assert done.returncode == 1
    assert_told(done.stdout + done.stderr)
    assert "Traceback" not in done.stderr
    assert snapshot(root.derived, root.shards) == before


def test_status_on_a_full_disk_succeeds_or_reports_the_cause(disk):
    """SQLite needs space beside the ledger if the index of its write-ahead log does not exist yet."""
    root = DataRoot(disk.path / "data")
    photos(root.approved, 8)
    imagemill("run", "--data-root", root.path, stub=True)
    disk.fill(leave=0)

    done = imagemill("status", "--data-root", root.path, stub=True)

    assert "Traceback" not in done.stderr
    if done.returncode:
        assert_told(done.stdout + done.stderr)
    else:
        assert "8 images seen" in done.stdout


def test_packing_on_a_full_disk_keeps_the_old_set_complete(disk, data_root):
    """Spec: docs/spec/shards.md#replacement"""
    on(disk, data_root, "shards")
    photos(data_root.approved, IMAGES)
    imagemill("run", "--data-root", data_root.path, stub=True)
    before = snapshot(data_root.shards)
    disk.fill(leave=2 * MEGABYTE)

    done = imagemill("shards", "--overwrite", "--shard-size", 7, "--data-root", data_root.path, stub=True)

    assert done.returncode == 1
    assert_told(done.stderr)
    assert "bucket_1216x832" in done.stderr
    assert "Traceback" not in done.stderr
    assert snapshot(data_root.shards) == before, "nothing new is left either"
    assert imagemill("verify", "--data-root", data_root.path).returncode == 0
    disk.empty()
    again = imagemill("shards", "--overwrite", "--shard-size", 7, "--data-root", data_root.path, stub=True)
    assert again.returncode == 0, again.stderr
    assert len(read_manifest(data_root.shards / "bucket_1216x832").shards) == 6
