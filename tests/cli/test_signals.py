"""SIGINT and SIGTERM during work: stopped in seconds, finished work recorded, resumed by the same command.

tests/cli/test_crashes.py kills and stops `imagemill run`; this module tests the state after a stop, and a second signal.
Spec: docs/spec/conventions.md#exit-codes, docs/spec/stage2.md#merge
"""

import signal
import time

import pytest

from imagemill.domain.buckets import BUCKETS
from imagemill.domain.embedding_specs import embedding_specs
from imagemill.domain.layout import DataRoot
from imagemill.formats.jsonl import read_jsonl
from imagemill.formats.npy import NpyStore
from imagemill.fs.atomic import temporaries
from imagemill.store.ledger import Ledger
from tests.helpers.product import contents, imagemill, photos, start

IMAGES = 40
# Generous, because the machine may be busy. If the signal were ignored, the work would take ten times as long.
SECONDS = 20


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    root = DataRoot(tmp_path_factory.mktemp("undisturbed") / "data")
    photos(root.approved, IMAGES)
    done = imagemill("stage2", "--data-root", root.path, stub=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return contents(root)


def made(root):
    """Return the files under final names, as kind and image id."""
    return {(path.parent.name, path.stem) for path in root.derived.glob("*/*.npy")}


def begin(root, *arguments):
    """Start a command, and wait until it has published its first files. The remaining files would take minutes."""
    photos(root.approved, IMAGES)
    process = start(*arguments, "--data-root", root.path, IMAGEMILL_STUB_SLEEP=4)
    while process.poll() is None and not made(root):
        time.sleep(0.01)
    assert process.poll() is None, process.communicate()[0]
    return process


def stop(process, *numbers, pause=0.3):
    began = time.monotonic()
    for number in numbers:
        process.send_signal(number)
        time.sleep(pause)
    output, _ = process.communicate(timeout=120)
    assert time.monotonic() - began < SECONDS
    assert "Traceback" not in output, output
    return output


def assert_resumed(root, undisturbed):
    done = imagemill("stage2", "--data-root", root.path, stub=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert contents(root) == undisturbed


def assert_whole(root):
    for spec in embedding_specs():
        store = NpyStore(root.derived / spec.folder, spec)
        for image_id in store.listing():
            store.check(image_id, 32, 48)


def leftovers(root):
    return [
        path for folder in (root.derived, *root.derived.iterdir()) if folder.is_dir() for path in temporaries(folder)
    ]


@pytest.mark.parametrize(
    ("number", "code"), [pytest.param(signal.SIGINT, 130, marks=pytest.mark.soak), (signal.SIGTERM, 143)]
)
def test_stopped_pass_leaves_only_its_files_and_their_records(data_root, undisturbed, number, code):
    """Images finished but not yet published at the signal are included. A running model call is not completed."""
    process = begin(data_root, "stage2", "--pass", "t5")
    before = made(data_root)

    output = stop(process, number)

    assert process.returncode == code, output
    assert signal.Signals(number).name in output
    assert "run the same command to resume" in output
    assert_whole(data_root)
    assert before <= made(data_root)
    assert not leftovers(data_root)
    assert not list(data_root.derived.glob("*.tmp"))
    recorded = {line.value["image_id"] for line in read_jsonl(data_root.stage2_jsonl)}
    assert recorded == {image_id for _, image_id in made(data_root)}
    assert len(recorded) < IMAGES
    assert_resumed(data_root, undisturbed)


@pytest.mark.parametrize("second", [pytest.param(signal.SIGINT, marks=pytest.mark.soak), signal.SIGTERM])
def test_second_signal_while_stopping_loses_nothing(data_root, undisturbed, second):
    """Users press Ctrl-C again, and supervisors send SIGTERM afterwards."""
    process = begin(data_root, "run")
    before = made(data_root)

    output = stop(process, signal.SIGINT, second, second)

    assert process.returncode in {130, 143, -second}, output
    assert before <= made(data_root)
    assert_whole(data_root)
    assert_resumed(data_root, undisturbed)


def test_signal_before_the_first_file_leaves_a_usable_root(data_root, undisturbed):
    """The signal arrives during start-up, listing or loading."""
    photos(data_root.approved, IMAGES)
    process = start("stage2", "--data-root", data_root.path, IMAGEMILL_STUB_SLEEP=4)
    while process.poll() is None and not data_root.ledger.exists():
        time.sleep(0.01)

    output = stop(process, signal.SIGINT)

    assert process.returncode == 130, output
    assert_resumed(data_root, undisturbed)


@pytest.mark.parametrize(
    ("number", "code"), [pytest.param(signal.SIGINT, 130, marks=pytest.mark.soak), (signal.SIGTERM, 143)]
)
def test_stopped_packing_is_reported(data_root, number, code):
    """A run that was stopped without an error has no counters to print."""
    photos(data_root.approved, 1)
    assert imagemill("stage2", "--data-root", data_root.path, stub=True).returncode == 0
    with Ledger(data_root.ledger) as ledger:
        assert not ledger.claim("bucket_shards", BUCKETS, "another run")  # the command waits for this claim
    process = start("shards", "--data-root", data_root.path)
    assert "waiting for run another run" in next(line for line in process.stdout if "waiting" in line)

    output = stop(process, number)

    assert process.returncode == code, output
    assert f"stopped by {signal.Signals(number).name}" in output
