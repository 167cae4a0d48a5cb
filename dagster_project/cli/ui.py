"""`imagemill ui`: the Dagster UI over this data root's history."""

import sys

import click

from dagster_project.cli.addresses import refuse_port, shown
from dagster_project.cli.options import root_options
from dagster_project.code_location import LOCATION
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
    refuse_port(host, port)
    from dagster_project.code_server import CodeServer
    from dagster_project.internals.instance import environment_of, serialized_instance
    from dagster_project.service import SOCKET, ServiceSettings
    from dagster_project.supervisor import SERVICES, service_folder, supervise, workspace_of
    from resources.keys import NAME

    instance = serialized_instance(root)
    click.echo(f"imagemill: http://{shown(host)}:{port} over {root.path}")
    with service_folder() as folder:
        server = CodeServer(location=NAME or LOCATION, socket_path=str(folder / SOCKET))
        settings = ServiceSettings(instance=instance, code=server, host=host, port=port, allowed_hosts=hosts)
        number = supervise(folder, settings, environment_of(root), names=SERVICES, workspace=workspace_of([server]))
    sys.exit(128 + number)
