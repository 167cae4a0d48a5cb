"""Shards in other folders, and unexpected files under the names of folders.

Spec: docs/spec/conventions.md#exit-codes, docs/spec/conventions.md#locations-outside-the-data-root
"""

import os
import shutil

import pytest

from tests.helpers.product import imagemill, snapshot
from tests.helpers.sessions import locate
from tests.helpers.stage2 import foreign, record_of

SQUARE, TALL = "bucket_1024x1024", "bucket_832x1216"


def product(root, *arguments, code=0):
    """Return the output of a command after checking its exit code and the absence of a traceback."""
    done = imagemill(*arguments, "--data-root", root.path, stub=True)
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    return done


@pytest.fixture
def root(data_root):
    """Two sets of one sample each, in the data root's default folder."""
    foreign(data_root, record_of("square", size=(24, 24)), record_of("tall", size=(24, 36)))
    product(data_root, "shards")
    return data_root


def test_file_as_output_folder_is_wrong_usage_and_never_remembered(root, tmp_path):
    (tmp_path / "file").touch()

    for more in ([], ["--dry-run"]):
        done = product(root, "shards", "--output-dir", tmp_path / "file", *more, code=2)
        assert f"{tmp_path / 'file'} is a file" in done.stderr
        assert "give another --output-dir" in done.stderr

    assert locate(root.path).shards == root.shards
    assert f"{SQUARE}: passed" in product(root, "verify").stdout


def test_every_command_reports_a_missing_remembered_folder(root, tmp_path):
    """Cases: a disk that is not mounted, and a file with the name of the folder."""
    disk = tmp_path / "disk"
    product(root, "shards", "--output-dir", disk)
    shutil.rmtree(disk)

    verified = product(root, "verify", code=1).stdout
    assert "the recorded folder does not exist" in verified
    assert "stage2, files read whole, 2 checked, 0 errors" in verified, "and the rest is verified"
    assert "restore it" in product(root, "withdraw", "square", code=1).stderr
    disk.touch()
    assert f"shards: the recorded folder {disk} does not exist" in product(root, "status").stdout
    assert "the recorded folder does not exist" in product(root, "verify", code=1).stdout

    product(root, "shards", "--output-dir", root.shards, "--overwrite")
    assert "2 checked" in product(root, "verify").stdout


def test_file_or_dangling_link_named_like_a_bucket_is_refused_before_any_work(root):
    """The sets of the other buckets do not change."""
    shutil.rmtree(root.shards / TALL)
    (root.shards / TALL).touch()
    before = snapshot(root.shards)
    for command in (["shards", "--overwrite"], ["shards", "--dry-run"], ["withdraw", "square"], ["verify"]):
        done = product(root, *command, code=1)
        assert f"{TALL} is not a folder" in done.stdout + done.stderr, command
    assert snapshot(root.shards) == before

    (root.shards / TALL).unlink()
    (root.shards / TALL).symlink_to("nothing")
    assert "a broken symlink" in product(root, "shards", "--overwrite", code=1).stderr
    assert (root.shards / TALL).is_symlink()


def test_set_of_a_linked_bucket_is_replaced_without_changing_the_link_target(root, tmp_path):
    (root.shards / SQUARE).rename(tmp_path / "elsewhere")
    (root.shards / SQUARE).symlink_to(tmp_path / "elsewhere")
    before = {path: path.stat() for path in (tmp_path / "elsewhere").iterdir()}
    assert "shard-000000.tar exists" in product(root, "shards", code=1).stderr

    product(root, "shards", "--overwrite")

    assert not (root.shards / SQUARE).is_symlink()
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "elsewhere").iterdir()} == {
        path: stat.st_mtime_ns for path, stat in before.items()
    }
    assert not [name for name in os.listdir(root.shards) if name.startswith(".tmp")]
    assert "2 checked" in product(root, "verify").stdout


def test_failed_check_is_named_with_its_findings_and_remedy(root):
    """The check reads every set, including those not written by this run. Spec: docs/spec/conventions.md#messages"""
    tar = root.shards / TALL / "shard-000000.tar"
    data = bytearray(tar.read_bytes())
    data[600] ^= 1
    tar.write_bytes(data)

    for command in (["shards", "--overwrite", "--bucket", "1024x1024"], ["withdraw", "square"]):
        done = product(root, *command, code=1)
        assert "check bucket_shards:shards_valid failed: checksum: 1" in done.stderr
        assert f"{TALL}/shard-000000.tar: checksum: bytes differ" in done.stderr
        assert "do: run imagemill shards --overwrite" in done.stderr
        assert "written_shards=" in done.stdout, "the work is done all the same"
