"""`imagemill ui`: the Dagster UI over this data root's history."""

import os
import socket
import sys

import click

from dagster_project.cli.options import root_options
from imagemill.errors import WrongUsage
from imagemill.pipeline.session import Session
from imagemill.store.locations import refuse_no_root, refuse_read_only, sweep_state
from imagemill.web_guard import allowed_host


@click.command("ui")
@click.option("--port", type=click.IntRange(1, 65535), default=3000, show_default=True, help="Port on this machine.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option(
    "--allowed-host",
    "allowed",
    multiple=True,
    metavar="NAME",
    help="Further name under which browsers may open it; may repeat. Always: localhost, 127.0.0.1, [::1], --host.",
)
@root_options
def command(session: Session, port: int, host: str, allowed: tuple[str, ...]) -> None:
    """Open the UI: assets, partitions, checks, runs, backfills, sensors. Ends with Ctrl-C."""
    hosts = tuple(dict.fromkeys(allowed_host(name) for name in (host, *allowed)))
    root = session.root
    refuse_no_root(root)
    refuse_read_only(root.state)
    sweep_state(root)
    _refuse_port(host, port)
    from dagster_project.internals.instance import environment_of, serialized_instance
    from dagster_project.service import ServiceSettings
    from dagster_project.supervisor import service_folder, supervise

    settings = ServiceSettings(instance=serialized_instance(root), host=host, port=port, allowed_hosts=hosts)
    click.echo(f"imagemill: http://{_shown(host)}:{port} over {root.path}")
    with service_folder(settings) as folder:
        number = supervise(folder, environment_of(root))
    sys.exit(128 + number)


def _shown(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _refuse_port(host: str, port: int) -> None:
    """Raise WrongUsage if this process cannot listen there."""
    try:
        (family, kind, protocol, _, address), *_ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        with socket.socket(family, kind, protocol) as trial:
            if os.name == "posix":
                trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            trial.bind(address)
    except OSError as error:
        raise WrongUsage(
            f"cannot listen on {_shown(host)}:{port}", why=error.strerror, do="give another --port or --host"
        ) from error
