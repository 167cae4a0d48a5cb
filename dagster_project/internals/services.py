"""Dagster's daemon and code server, run in this process by the functions behind Dagster's own commands."""

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import click
from dagster._cli.code_server import start_command
from dagster._daemon.cli import run_command
from filelock import FileLock, Timeout

from dagster_project.code_location import ATTRIBUTE, MODULE
from dagster_project.code_server import CodeServer
from imagemill.domain.layout import HOME_VARIABLE
from imagemill.project import PROJECT

DAEMON_LOCK = ".daemon.lock"


def run_daemon(instance: str, workspace: str) -> None:
    """Run sensors, queue, backfills and run monitoring until SIGINT or SIGTERM, once no other daemon has the history."""
    with suppress(KeyboardInterrupt), _only_daemon(Path(os.environ[HOME_VARIABLE])):
        _run(run_command, ["--instance-ref", instance, "--workspace", workspace])


@contextmanager
def _only_daemon(home: Path) -> Iterator[None]:
    """Wait until this is the only daemon of a history on this machine.

    Two daemons may both take a run from the queue and launch it. The process that comes second ends at once, and its code server
    then reports the run as failed although the first one is executing it.
    """
    lock = FileLock(home / DAEMON_LOCK)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        print(
            f"imagemill daemon: another daemon has the history {home} and starts its runs; this one waits until that has ended",
            file=sys.stderr,
            flush=True,
        )
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def run_code_server(instance: str, server: CodeServer) -> None:
    """Serve the definitions, and execute the runs that UI and daemon launch, until SIGINT or SIGTERM.

    Args:
        instance: serialized reference of the instance that stores its runs.
        server: address to listen on.
    """
    # Dagster searches for the module in the working directory before sys.path.
    target = ["--module-name", MODULE, "--attribute", ATTRIBUTE, "--working-directory", PROJECT]
    address = (
        ["--socket", server.socket_path] if server.socket_path else ["--host", server.host, "--port", str(server.port)]
    )
    where = [*address, "--location-name", server.location, "--instance-ref", instance]
    # With this option the server returns its interpreter to clients; otherwise they would start the `dagster` in PATH.
    _run(start_command, [*where, *target, "--use-python-environment-entry-point", "--log-level", "warning"])


def _run(command: click.Command, arguments: Sequence[str]) -> None:
    with suppress(KeyboardInterrupt, click.exceptions.Exit):
        command.main(list(arguments), standalone_mode=False)
