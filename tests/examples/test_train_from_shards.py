"""The training example reads what the product writes, by the library a training script has."""

import re
import subprocess
import sys

import pytest

from imagemill.layout import DataRoot
from tests.helpers.product import PROJECT, imagemill, photos

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
    return root.shards


def test_example_trains_on_batches_of_one_bucket_cropped_to_a_common_size(shards):
    done = train(shards, "--steps", 4, "--batch-size", 6)

    assert done.returncode == 0, done.stderr
    steps = re.findall(r"step (\d+)  bucket_(\S+)  latents \((.+?)\)  loss (\S+)", done.stdout)
    square, wide = "6, 16, 8, 8", "3, 16, 9, 16"
    assert [(n, bucket, shape) for n, bucket, shape, _ in steps] == [
        ("1", "1024x1024", square), ("2", "1280x768", wide), ("3", "1024x1024", square), ("4", "1280x768", wide),
    ]  # fmt: skip
    assert all(float(loss) >= 0 for *_, loss in steps)


def test_example_takes_one_bucket_folder(shards):
    done = train(shards / "bucket_1024x1024", "--steps", 3, "--batch-size", 2)

    assert done.returncode == 0, done.stderr
    assert re.findall(r"bucket_(\S+)", done.stdout) == ["1024x1024"] * 3


def test_example_says_what_to_do_where_there_are_no_shards(tmp_path):
    done = train(tmp_path, "--steps", 1)

    assert done.returncode == 1
    assert done.stderr == f"no shards in {tmp_path}; do: imagemill run --data-root …\n"
