"""Containers on one data root: separate process namespaces and host names, but one kernel and one folder."""

import os
import shutil
import signal
import subprocess
import time

import pytest

from imagemill.domain.embedding_specs import embedding_specs
from imagemill.domain.layout import DataRoot
from imagemill.store.ledger import Ledger
from tests.helpers.product import PROJECT, command, contents, imagemill, photos

UNSHARE = ["unshare", "--uts", "--pid", "--fork", "--mount-proc", "--kill-child"]
IMAGES = 24

pytestmark = pytest.mark.skipif(
    shutil.which("unshare") is None
    or subprocess.run([*UNSHARE, "true"], capture_output=True, check=False).returncode != 0,
    reason="process namespaces cannot be made here (they need root)",
)


def contained(host, *arguments, sleep="0"):
    """Start a command in a container with this host name."""
    script = ["sh", "-c", 'hostname "$0"; exec "$@"', host, *command(*arguments, stub=True)]
    return subprocess.Popen(
        [*UNSHARE, *script], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=PROJECT,
        env={**os.environ, "PYTHONPATH": str(PROJECT), "IMAGEMILL_STUB_SLEEP": sleep}, start_new_session=True,
    )  # fmt: skip


def prepare(root):
    photos(root.approved, IMAGES)
    root.config_file.write_text('{"encoders": {"dinov3_npy": {"batch_size": 1}}}')
    return root


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    root = prepare(DataRoot(tmp_path_factory.mktemp("undisturbed") / "data"))
    assert imagemill("run", "--data-root", root.path, stub=True).returncode == 0
    return contents(root)


@pytest.fixture
def root(tmp_path):
    return prepare(DataRoot(tmp_path / "data"))


def wait_for_files(root, process, count):
    folder = root.derived / embedding_specs()[0].folder
    until = time.monotonic() + 120
    while time.monotonic() < until and process.poll() is None:
        if folder.is_dir() and len(list(folder.glob("*.npy"))) >= count:
            return
        time.sleep(0.05)
    pytest.fail(f"no {count} files: {process.communicate()[0]}")


def leftovers(root):
    return [path for path in root.path.rglob(".tmp-*") if ".dagster" not in path.parts]


def test_killed_container_resumes_after_a_restart_under_another_name(root, undisturbed):
    """The lease, temporary files and run of the dead holder are recognised at once."""
    first = contained("one", "run", "--data-root", root.path, sleep="0.3")
    wait_for_files(root, first, 2)
    os.killpg(first.pid, signal.SIGKILL)
    first.communicate()

    second = contained("two", "run", "--data-root", root.path)
    said, _ = second.communicate(timeout=300)

    assert second.returncode == 0, said
    assert "waiting for run" not in said
    assert contents(root) == undisturbed
    assert leftovers(root) == []


def test_two_live_containers_with_one_host_name_give_the_result_of_one_run(root, undisturbed, tmp_path):
    """Neither considers the other dead, although process ids of the other have no meaning in its own namespace."""
    pause = tmp_path / "pause"
    pause.write_text("0.5")
    first = contained("same", "run", "--data-root", root.path, sleep=str(pause))
    wait_for_files(root, first, 2)
    second = contained("same", "run", "--data-root", root.path)
    said = []
    assert second.stdout
    for line in second.stdout:
        said.append(line)
        if "waiting for run" in line:
            break
    pause.write_text("0")
    outputs = [first.communicate(timeout=300)[0], "".join(said) + second.communicate(timeout=300)[0]]

    assert [first.returncode, second.returncode] == [0, 0], outputs
    assert "waiting for run" in outputs[1]
    assert "killed; run again" not in "".join(outputs)
    assert contents(root) == undisturbed
    assert leftovers(root) == []
    with Ledger(root.ledger, read_only=True) as ledger:
        assert ledger.cells("leases", ["item"]) == []
