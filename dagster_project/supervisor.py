"""The processes of `imagemill ui`: started together, ended together.

    imagemill ui                           holds the writing end of a pipe
    ├─ service code       session of its own: code server, its child, the runs that the UI launches
    ├─ service daemon     session of its own
    └─ service webserver  session of its own

Each service reads the pipe: after kill -9 of the first process, its end of file ends the sessions.
What a service does: service.py.
"""

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec
import psutil
import yaml

from dagster_project.code_location import LOCATION
from dagster_project.service import PIPE_VARIABLE, SETTINGS, SOCKET, WORKSPACE, ServiceSettings
from imagemill.errors import ImagemillError

POLL_SECONDS = 0.2

# Finished images of a running model call are saved within this time; then SIGKILL.
STOP_SECONDS = 8.0

# SIGHUP ends this process without them: the pipe ends the services then, and `nohup` keeps its meaning.
SIGNALS = (signal.SIGINT, signal.SIGTERM)
_LONGEST_BASE = 70


class ServiceEnded(ImagemillError, RuntimeError):
    """A service ended by itself."""


@dataclass(frozen=True, slots=True)
class Service:
    """A running service; its process leads a session and its group."""

    name: str
    process: subprocess.Popen

    def alive(self) -> bool:
        """Whether any process of the session is left."""
        return self.process.poll() is None or any(_members(self.process.pid))

    def signal(self, number: int) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, number)


def socket_folder() -> Path:
    """Create a temporary folder whose path is short enough for a socket in it: 107 bytes on Linux, 103 on macOS."""
    base = tempfile.gettempdir()
    return Path(
        tempfile.mkdtemp(prefix="imagemill-ui-", dir=base if len(os.fsencode(base)) <= _LONGEST_BASE else "/tmp")
    )


def start_service(name: str, folder: Path, environment: Mapping[str, str], pipe: int) -> Service:
    """Start one service over the settings in a folder.

    Args:
        name: as of `dagster_project.service.serve`.
        pipe: reading end of a pipe; the service ends when its writing end is closed.
    """
    command = [sys.executable, "-P", "-m", "dagster_project.service", name, str(folder)]
    variables = {**os.environ, **environment, **_search_path(folder), PIPE_VARIABLE: str(pipe)}
    return Service(name, subprocess.Popen(command, env=variables, pass_fds=[pipe], start_new_session=True))


def _search_path(folder: Path) -> dict[str, str]:
    """Variables by which neither a service nor what it starts looks for modules in the current folder.

    The first entry is empty and safe: Dagster takes the first one for its script's folder, and leaves it out of imports.
    """
    given = [os.path.abspath(path) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    return {"PYTHONSAFEPATH": "1", "PYTHONPATH": os.pathsep.join([str(folder / "empty"), *given])}


@contextmanager
def service_folder(settings: ServiceSettings) -> Iterator[Path]:
    """Yield a private folder with what the services of one UI share; removed at the end."""
    folder = socket_folder()
    try:
        (folder / SETTINGS).write_bytes(msgspec.json.encode(settings))
        location = {"socket": str(folder / SOCKET), "location_name": LOCATION}
        (folder / WORKSPACE).write_text(yaml.safe_dump({"load_from": [{"grpc_server": location}]}))
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def supervise(folder: Path, environment: Mapping[str, str]) -> int:
    """Run all services until a signal; returns its number, after the last of their processes has ended.

    Raises:
        ServiceEnded: if one ended by itself. The others are ended first.
    """
    reading, writing = os.pipe()
    services: list[Service] = []
    with _signals() as received:
        try:
            services.append(start_service("code", folder, environment, reading))
            # The other services report an error of the code location if its server does not answer yet.
            _wait(services, received, lambda: _answers(folder / SOCKET))
            if received:
                return received[0]
            services += [start_service(name, folder, environment, reading) for name in ("daemon", "webserver")]
            _wait(services, received, lambda: False)
            return received[0]
        finally:
            stop(services, received)
            os.close(reading)
            os.close(writing)


def _wait(services: Sequence[Service], received: Sequence[int], condition: Callable[[], bool]) -> None:
    """Return when the condition holds or a signal has arrived. Raises ServiceEnded."""
    while not received and not condition():
        _refuse_ended(services)
        time.sleep(POLL_SECONDS)


def _answers(path: Path) -> bool:
    """Whether a server listens on a Unix socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        return client.connect_ex(str(path)) == 0


def _refuse_ended(services: Sequence[Service]) -> None:
    for service in services:
        if (code := service.process.poll()) is not None:
            reason = f"exit code {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}"
            raise ServiceEnded(
                f"the {service.name} service of the UI ended", why=reason, do="see its message above, then start again"
            )


def stop(services: Sequence[Service], received: Sequence[int] = ()) -> None:
    """End all processes of services: SIGTERM, then SIGKILL after `STOP_SECONDS` or a second signal."""
    before, end = len(received), time.monotonic() + STOP_SECONDS
    for service in services:
        service.signal(signal.SIGTERM)
    while any(service.alive() for service in services):
        if time.monotonic() > end or len(received) > before:
            for service in services:
                service.signal(signal.SIGKILL)
                service.process.wait()
            return
        time.sleep(POLL_SECONDS)


def _members(group: int) -> Iterator[int]:
    """Living processes of a process group."""
    for process in psutil.process_iter(["status"]):
        with suppress(ProcessLookupError):
            if os.getpgid(process.pid) == group and process.info["status"] != psutil.STATUS_ZOMBIE:
                yield process.pid


@contextmanager
def _signals() -> Iterator[list[int]]:
    """Numbers of the signals of the block, also where they were ignored at its start (`&` in a script)."""
    received: list[int] = []

    before = {number: signal.signal(number, lambda got, _: received.append(got)) for number in SIGNALS}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
