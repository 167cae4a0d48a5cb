"""Batched flushing, and separate flushing if batching is not safe or would burden other programs."""

import errno
import os

import pytest

from imagemill.fs import durable
from imagemill.fs.durable import OTHERS_BYTES, TOGETHER_FROM, begin_writing_back, flush_files


@pytest.fixture
def files(tmp_path):
    paths = [tmp_path / f"file{number:02d}" for number in range(TOGETHER_FROM)]
    for path in paths:
        path.write_bytes(b"bytes")
    return paths


@pytest.fixture
def flushed(monkeypatch):
    """Record what was flushed: the inode of a file, or a folder for its whole file system."""
    done = []
    monkeypatch.setattr(durable, "flush", lambda handle: done.append(os.fstat(handle).st_ino))
    monkeypatch.setattr(durable, "_sync_file_system", lambda folder: done.append(folder) or True)
    return done


@pytest.fixture
def quiet_disk(monkeypatch):
    """A local disk without unwritten data of other programs."""
    durable._is_in_memory.cache_clear()
    monkeypatch.setattr(durable, "file_system_type", lambda folder: "ext4")
    monkeypatch.setattr(durable.os, "major", lambda device: 8)
    monkeypatch.setattr(durable, "_reports_errors", lambda: True)
    monkeypatch.setattr(durable, "_waiting_bytes", lambda: 0)


def inodes(files):
    return {path.stat().st_ino for path in files}


def test_many_files_of_a_quiet_disk_are_flushed_together(files, flushed, quiet_disk, tmp_path):
    assert flush_files(files) == {}
    assert flushed == [tmp_path]


def test_files_of_a_quiet_disk_are_not_looked_up_one_by_one(files, flushed, quiet_disk, monkeypatch, tmp_path):
    """Their sizes matter only where more waits to be written than may be flushed along."""
    looked_up, stat = [], os.stat
    monkeypatch.setattr(durable.os, "stat", lambda path, **how: looked_up.append(path) or stat(path, **how))

    assert flush_files(files) == {}
    assert [path for path in looked_up if path in files] == files[:1]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("_waiting_bytes", lambda: OTHERS_BYTES + TOGETHER_FROM * len(b"bytes") + 1),
        ("_reports_errors", lambda: False),
        ("_sync_file_system", lambda folder: False),
        ("os.major", lambda device: 0),
    ],
)
def test_each_file_is_flushed_where_together_is_not_sure_or_not_fair(
    files, flushed, quiet_disk, monkeypatch, name, value
):
    """Cases: another program's gigabytes, an old kernel, an error, a network file system."""
    monkeypatch.setattr(f"imagemill.fs.durable.{name}", value)

    assert flush_files(files) == {}
    assert set(flushed) == inodes(files)


def test_files_in_memory_are_flushed_together_whatever_waits_for_disks(
    files, flushed, quiet_disk, monkeypatch, tmp_path
):
    monkeypatch.setattr(durable, "file_system_type", lambda folder: "tmpfs")
    monkeypatch.setattr(durable.os, "major", lambda device: 0)
    monkeypatch.setattr(durable, "_waiting_bytes", lambda: 1 << 40)

    assert flush_files(files) == {}
    assert flushed == [tmp_path]


def test_few_files_are_flushed_one_by_one(files, flushed, quiet_disk):
    few = files[: TOGETHER_FROM - 1]

    assert flush_files(few) == {}
    assert set(flushed) == inodes(few)


def test_nothing_to_flush_is_nothing_to_do(flushed):
    assert flush_files([]) == {}
    assert flushed == []


def test_file_that_cannot_be_flushed_comes_back_with_its_error_and_the_others_are_flushed(
    files, quiet_disk, monkeypatch
):
    bad = files[3].stat().st_ino
    flushed = []

    def flush(handle):
        if os.fstat(handle).st_ino == bad:
            raise OSError(errno.ENOSPC, "No space left on device")
        flushed.append(os.fstat(handle).st_ino)

    monkeypatch.setattr(durable, "_sync_file_system", lambda folder: False)
    monkeypatch.setattr(durable, "flush", flush)
    files[5].unlink()

    errors = flush_files(files)

    assert {path: error.errno for path, error in errors.items()} == {files[3]: errno.ENOSPC, files[5]: errno.ENOENT}
    assert set(flushed) == inodes(path for path in files if path not in errors)


def test_this_machine_flushes_for_real(files):
    """Runs the real system calls of this machine."""
    for path in files:
        with open(path, "r+b") as file:
            begin_writing_back(file.fileno())

    assert flush_files(files) == {}
    assert durable._sync_file_system(files[0].parent) or not durable._reports_errors()
