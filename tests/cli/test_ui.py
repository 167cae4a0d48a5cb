"""`imagemill ui` started by a script (`&`): its responses to foreign pages, and the end of its processes."""

import base64
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from imagemill.domain.layout import DataRoot
from tests.helpers.product import PROJECT, SEARCH_PATH, imagemill, photos
from tests.helpers.ui import STUBBED, Ui, free_port, wait_until

READY_SECONDS = 180
# generous, because the machine may be busy
END_SECONDS = 15

# A shell without job control, such as a script, starts `&` jobs with SIGINT ignored.
SCRIPT = 'cd "$FOLDER"; "$@" & echo $! > "$FOLDER/pid"; wait $!; echo $? > "$FOLDER/code"'


@contextmanager
def started(tmp_path, *options, files=()):
    """Start a UI from a script in a separate folder; yield (Ui, pid, folder)."""
    root, port = DataRoot(tmp_path / "data"), free_port()
    photos(root.approved, 2)
    folder = tmp_path / "current"
    folder.mkdir()
    for name, text in files:
        (folder / name).write_text(text)
    # -P, because the console script has no current folder on its path either.
    command = [
        sys.executable,
        "-P",
        "-m",
        "dagster_project.cli.main",
        "ui",
        "--data-root",
        root.path,
        "--port",
        port,
        *options,
    ]
    environment = {k: v for k, v in os.environ.items() if k not in {"DAGSTER_HOME", "IMAGEMILL_DATA_ROOT"}}
    environment |= {"PYTHONPATH": f"{SEARCH_PATH}:{STUBBED}", "FOLDER": str(folder), "TMPDIR": str(tmp_path)}
    log = tmp_path / "ui.log"
    with open(log, "w") as output:
        script = subprocess.Popen(
            ["/bin/sh", "-c", SCRIPT, "sh", *map(str, command)], env=environment, stdout=output, stderr=output,
            start_new_session=True,
        )  # fmt: skip
    try:
        ui = Ui(f"http://127.0.0.1:{port}")
        wait_until(lambda: script.poll() is not None or ui.loaded(), READY_SECONDS, "the UI answers")
        assert script.poll() is None, log.read_text()
        yield ui, int((folder / "pid").read_text()), folder
    finally:
        for process in processes_of(tmp_path):
            process.kill()
        script.wait(30)


