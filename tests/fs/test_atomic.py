"""Final names are always whole files, and only temporary files of dead processes are swept."""

import errno
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from imagemill.fs.atomic import (
    atomic_write,
    is_orphan,
    owner_name,
    process_birth,
    sweep_own_temporaries,
    sweep_temporaries,
    temporaries,
    temporary_path,
    write_bytes_atomic,
    write_if_changed,
    write_new,
)

PROJECT = Path(__file__).parents[1]

# Half a new file under its temporary name, then a line to the parent, then nothing until it is killed.
HALF_WRITER = """
import sys, time
from pathlib import Path
from imagemill.fs.atomic import atomic_write
with atomic_write(Path(sys.argv[1])) as file:
    file.write(b"half of the new")
    file.flush()
    print("writing", flush=True)
    time.sleep(600)
"""


def start_half_writer(path: Path) -> subprocess.Popen:
    command = [sys.executable, "-c", HALF_WRITER, str(path)]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, cwd=PROJECT)
    assert child.stdout
    assert child.stdout.readline() == b"writing\n"
    return child


def test_file_gets_its_name_when_the_block_ends(tmp_path):
    """Before that no file has the final name; parent folders are created."""
    path = tmp_path / "new" / "file.json"
    with atomic_write(path) as file:
        file.write(b"all of it")
        assert not path.exists()
        assert len(temporaries(path.parent)) == 1
    assert path.read_bytes() == b"all of it"
    assert os.listdir(path.parent) == ["file.json"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, OSError])
def test_old_file_stands_when_the_block_fails(tmp_path, error):
    """Spec: docs/spec/conventions.md#atomic-names"""
    path = tmp_path / "file.json"
    path.write_bytes(b"old")
    with pytest.raises(error), atomic_write(path) as file:
        file.write(b"new, but")
        raise error
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file.json"]


def test_kill_leaves_the_old_file_and_an_orphan_that_the_next_run_sweeps(tmp_path):
    """kill -9 in the middle of a write; while the writer lives its temporary file is not touched.

    Spec: docs/spec/conventions.md#completion-and-identity
    """
    path = tmp_path / "file.json"
    path.write_bytes(b"old")
    child = start_half_writer(path)
    (half,) = temporaries(tmp_path)
    try:
        assert not is_orphan(half)
        assert sweep_temporaries(tmp_path) == 0
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait()
    assert half.read_bytes() == b"half of the new"
    assert path.read_bytes() == b"old"
    assert is_orphan(half)
    assert sweep_temporaries(tmp_path) == 1
    assert os.listdir(tmp_path) == ["file.json"]


@given(old=st.binary(max_size=4096), new=st.binary(max_size=4096))
@settings(max_examples=20, deadline=None)
def test_bytes_come_back_as_written(tmp_path_factory, old, new):
    path = tmp_path_factory.mktemp("atomic") / "file"
    write_bytes_atomic(path, old)
    write_bytes_atomic(path, new)
    assert path.read_bytes() == new


def test_reader_sees_the_old_or_the_new_file_while_it_is_replaced(tmp_path):
    """Neither a mixture nor a gap is ever visible. Spec: docs/spec/conventions.md#completion-and-identity"""
    path = tmp_path / "file"
    contents = [bytes([letter]) * 100_000 for letter in b"ab"]
    write_bytes_atomic(path, contents[0])
    writer = threading.Thread(target=lambda: [write_bytes_atomic(path, contents[turn % 2]) for turn in range(20)])
    writer.start()
    seen = []
    while writer.is_alive():
        seen.append(path.read_bytes())
    writer.join()
    assert set(seen) <= set(contents)


def test_temporary_names_are_fresh_and_ours(tmp_path):
    """They are in the folder of the final name, because a rename between file systems is not atomic."""
    names = [temporary_path(tmp_path) for _ in range(100)]
    assert len(set(names)) == 100
    assert {name.parent for name in names} == {tmp_path}
    assert all(owner_name() in name.name for name in names)
    assert not any(is_orphan(name) for name in names)


def test_temporary_name_fits_beside_a_final_name_of_255_bytes(tmp_path):
    """An image id may use the full length that a file system allows."""
    path = tmp_path / ("ä" * 125 + "x.npy")
    assert len(os.fsencode(path.name)) == 255
    write_bytes_atomic(path, b"data")
    assert path.read_bytes() == b"data"


def test_sweep_leaves_other_names_folders_and_missing_folders_alone(tmp_path):
    dead = f".tmp-{owner_name().partition('-')[0]}-0123456789ab"
    (tmp_path / f"{dead}-000001").write_bytes(b"left behind")
    (tmp_path / f"{dead}-000002").mkdir()
    (tmp_path / f"{dead}-000003").symlink_to(tmp_path, target_is_directory=True)
    (tmp_path / ".tmp-by-someone-else").write_bytes(b"")
    (tmp_path / "abc.npy").write_bytes(b"")
    assert sweep_temporaries(tmp_path) == 2
    assert sorted(os.listdir(tmp_path)) == sorted([f"{dead}-000002", ".tmp-by-someone-else", "abc.npy"])
    assert sweep_temporaries(tmp_path / "missing") == 0
    assert sweep_temporaries(tmp_path, folders=True) == 1
    assert sorted(os.listdir(tmp_path)) == [".tmp-by-someone-else", "abc.npy"]


def test_sweep_of_own_temporaries_leaves_those_of_every_other_process(tmp_path):
    """Another run may be writing to the same folder."""
    own = temporary_path(tmp_path)
    of_a_worker = tmp_path / f".tmp-{owner_name()}-1x000001"
    of_others = tmp_path / f".tmp-{owner_name()}0-1x000001", tmp_path / ".tmp-by-someone-else", tmp_path / "abc.npy"
    for path in (own, of_a_worker, *of_others):
        path.write_bytes(b"")

    assert sweep_own_temporaries(tmp_path) == 2

    assert sorted(tmp_path.iterdir()) == sorted(of_others)


def test_write_if_changed_keeps_the_modification_time_of_an_equal_file(tmp_path):
    """Spec: docs/spec/conventions.md#completion"""
    path = tmp_path / "file.json"
    assert write_if_changed(path, b"one")
    os.utime(path, ns=(1, 1))
    assert not write_if_changed(path, b"one")
    assert path.stat().st_mtime_ns == 1
    assert write_if_changed(path, b"two")
    assert path.read_bytes() == b"two"


@pytest.mark.parametrize("code", [None, errno.EPERM, errno.ENOTSUP])
def test_new_file_replaces_nothing_with_and_without_hard_links(tmp_path, monkeypatch, code):
    def link(source, target):
        raise OSError(code, os.strerror(code))

    if code:
        monkeypatch.setattr(os, "link", link)
    write_new(tmp_path / "run.db", b"without events")
    with pytest.raises(FileExistsError):
        write_new(tmp_path / "run.db", b"other")

    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"run.db": b"without events"}


def test_new_file_does_not_appear_on_a_full_disk(tmp_path, monkeypatch):
    def full(handle):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_new(tmp_path / "run.db", b"without events")

    assert list(tmp_path.iterdir()) == []


def test_ended_process_has_no_birth_even_before_it_is_waited_for():
    """A killed child of a living parent stays in the process table, but it writes nothing."""
    child = subprocess.Popen(
        [sys.executable, "-c", "print('up', flush=True); input()"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert child.stdout
    child.stdout.readline()
    assert process_birth(child.pid) is not None
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert process_birth(child.pid) is None
    child.communicate()
