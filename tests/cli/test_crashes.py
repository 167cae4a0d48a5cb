"""Runs killed at random moments and repeated: the result equals that of an undisturbed run."""

import os
import random
import signal
import time

import pytest

from imagemill.domain.embedding_specs import embedding_specs
from imagemill.domain.layout import DataRoot
from imagemill.formats.npy import NpyStore
from imagemill.fs.atomic import temporaries
from imagemill.store.ledger import Ledger
from imagemill.validation.validator import validate
from tests.helpers.product import contents, imagemill, photos, start

IMAGES = 60
EMBEDDINGS = len(embedding_specs()) * IMAGES
SLEEP = 0.02


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Output of an uninterrupted run on the same photographs."""
    root = DataRoot(tmp_path_factory.mktemp("undisturbed") / "data")
    photos(root.approved, IMAGES)
    done = imagemill("run", "--data-root", root.path, stub=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return contents(root)


def whole_files_only(root):
    """Check that every file under a final name is complete: npy, records, and sets of shards."""
    for spec in embedding_specs():
        store = NpyStore(root.derived / spec.folder, spec)
        for image_id in store.listing():
            store.check(image_id, 32, 48)
    reports = [validate(path) for path in (root.stage2_jsonl, *root.shards.glob("bucket_*")) if path.exists()]
    assert [report for report in reports if not report.passed] == []


def wait_for_files(root, count, process):
    """Wait until that many npy files have their final names, or the process has ended."""
    while process.poll() is None:
        if sum(1 for _ in root.derived.glob("*/*.npy")) >= count:
            return
        time.sleep(0.01)


def kill_and_rerun(root, undisturbed, seed):
    photos(root.approved, IMAGES)
    moment = random.Random(seed)
    process = start("run", "--data-root", root.path, IMAGEMILL_STUB_SLEEP=SLEEP)
    # A fifth of the kills hit a run that has all embeddings and writes records and shards.
    files = moment.randrange(EMBEDDINGS * 5 // 4)
    wait_for_files(root, min(files, EMBEDDINGS), process)
    time.sleep(moment.uniform(0, 0.3 if files < EMBEDDINGS else 3))
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    whole_files_only(root)

    done = imagemill("run", "--data-root", root.path, stub=True)

    assert done.returncode == 0, done.stdout + done.stderr
    assert contents(root) == undisturbed
    with Ledger(root.ledger) as ledger:
        model_keys = {row.model_key for spec in embedding_specs() for row in ledger.files(spec.kind).values()}
    assert "unknown" not in model_keys, "a killed run leaves no file whose model is not known"
    assert not [path for spec in embedding_specs() for path in temporaries(root.derived / spec.folder)]


@pytest.mark.parametrize("seed", [0, 5])
def test_killed_run_is_completed_by_the_next_one(data_root, undisturbed, seed):
    """kill -9 at a random moment. Spec: docs/spec/conventions.md#atomic-names"""
    kill_and_rerun(data_root, undisturbed, seed)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(100, 120))
def test_killed_run_is_completed_by_the_next_one_twenty_times(data_root, undisturbed, seed):
    """The full count: 60 images, the entire process group, moments by seed from start to end."""
    kill_and_rerun(data_root, undisturbed, seed)


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.soak)]
)
def test_signal_stops_in_seconds_keeps_the_work_and_names_the_command_to_resume(data_root, undisturbed, number, code):
    """Spec: docs/spec/conventions.md#exit-codes"""
    photos(data_root.approved, IMAGES)
    process = start("run", "--data-root", data_root.path, IMAGEMILL_STUB_SLEEP=0.1)
    wait_for_files(data_root, 1, process)
    began = time.monotonic()
    process.send_signal(number)
    output, _ = process.communicate(timeout=60)

    assert process.returncode == code, output
    assert time.monotonic() - began < 15
    assert "Traceback" not in output
    assert "to resume" in output
    assert 0 < sum(1 for _ in data_root.derived.glob("*/*.npy")) < 3 * IMAGES
    assert not list(data_root.derived.glob("*.tmp"))

    done = imagemill("run", "--data-root", data_root.path, stub=True)
    assert done.returncode == 0
    assert contents(data_root) == undisturbed


def test_run_of_a_dead_process_is_reported_by_the_next_command(data_root):
    """Spec: docs/spec/conventions.md#leases"""
    import dagster as dg

    from dagster_project.internals.instance import open_instance

    photos(data_root.approved, 8)
    process = start("run", "--data-root", data_root.path, IMAGEMILL_STUB_SLEEP=5)
    with open_instance(data_root) as instance:
        for _ in range(900):
            time.sleep(0.1)
            if instance.get_runs(dg.RunsFilter(statuses=[dg.DagsterRunStatus.STARTED])):
                break
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        done = imagemill("run", "--data-root", data_root.path, stub=True)
        assert done.returncode == 0, done.stdout + done.stderr
        assert not instance.get_runs(dg.RunsFilter(statuses=[dg.DagsterRunStatus.STARTED]))
        failed = instance.get_runs(dg.RunsFilter(statuses=[dg.DagsterRunStatus.FAILURE]))
        assert len(failed) == 1
        messages = [entry.message for entry in instance.all_logs(failed[0].run_id)]
    assert any("killed; run again to resume" in message for message in messages)


def test_two_simultaneous_runs_give_the_result_of_one(data_root, undisturbed):
    """Nothing is damaged or lost if two commands run at once. Spec: docs/spec/conventions.md#leases"""
    photos(data_root.approved, IMAGES)
    both = [start("run", "--data-root", data_root.path) for _ in range(2)]
    outputs = [process.communicate(timeout=300)[0] for process in both]

    assert [process.returncode for process in both] == [0, 0], outputs
    assert contents(data_root) == undisturbed
