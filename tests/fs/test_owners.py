"""Liveness by file locks, independent of host names and process namespaces."""

import os
import shutil
import subprocess
import sys
import textwrap

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from imagemill.errors import ImagemillError
from imagemill.fs import owners
from imagemill.fs.owners import is_dead_owner, owner_name, use

UNSHARE = ["unshare", "--uts", "--pid", "--fork", "--mount-proc", "--kill-child"]


def process(folder, *, inside=()):
    """Start another process that takes its name in this folder, prints it and waits."""
    script = f"""
        import sys
        from pathlib import Path
        from imagemill.fs.owners import use
        owner = use(Path({str(folder)!r}))
        print(owner.name, owner.pid, flush=True)
        sys.stdin.readline()
    """
    started = subprocess.Popen(
        [*inside, sys.executable, "-c", textwrap.dedent(script)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": os.getcwd()},
    )  # fmt: skip
    name, pid = started.stdout.readline().split()
    return started, name, int(pid)


def end(started):
    started.kill()
    started.communicate()


def test_process_is_alive_until_it_ends(tmp_path):
    use(tmp_path)
    started, name, _ = process(tmp_path)

    assert not is_dead_owner(name)
    assert not is_dead_owner(owner_name())

    end(started)
    assert is_dead_owner(name)


def test_lock_files_of_dead_processes_are_removed_and_those_of_living_ones_stay(tmp_path):
    dead, dead_name, _ = process(tmp_path)
    end(dead)
    living, living_name, _ = process(tmp_path)
    try:
        use(tmp_path)
        assert {path.name for path in tmp_path.iterdir()} == {living_name, owner_name()}
        assert dead_name not in {living_name, owner_name()}
    finally:
        end(living)


def test_process_of_another_folder_is_never_called_dead(tmp_path):
    """Nothing is known here about processes of another data root or another machine."""
    assert not is_dead_owner("0123456789-0123456789ab")


def test_names_of_earlier_releases_are_dead():
    """Host, pid and start time: such a process cannot work on a data root of this release."""
    assert is_dead_owner("0123abcd-4711-99")


def test_forked_child_does_not_keep_its_parent_alive(tmp_path):
    """The lock belongs to the open file, which a child would share."""
    script = f"""
        import os, sys, time
        from pathlib import Path
        from imagemill.fs.owners import use
        name = use(Path({str(tmp_path)!r})).name
        if child := os.fork():
            print(name, child, flush=True)
        else:
            os.close(1)
            time.sleep(60)
        os._exit(0)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.PIPE, text=True, check=True
    )
    name, child = done.stdout.split()
    try:
        use(tmp_path)
        assert is_dead_owner(name)
    finally:
        os.kill(int(child), 9)


def test_folder_that_is_removed_meanwhile_is_made_again(tmp_path):
    folder = tmp_path / "owners"
    first = use(folder).name
    shutil.rmtree(folder)

    second = use(folder).name
    assert second != first
    assert not is_dead_owner(second)


def test_process_is_alive_where_a_copy_has_taken_its_folder(tmp_path):
    """If a data root is restored from a copy while a process uses it, the copied lock file is not locked."""
    folder = tmp_path / "owners"
    first = use(folder).name
    shutil.copytree(folder, tmp_path / "copy")
    shutil.rmtree(folder)
    (tmp_path / "copy").rename(folder)

    assert not is_dead_owner(first), "until it takes another name"
    second = owner_name()
    assert second != first
    assert not is_dead_owner(second)


def test_processes_hold_locks_of_few_folders(tmp_path):
    """Each lock needs a file descriptor."""
    for n in range(2 * owners._MOST_FOLDERS):
        use(tmp_path / str(n))

    assert len(owners._held) == owners._MOST_FOLDERS


@pytest.mark.skipif(
    shutil.which("unshare") is None
    or subprocess.run([*UNSHARE, "true"], capture_output=True, check=False).returncode != 0,
    reason="process namespaces cannot be made here (they need root)",
)
def test_processes_of_two_containers_with_one_host_name_know_each_other_alive(tmp_path):
    """Process ids of the other container have no meaning here, and may be equal. A killed process is dead under any host name."""
    one, one_name, one_pid = process(tmp_path, inside=UNSHARE)
    other, other_name, other_pid = process(tmp_path, inside=UNSHARE)
    use(tmp_path)
    try:
        assert one_pid == other_pid
        assert not is_dead_owner(one_name)
        assert not is_dead_owner(other_name)
    finally:
        end(one)
    assert is_dead_owner(one_name)
    assert not is_dead_owner(other_name)
    end(other)


@given(st.text(max_size=40))
@settings(max_examples=50, deadline=None)
def test_no_name_crashes_the_test(name):
    """A folder may hold any name."""
    assert is_dead_owner(name) in {True, False}


def test_folder_of_lock_files_that_cannot_be_made_is_to_be_made_writable(tmp_path):
    (tmp_path / "state").write_text("in the way")

    with pytest.raises(ImagemillError, match="cannot create a lock file") as caught:
        owners._take(tmp_path / "state" / "owners")

    assert caught.value.do == "make the folder writable, then run the same command again"
