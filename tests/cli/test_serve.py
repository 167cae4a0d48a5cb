"""`imagemill serve`: single services as process 1 of a container, their health, and the webserver without changes."""

import os
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from contextlib import closing, contextmanager, suppress

import psutil
import pytest
from filelock import FileLock

from dagster_project.internals.services import DAEMON_LOCK
from imagemill.domain.layout import DataRoot
from tests.cli.test_ui import processes_of
from tests.helpers.product import SEARCH_PATH, imagemill, photos
from tests.helpers.ui import STUBBED, Ui, free_port, locations, wait_until

READY_SECONDS = 180
END_SECONDS = 10
COMMAND = [sys.executable, "-P", "-m", "dagster_project.cli.main", "serve"]

UNSHARE = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
NAMESPACES = (
    shutil.which("unshare") is not None
    and subprocess.run([*UNSHARE, "true"], capture_output=True, check=False).returncode == 0
)
needs_namespaces = pytest.mark.skipif(not NAMESPACES, reason="process namespaces cannot be made here (they need root)")

WIPE = """mutation { wipeAssets(assetPartitionRanges: [{assetKey: {path: ["dinov3_npy"]}}]) { __typename } }"""


@pytest.fixture
def root(tmp_path) -> DataRoot:
    root = DataRoot(tmp_path / "data")
    photos(root.approved, 2)
    return root


@contextmanager
def served(tmp_path, root, *arguments, prefix=()):
    """Start a service; yield its process."""
    environment = {k: v for k, v in os.environ.items() if k not in {"DAGSTER_HOME", "IMAGEMILL_DATA_ROOT"}}
    environment |= {"PYTHONPATH": f"{SEARCH_PATH}:{STUBBED}", "TMPDIR": str(tmp_path)}
    words = [*prefix, *COMMAND, *map(str, arguments), "--data-root", str(root.path)]
    with open(tmp_path / f"{arguments[0]}.log", "w") as log:
        process = subprocess.Popen(words, env=environment, cwd=tmp_path, stdout=log, stderr=log, start_new_session=True)
    try:
        yield process
    finally:
        for left in processes_of(tmp_path):
            left.kill()
        process.wait(30)


def healthy(root, *arguments):
    return imagemill("serve", "health", *arguments, "--data-root", root.path).returncode == 0


def test_services_of_one_data_root_find_each_other_and_end_with_0(tmp_path, root):
    """Without DAGSTER_HOME they share the history in the data root. The webserver refuses changes with --read-only."""
    socket_path, port = tmp_path / "code.sock", free_port()
    workspace = tmp_path / "workspace.yaml"
    workspace.write_text(f"load_from:\n- grpc_server: {{socket: {socket_path}, location_name: animals}}\n")
    assert not healthy(root, "webserver", "--port", port)
    assert not healthy(root, "code", "--socket", socket_path)
    assert not healthy(root, "daemon")

    with (
        served(tmp_path, root, "code", "--socket", socket_path) as code,
        served(tmp_path, root, "daemon", "--workspace", workspace) as daemon,
        served(tmp_path, root, "webserver", "--workspace", workspace, "--port", port, "--read-only") as webserver,
    ):
        wait_until(lambda: healthy(root, "code", "--socket", socket_path), READY_SECONDS, "the code server answers")
        wait_until(lambda: healthy(root, "webserver", "--port", port), READY_SECONDS, "the webserver answers")
        wait_until(lambda: healthy(root, "daemon"), READY_SECONDS, "the daemon has sent heartbeats")
        ui = Ui(f"http://127.0.0.1:{port}")
        loaded = {"animals": "RepositoryLocation"}
        # A webserver that was ready before the code server loads the location when that server answers.
        wait_until(lambda: locations(ui) == loaded, READY_SECONDS, "the webserver has loaded the code location")
        assert ui.graphql(WIPE)["wipeAssets"]["__typename"] == "UnauthorizedError"

        for process in (code, daemon, webserver):
            process.send_signal(signal.SIGTERM)
        assert [process.wait(END_SECONDS) for process in (code, daemon, webserver)] == [0, 0, 0]
        assert processes_of(tmp_path) == []
    for name in ("code", "daemon", "webserver"):
        # A sensor that Dagster's daemon evaluates while it stops no longer finds the code location, and says so.
        until_the_signal = (tmp_path / f"{name}.log").read_text().partition("shutting down daemon threads")[0]
        assert "Traceback" not in until_the_signal


def test_daemon_waits_until_no_other_one_has_the_history(tmp_path, root):
    """Two daemons would launch a queued run twice, and the run would be reported as failed while it works."""
    root.dagster_home.mkdir()
    log = tmp_path / "daemon.log"
    with FileLock(root.dagster_home / DAEMON_LOCK) as other:
        with served(tmp_path, root, "daemon", "--code", f"127.0.0.1:{free_port()}") as waiting:
            wait_until(lambda: "another daemon has the history" in log.read_text(), READY_SECONDS, "the daemon waits")
            assert not healthy(root, "daemon")

            other.release()

            wait_until(lambda: healthy(root, "daemon"), READY_SECONDS, "the daemon works")
            waiting.send_signal(signal.SIGTERM)
            assert waiting.wait(END_SECONDS) == 0
        with served(tmp_path, root, "daemon", "--code", f"127.0.0.1:{free_port()}") as waiting, other:
            wait_until(lambda: "another daemon has the history" in log.read_text(), READY_SECONDS, "the daemon waits")
            waiting.send_signal(signal.SIGTERM)
            assert waiting.wait(END_SECONDS) == 0


