"""Dagster's daemon and code server, run in this process by the functions behind Dagster's own commands."""

from collections.abc import Sequence
from contextlib import suppress

import click
from dagster._cli.code_server import start_command
from dagster._daemon.cli import run_command


def run_daemon(instance: str, workspace: str) -> None:
    """Run sensors, queue, backfills and run monitoring until SIGINT or SIGTERM."""
    _run(run_command, ["--instance-ref", instance, "--workspace", workspace])


def run_code_server(
    instance: str, socket: str, *, module: str, attribute: str, location: str, working_directory: str
) -> None:
    """Serve one code location over a Unix socket until SIGINT or SIGTERM.

    Args:
        instance: serialized reference of the instance that its runs are stored in.
        working_directory: folder in which Dagster looks for the module before sys.path.
    """
    target = ["--module-name", module, "--attribute", attribute, "--working-directory", working_directory]
    where = ["--socket", socket, "--location-name", location, "--instance-ref", instance]
    # The server answers clients with its interpreter; without this, they would start a `dagster` of the PATH.
    _run(start_command, [*where, *target, "--use-python-environment-entry-point", "--log-level", "warning"])


def _run(command: click.Command, arguments: Sequence[str]) -> None:
    with suppress(KeyboardInterrupt, click.exceptions.Exit):
        command.main(list(arguments), standalone_mode=False)
