"""The training example reads what the product writes, by the reader that a training script imports."""

import re
import subprocess
import sys
from collections import Counter

import pytest

from imagemill.domain.layout import DataRoot
from tests.helpers.product import PROJECT, imagemill, photos
from tests.helpers.shard_sets import FACTORS, change_manifest

EXAMPLE = PROJECT / "examples" / "train_from_shards.py"


def train(*arguments):
    return subprocess.run(
        [sys.executable, str(EXAMPLE), *map(str, arguments)], capture_output=True, text=True, check=False
    )


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    """Shards of two buckets, of one with photographs of two sizes."""
    root = DataRoot(tmp_path_factory.mktemp("train") / "data")
    photos(root.approved, 3, size=(64, 64))
    for name, size in (("wide", (128, 72)), ("large", (96, 104))):
        photos(root.path / name, 3, size=size)
        for path in (root.path / name).iterdir():
            path.rename(root.approved / f"{name}-{path.name}")
    done = imagemill("run", "--data-root", root.path, stub=True)
    assert done.returncode == 0, done.stdout + done.stderr
    for bucket in root.shards.glob("bucket_*"):
        # The stub encoder has no factors; real and preview ones record theirs.
        change_manifest(bucket, provenance={"vae_latents": {"facts": FACTORS, "preview": True}})
    return root.shards


LINE = r"step (\d+)  bucket_(\S+)  latents \((.+?)\)  loss (\S+)"


def steps_of(done):
    assert done.returncode == 0, done.stderr
    return re.findall(LINE, done.stdout)


def test_example_trains_on_batches_of_one_bucket_cut_to_its_size(shards):
    steps = steps_of(train(shards, "--steps", 6, "--batch-size", 3))

    assert [n for n, *_ in steps] == ["1", "2", "3", "4", "5", "6"]
    # Six square photographs, three wide ones: two epochs of two batches and one.
    assert Counter((bucket, shape) for _, bucket, shape, _ in steps) == {
        ("1024x1024", "3, 16, 128, 128"): 4, ("1280x768", "3, 16, 96, 160"): 2,
    }  # fmt: skip
    assert all(float(loss) >= 0 for *_, loss in steps)


def test_example_takes_one_bucket_folder_and_worker_processes(shards):
    steps = steps_of(train(shards / "bucket_1024x1024", "--steps", 3, "--batch-size", 2, "--workers", 2))

    assert [bucket for _, bucket, *_ in steps] == ["1024x1024"] * 3


def test_example_goes_on_where_the_last_call_stopped(shards, tmp_path):
    def buckets(*arguments):
        return [bucket for _, bucket, *_ in steps_of(train(shards, "--batch-size", 1, *arguments))]

    state = tmp_path / "position.json"
    together = buckets("--steps", 11)

    assert buckets("--steps", 4, "--state", state) + buckets("--steps", 7, "--state", state) == together


def test_example_says_what_to_do_where_there_are_no_shards(tmp_path):
    done = train(tmp_path, "--steps", 1)

    assert done.returncode == 1
    assert re.match(r"no shards in .*\n  do: +imagemill run", done.stderr)