def processes_of(tmp_path):
    """Return every live process of the UI. All have the folder of this test in their environment."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and process.environ().get("TMPDIR") == str(tmp_path):
                found.append(process)
        except psutil.Error:
            continue
    return [process for process in found if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]


def status(ui, path="/server_info", *, body=None, **headers):
    given = {name.replace("_", "-"): value for name, value in headers.items()}
    request = urllib.request.Request(ui.url + path, body and json.dumps(body).encode(), given)
    try:
        with urllib.request.urlopen(request, timeout=30) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def handshake(ui, origin):
    """Return the status line of a WebSocket handshake on the subscription endpoint."""
    host = ui.url.removeprefix("http://")
    lines = [
        "GET /graphql HTTP/1.1", f"Host: {host}", "Connection: Upgrade", "Upgrade: websocket", f"Origin: {origin}",
        "Sec-WebSocket-Version: 13", f"Sec-WebSocket-Key: {base64.b64encode(bytes(16)).decode()}",
        "Sec-WebSocket-Protocol: graphql-ws", "", "",
    ]  # fmt: skip
    name, port = host.split(":")
    with socket.create_connection((name, int(port)), 30) as client:
        client.sendall("\r\n".join(lines).encode())
        return client.recv(4096).split(b"\r\n")[0].decode()


def assert_ended(tmp_path, folder, seconds=END_SECONDS):
    wait_until(lambda: not processes_of(tmp_path), seconds, f"every process has ended: {processes_of(tmp_path)}")
    wait_until((folder / "code").is_file, 5, "the script has its exit code")
    assert not list(tmp_path.glob("imagemill-ui-*")), "no temporary folder is left"
    return int((folder / "code").read_text())


def test_foreign_pages_are_refused_and_an_interrupt_ends_everything_with_130(tmp_path):
    """One UI serves all requests, because its start takes a while."""
    marker = tmp_path / "executed"
    planted = f"open({str(marker)!r}, 'a').write(__name__ + '\\n')\n"
    names = ["dagster.py", "dagster_webserver.py", "multiprocessing.py", "assets.py", "yaml.py", "sitecustomize.py"]
    with started(tmp_path, "--allowed-host", "ui.example.com", files=[(name, planted) for name in names]) as (
        ui,
        pid,
        folder,
    ):
        mutation = "/graphql?" + urllib.parse.urlencode(
            {"query": "mutation { wipeAssets(assetPartitionRanges: []) { __typename } }"}
        )
        assert status(ui)[0] == 200
        assert status(ui, "/")[0] == 200
        assert status(ui, Host="localhost:9")[0] == 200
        assert status(ui, Host="ui.example.com")[0] == 200
        code, text = status(ui, Host="evil.example")
        assert (code, text.count("\n")) == (403, 1)
        assert status(ui, mutation)[0] == 403
        assert status(ui, mutation, Origin="http://evil.example")[0] == 403
        body = {"query": "{ version }"}
        assert status(ui, "/graphql", body=body, Content_Type="application/json")[0] == 200
        assert status(ui, "/graphql", body=body, Content_Type="application/json", Origin=ui.url)[0] == 200
        assert (
            status(ui, "/graphql", body=body, Content_Type="application/json", Origin="http://evil.example")[0] == 403
        )
        assert "101" in handshake(ui, ui.url)
        assert "403" in handshake(ui, "http://evil.example")
        assert len(processes_of(tmp_path)) >= 6, "script, supervisor, webserver, daemon, code server and its child"

        os.kill(pid, signal.SIGINT)
        assert assert_ended(tmp_path, folder) == 130
    assert not marker.exists(), f"code of the current folder was executed: {marker.read_text()}"
    assert "Traceback" not in Path(tmp_path / "ui.log").read_text()


def test_sigterm_ends_everything_with_143(tmp_path):
    with started(tmp_path) as (_, pid, folder):
        os.kill(pid, signal.SIGTERM)
        assert assert_ended(tmp_path, folder) == 143


def test_no_process_survives_a_killed_command(tmp_path):
    """This includes processes started by Dagster, such as the code server's child."""
    with started(tmp_path) as (_, pid, folder):
        os.kill(pid, signal.SIGKILL)
        assert assert_ended(tmp_path, folder) == 137


def test_service_that_dies_ends_the_others_and_is_named(tmp_path):
    with started(tmp_path) as (_, _, folder):
        daemon = next(
            p for p in processes_of(tmp_path) if "daemon" in p.cmdline() and "dagster_project.service" in p.cmdline()
        )
        daemon.kill()
        assert assert_ended(tmp_path, folder) == 1
    text = (tmp_path / "ui.log").read_text()
    assert "the daemon service ended" in text
    assert "SIGKILL" in text


def test_occupied_port_and_invalid_names_are_wrong_usage(data_root):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = imagemill("ui", "--data-root", data_root.path, "--port", port)
    assert (done.returncode, "cannot listen" in done.stderr) == (2, True)

    done = imagemill("ui", "--data-root", data_root.path, "--allowed-host", "http://x")
    assert (done.returncode, "not a host name" in done.stderr) == (2, True)
    assert sorted(p.name for p in data_root.path.iterdir()) == ["approved"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_other_commands_started_by_a_script_can_be_stopped_too(tmp_path, number):
    """Dagster installs the SIGINT handler for SIGTERM, and such a script has set it to "ignored"."""
    root = DataRoot(tmp_path / "data")
    photos(root.approved, 12)
    command = [sys.executable, str(Path(__file__).parents[1] / "helpers" / "stubs.py"), "run", "--data-root", root.path]
    environment = {**os.environ, "PYTHONPATH": str(PROJECT), "FOLDER": str(tmp_path), "IMAGEMILL_STUB_SLEEP": "4"}
    with open(tmp_path / "log", "w") as log:
        script = subprocess.Popen(
            ["/bin/sh", "-c", SCRIPT, "sh", *map(str, command)], env=environment, stdout=log, stderr=log
        )
    wait_until(lambda: list(root.derived.glob("*/*.npy")), 120, "the first files are there")

    began = time.monotonic()
    os.kill(int((tmp_path / "pid").read_text()), number)
    script.wait(60)

    assert int((tmp_path / "code").read_text()) == 128 + number, (tmp_path / "log").read_text()
    assert time.monotonic() - began < 30