@needs_namespaces
def test_process_1_reaps_orphans_and_ends_on_sigterm(tmp_path, root):
    """In a container the command is process 1: the kernel gives it all orphans, and no default action of signals."""
    port = free_port()
    with served(tmp_path, root, "code", "--port", port, prefix=UNSHARE) as unshare:
        wait_until(lambda: healthy(root, "code", "--port", port), READY_SECONDS, "the code server answers")
        (first,) = psutil.Process(unshare.pid).children()
        # A shell in the namespace leaves an orphan, which ends a little later.
        enter = ["nsenter", "--target", str(first.pid), "--pid", "--mount"]
        subprocess.run([*enter, "sh", "-c", "(sleep 1 &) ; exit 0"], check=True)
        wait_until(lambda: any(p.name() == "sleep" for p in first.children()), 5, "process 1 has inherited the orphan")
        wait_until(lambda: not any(p.name() == "sleep" for p in first.children()), 10, "the orphan has been reaped")

        first.send_signal(signal.SIGTERM)
        assert unshare.wait(END_SECONDS) == 0
        assert processes_of(tmp_path) == []


@needs_namespaces
def test_process_1_ends_on_sigterm_while_it_starts(tmp_path, root):
    """Without a handler the kernel would ignore the signal until the service runs."""
    with served(tmp_path, root, "code", "--port", free_port(), prefix=UNSHARE) as unshare:
        first = wait_until(lambda: psutil.Process(unshare.pid).children(), 10, "process 1 exists")[0]
        wait_until(lambda: _handles(first.pid, signal.SIGTERM), 30, "the command has set its handler")
        first.send_signal(signal.SIGTERM)
        assert unshare.wait(END_SECONDS) == 0


def _handles(pid, number):
    """Return whether a process has a handler for a signal."""
    with open(f"/proc/{pid}/status") as status:
        caught = next(line.split()[1] for line in status if line.startswith("SigCgt"))
    return bool(int(caught, 16) >> (number - 1) & 1)


def _service_of(pid):
    """Return the service that a command has started, None if it has not; libraries may start other programs first."""
    for child in psutil.Process(pid).children():
        with suppress(psutil.Error):
            if "dagster_project.service" in child.cmdline():
                return child
    return None


def test_service_that_dies_is_named_with_exit_code_1(tmp_path, root):
    with served(tmp_path, root, "daemon", "--code", f"127.0.0.1:{free_port()}") as process:
        child = wait_until(lambda: _service_of(process.pid), READY_SECONDS, "the daemon runs")
        child.kill()
        assert process.wait(60) == 1
    text = (tmp_path / "daemon.log").read_text()
    assert "the daemon service ended" in text
    assert "SIGKILL" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["webserver"], "no code server is given"),
        (["daemon", "--code", "a:1", "--workspace", "w.yaml"], "--code and --workspace are both given"),
        (["daemon", "--code", "a:1", "--code", "b:1"], "two code servers named imagemill"),
        (["daemon", "--code", "http://a:1"], "not the address of a code server"),
        (["daemon", "--code", "a"], "not the address of a code server"),
        (["code", "--port", "4000", "--socket", "s"], "--port and --socket are both given"),
    ],
)
def test_wrong_usage_creates_nothing(data_root, arguments, message):
    done = imagemill("serve", *arguments, "--data-root", data_root.path)

    assert (done.returncode, message in done.stderr) == (2, True), done.stderr
    assert sorted(path.name for path in data_root.path.iterdir()) == ["approved"]


def test_missing_workspace_file_and_missing_data_root_are_named(tmp_path, data_root):
    done = imagemill("serve", "daemon", "--workspace", tmp_path / "none.yaml", "--data-root", data_root.path)
    assert (done.returncode, "cannot read the workspace file" in done.stderr) == (1, True)

    done = imagemill("serve", "daemon", "--code", "a:1", "--data-root", tmp_path / "none")
    assert (done.returncode, "does not exist" in done.stderr) == (1, True)
    assert not (tmp_path / "none").exists()


def test_occupied_port_is_wrong_usage(data_root):
    """Code servers can share a port, and then each answers a part of the requests."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        done = imagemill("serve", "code", "--port", taken.getsockname()[1], "--data-root", data_root.path)
    assert (done.returncode, "cannot listen" in done.stderr) == (2, True)


def test_health_of_a_server_that_is_no_webserver(data_root):
    """The check does not wait for ever."""
    began = time.monotonic()
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        port = silent.getsockname()[1]
        done = imagemill("serve", "health", "webserver", "--port", port, "--data-root", data_root.path)
    assert (done.returncode, "does not work" in done.stderr) == (1, True)
    assert time.monotonic() - began < 30


def test_migration_adds_what_a_newer_dagster_needs(root):
    """The history is that of a Dagster before the column `using_default_limit`, as its Alembic version says."""
    assert imagemill("run", "--data-root", root.path, stub=True).returncode == 0
    index = root.dagster_home / "history" / "runs" / "index.db"
    with closing(sqlite3.connect(index)) as database:
        newest = database.execute("SELECT version_num FROM alembic_version").fetchall()
        database.execute("ALTER TABLE concurrency_limits DROP COLUMN using_default_limit")
        database.execute("UPDATE alembic_version SET version_num = '6b7fb194ff9c'")
        database.commit()

    done = imagemill("serve", "migrate", "--data-root", root.path)

    assert done.returncode == 0, done.stderr
    with closing(sqlite3.connect(index)) as database:
        assert database.execute("SELECT version_num FROM alembic_version").fetchall() == newest
        database.execute("SELECT using_default_limit FROM concurrency_limits")
