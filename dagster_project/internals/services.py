"""Dagster's daemon and code server, run in this process by the functions behind Dagster's own commands."""

from collections.abc import Sequence
from contextlib import suppress

import click
from dagster._cli.code_server import start_command
from dagster._daemon.cli import run_command

from dagster_project.code_location import ATTRIBUTE, MODULE
from dagster_project.code_server import CodeServer
from imagemill.project import PROJECT


def run_daemon(instance: str, workspace: str) -> None:
    """Run sensors, queue, backfills and run monitoring until SIGINT or SIGTERM."""
    _run(run_command, ["--instance-ref", instance, "--workspace", workspace])


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
