"""`imagemill ui`: the Dagster UI over the history of one data root, or of several that share it."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import click

from dagster_project.cli.addresses import mounted, refuse_port
from dagster_project.cli.options import all_roots
from dagster_project.code_location import LOCATION
from dagster_project.code_server import CodeServer, shown
from imagemill.domain.layout import HOME_VARIABLE, DataRoot
from imagemill.errors import WrongUsage
from imagemill.pipeline.session import open_session
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
@all_roots
def command(given: list[DataRoot], port: int, host: str, allowed: tuple[str, ...]) -> None:
    """Open the UI: assets, partitions, checks, runs, backfills, sensors. Ends with Ctrl-C."""
    hosts = tuple(dict.fromkeys(allowed_host(name) for name in (host, *allowed)))
    if len(given) > 1 and not os.environ.get(HOME_VARIABLE):
        raise WrongUsage(
            "several data roots, and no history that they share",
            do=f"set {HOME_VARIABLE} to the folder of their history, or give one --data-root",
        )
    roots = [_checked(root) for root in given]
    refuse_port(host, port)
    from dagster_project.internals.instance import environment_of, environment_of_service, serialized_instance
    from dagster_project.service import ServiceSettings
    from dagster_project.supervisor import ServicePlan, service_folder, supervise, workspace_of

    served = [serialized_instance(root) for root in roots]
    instance, names = served[0][0], [name for _, name in served]
    click.echo(f"imagemill: http://{shown(host)}:{port} over {', '.join(str(root.path) for root in roots)}")
    web = ServiceSettings(instance=instance, host=host, port=port, allowed_hosts=hosts, roots=mounted(roots, names))
    with service_folder() as folder:
        servers = list(_servers(names, folder))
        plans = [
            ServicePlan("code", ServiceSettings(instance=instance, code=server), environment_of_service(root, name))
            for root, name, server in zip(roots, names, servers, strict=True)
        ]
        plans += [ServicePlan(name, web, environment_of(roots[0])) for name in ("daemon", "webserver")]
        number = supervise(folder, plans, workspace=workspace_of(servers))
    sys.exit(128 + number)


def _checked(given: DataRoot) -> DataRoot:
    """Return a data root with its recorded folders. Raises the errors of a root that the UI cannot serve."""
    with open_session(given.path) as session:
        root = session.root
    refuse_no_root(root)
    refuse_read_only(root.state)
    sweep_state(root)
    return root


def _servers(names: list[str | None], folder: Path) -> Iterator[CodeServer]:
    """Yield the code server of each root by its name, on a socket in the folder."""
    from dagster_project.service import SOCKET

    for number, name in enumerate(names):
        yield CodeServer(location=name or LOCATION, socket_path=str(folder / SOCKET.format(number)))
