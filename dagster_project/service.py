"""One service in its own process: webserver, daemon or code server.

    python -P -m dagster_project.service NAME FOLDER SETTINGS

    FOLDER/  settings0.json …  workspace.yaml  code0.sock …

The process leads its own session. It ends itself and all processes that it started when its supervisor is gone.
Services are started and stopped in supervisor.py: all three by `imagemill ui`, a single one by `imagemill serve`.
"""

import os
import shutil
import signal
import sys
import threading
import time
from pathlib import Path

import msgspec

from dagster_project.code_server import CodeServer
from imagemill.look.mount import MountedRoot
from imagemill.processes import run_process

# Time between SIGTERM and SIGKILL for the processes of a service whose supervisor is gone.
GRACE_SECONDS = 10.0

PIPE_VARIABLE = "IMAGEMILL_SUPERVISOR_PIPE"
SETTINGS, SOCKET, WORKSPACE = "settings{}.json", "code{}.sock", "workspace.yaml"


class ServiceSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of one service.

    Attributes:
        instance: serialized reference of the Dagster instance.
        code: the code server that the service is, if it is one.
        host: address of the webserver.
        port: port of the webserver.
        allowed_hosts: names that the webserver accepts besides those of this machine.
        read_only: whether the webserver refuses changes.
        roots: data roots whose photographs the webserver shows.
    """

    instance: str
    code: CodeServer | None = None
    host: str = ""
    port: int = 0
    allowed_hosts: tuple[str, ...] = ()
    read_only: bool = False
    roots: tuple[MountedRoot, ...] = ()


def serve(name: str, settings: ServiceSettings, folder: Path) -> None:
    """Run one service until it ends.

    Args:
        name: `webserver` serves the UI behind the guard; `daemon` runs sensors, queue and backfills; `code` serves the
            definitions and executes the runs of UI and daemon.
        settings: settings of the service.
        folder: folder of the settings and the workspace file.
    """
    workspace = str(folder / WORKSPACE)
    if name == "webserver":
        from dagster_project.internals.web import run_webserver

        run_webserver(
            settings.instance,
            workspace,
            host=settings.host,
            port=settings.port,
            allowed_hosts=settings.allowed_hosts,
            read_only=settings.read_only,
            roots=settings.roots,
        )
    else:
        from dagster_project.internals.services import run_code_server, run_daemon

        if name == "daemon":
            run_daemon(settings.instance, workspace)
        elif settings.code:
            run_code_server(settings.instance, settings.code)


def main(name: str, folder: str, settings_name: str) -> None:
    """Run one service until SIGINT, SIGTERM, or the end of its supervisor."""
    from dagster_project.history_errors import history_errors
    from imagemill.errors import ImagemillError

    # Dagster's handlers copy this one, and a process started with `&` starts with SIGINT ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if pipe := os.environ.pop(PIPE_VARIABLE, ""):
        threading.Thread(target=_end_with, args=[int(pipe), folder], name="supervisor watch", daemon=True).start()
    settings = msgspec.json.decode(Path(folder, settings_name).read_bytes(), type=ServiceSettings)
    try:
        with history_errors(Path(os.environ["DAGSTER_HOME"])):
            serve(name, settings, Path(folder))
    except ImagemillError as error:
        sys.exit(f"imagemill {name}: {error}")


def _end_with(pipe: int, folder: str) -> None:
    """Wait until the supervisor's end of the pipe is closed, then end this session."""
    os.set_inheritable(pipe, False)
    while os.read(pipe, 1):
        pass
    # Not a daemon thread: the main thread ends on SIGTERM, and its child processes may need the SIGKILL.
    threading.Thread(target=_end_session, name="session end").start()
    shutil.rmtree(folder, ignore_errors=True)


def _end_session() -> None:
    session = os.getpgrp()
    os.killpg(session, signal.SIGTERM)
    time.sleep(GRACE_SECONDS)
    os.killpg(session, signal.SIGKILL)


if __name__ == "__main__":
    run_process(lambda: main(*sys.argv[1:]))
