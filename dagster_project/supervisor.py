"""Supervisor of services, which start and end together: the three of `imagemill ui`, or the one of `imagemill serve`.

    imagemill ui                           holds the writing end of a pipe
    ├─ service code       its own session: code server, its child, the runs that the UI launches; one for each data root
    ├─ service daemon     its own session
    └─ service webserver  its own session

Each service reads the pipe: after kill -9 of the supervisor, the end of file makes each service end its session.
As process 1 of a container, the supervisor also reaps processes whose parents have ended.
The services are implemented in service.py.
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec
import psutil
import yaml

from dagster_project.code_server import CodeServer
from dagster_project.service import PIPE_VARIABLE, SETTINGS, WORKSPACE, ServiceSettings
from imagemill.errors import ImagemillError

POLL_SECONDS = 0.2

# Time before SIGKILL, enough to save the finished images of a running model call.
STOP_SECONDS = 8.0

# SIGHUP is not handled, so that `nohup` keeps its meaning; it ends this process, and the pipe then ends the services.
SIGNALS = (signal.SIGINT, signal.SIGTERM)
_LONGEST_BASE = 68


class ServiceEnded(ImagemillError, RuntimeError):
    """A service ended unexpectedly."""


@dataclass(frozen=True, slots=True)
class ServicePlan:
    """A service to be started.

    Attributes:
        name: a name that `dagster_project.service.serve` accepts.
        settings: its settings.
        environment: variables added to this process's.
    """

    name: str
    settings: ServiceSettings
    environment: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Service:
    """A running service; its process leads a session and a process group."""

    name: str
    process: subprocess.Popen

    def alive(self) -> bool:
        """Return whether any process of the session is alive."""
        return self.process.poll() is None or any(_members(self.process.pid))

    def signal(self, number: int) -> None:
        """Send a signal to the process group."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, number)


def socket_folder() -> Path:
    """Create a temporary folder whose path is short enough for a socket in it: 107 bytes on Linux, 103 on macOS."""
    base = tempfile.gettempdir()
    return Path(
        tempfile.mkdtemp(prefix="imagemill-ui-", dir=base if len(os.fsencode(base)) <= _LONGEST_BASE else "/tmp")
    )


def start_service(name: str, folder: Path, settings: str, environment: Mapping[str, str], pipe: int) -> Service:
    """Start one service.

    Args:
        name: a name that `dagster_project.service.serve` accepts.
        folder: folder of the settings and of the workspace file.
        settings: name of the file with the service's settings.
        environment: variables added to this process's.
        pipe: reading end of a pipe; the service ends when its writing end is closed.
    """
    command = [sys.executable, "-P", "-m", "dagster_project.service", name, str(folder), settings]
    variables = {**os.environ, **environment, **_search_path(folder), PIPE_VARIABLE: str(pipe)}
    return Service(name, subprocess.Popen(command, env=variables, pass_fds=[pipe], start_new_session=True))


def _search_path(folder: Path) -> dict[str, str]:
    """Return variables that keep a service and its child processes from importing modules of the current folder.

    The first entry is an empty private folder: Dagster treats the first one as its script's folder, and skips it in imports.
    """
    given = [os.path.abspath(path) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    return {"PYTHONSAFEPATH": "1", "PYTHONPATH": os.pathsep.join([str(folder / "empty"), *given])}


@contextmanager
def service_folder() -> Iterator[Path]:
    """Yield a private folder for the files that the services of one supervisor share; it is removed at the end."""
    folder = socket_folder()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def workspace_of(servers: Iterable[CodeServer]) -> str:
    """Return the text of a workspace file that names these code servers."""
    return yaml.safe_dump({"load_from": [server.entry() for server in servers]})


def supervise(folder: Path, plans: Sequence[ServicePlan], *, workspace: str) -> int:
    """Run services until a signal; return its number after all their processes have ended.

    Args:
        folder: private folder for the files that the services share.
        plans: the services, in the order in which they start.
        workspace: text of the workspace file, which webserver and daemon read.

    Raises:
        ServiceEnded: if a service ended by itself. The others are ended first.
    """
    (folder / WORKSPACE).write_text(workspace)
    reading, writing = os.pipe()
    services: list[Service] = []
    servers = [plan.settings.code for plan in plans if plan.settings.code]
    with _signals() as received:
        try:
            for number, plan in enumerate(plans):
                if not plan.settings.code:
                    # These services report an error of a code location whose server does not answer yet.
                    _wait(services, received, lambda: all(server.answers() for server in servers))
                if received:
                    return received[0]
                name = SETTINGS.format(number)
                (folder / name).write_bytes(msgspec.json.encode(plan.settings))
                services.append(start_service(plan.name, folder, name, plan.environment, reading))
            _wait(services, received, lambda: False)
            return received[0]
        finally:
            stop(services, received)
            os.close(reading)
            os.close(writing)


def _wait(services: Sequence[Service], received: Sequence[int], condition: Callable[[], bool]) -> None:
    """Wait until the condition holds or a signal has arrived. Raises ServiceEnded."""
    while not received and not condition():
        for service in services:
            if (code := service.process.poll()) is not None:
                why = f"exit code {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}"
                do = "see its message above, then start again"
                raise ServiceEnded(f"the {service.name} service ended", why=why, do=do)
        _reap_orphans({service.process.pid for service in services})
        time.sleep(POLL_SECONDS)


def _reap_orphans(services: Container[int]) -> None:
    """Reap ended child processes other than the services: process 1 of a container inherits all orphans."""
    if os.getpid() != 1:
        return
    with suppress(ChildProcessError):
        # The process stays waitable (WNOWAIT), so that the exit code of a service remains for its Popen object.
        while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) and ended.si_pid not in services:
            os.waitpid(ended.si_pid, os.WNOHANG)


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
        _reap_orphans({service.process.pid for service in services})
        time.sleep(POLL_SECONDS)


def _members(group: int) -> Iterator[int]:
    """Yield the living processes of a process group."""
    for process in psutil.process_iter(["status"]):
        with suppress(ProcessLookupError):
            if os.getpgid(process.pid) == group and process.info["status"] != psutil.STATUS_ZOMBIE:
                yield process.pid


@contextmanager
def _signals() -> Iterator[list[int]]:
    """Yield the list of signals received in the block, including signals that were ignored before it (`&` in a script)."""
    received: list[int] = []

    before = {number: signal.signal(number, lambda got, _: received.append(got)) for number in SIGNALS}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
