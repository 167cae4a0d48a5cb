"""`imagemill serve`: one service in the foreground, as process 1 of a container or under a service manager."""

import os
import signal
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

import click
from msgspec.structs import replace

from dagster_project.cli.addresses import code_servers, mounted, refuse_port
from dagster_project.cli.options import OneOf, root_options
from dagster_project.code_location import LOCATION
from dagster_project.code_server import CodeServer, shown
from imagemill.domain.layout import HOME_VARIABLE, DataRoot, local_path
from imagemill.errors import MissingInput, WrongUsage
from imagemill.pipeline.session import Session
from imagemill.store.locations import refuse_no_root, refuse_read_only, sweep_state
from imagemill.web_guard import allowed_host

if TYPE_CHECKING:
    from dagster_project.service import ServiceSettings

WEBSERVER_PORT, CODE_PORT = 3000, 4000
_PORTS = {"webserver": WEBSERVER_PORT, "code": CODE_PORT}

_port = click.IntRange(1, 65535)
# The configuration of the data root is not read: a service without definitions, or a health check, does not depend on it.
_root = click.option(
    "--data-root",
    "root",
    metavar="DIR",
    callback=lambda _context, _option, given: DataRoot.resolve(given),
    help="Data root of the history, unless $DAGSTER_HOME is set (default: $IMAGEMILL_DATA_ROOT, else data/).",
)
_code = click.option(
    "--code",
    multiple=True,
    metavar="[NAME=]HOST:PORT",
    help=f"Code server, and the name of its location (default: {LOCATION}); may repeat.",
)
_workspace = click.option("--workspace", metavar="FILE", help="Dagster workspace file that names the code servers.")


@click.group("serve")
def command() -> None:
    """Run one service in the foreground until SIGTERM (exit code 0) or Ctrl-C (130)."""
    # As process 1, which ignores signals without a handler, it can then be stopped while it starts, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))


@command.command("webserver")
@_code
@_workspace
@click.option("--port", type=_port, default=WEBSERVER_PORT, show_default=True, help="Port to listen on.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--allowed-host", "allowed", multiple=True, metavar="NAME", help="As for `imagemill ui`; may repeat.")
@click.option("--read-only", is_flag=True, help="Refuse changes: no launches, terminations, deletions, or marks.")
@click.option("--look", multiple=True, metavar="DIR", help="Data root whose photographs it shows; may repeat.")
@_root
def webserver(
    root: DataRoot,
    code: tuple[str, ...],
    workspace: str | None,
    port: int,
    host: str,
    allowed: tuple[str, ...],
    read_only: bool,
    look: tuple[str, ...],
) -> None:
    """Serve the UI of the history in $DAGSTER_HOME, else of the data root."""
    hosts = tuple(dict.fromkeys(allowed_host(name) for name in (host, *allowed)))
    text = _workspace_text(code, workspace)
    _refuse_no_history(root)
    refuse_port(host, port)
    from dagster_project.internals.instance import environment_of, serialized_history
    from dagster_project.service import ServiceSettings

    own = [] if os.environ.get(HOME_VARIABLE) else [root]
    roots = dict.fromkeys([*own, *(DataRoot.resolve(folder) for folder in look)])
    for each in roots:
        refuse_no_root(each)
    instance, names = serialized_history(root, roots)
    settings = ServiceSettings(
        instance=instance, host=host, port=port, allowed_hosts=hosts, read_only=read_only, roots=mounted(roots, names)
    )  # fmt: skip
    click.echo(f"imagemill: http://{shown(host)}:{port}")
    _run("webserver", environment_of(root), settings, text)


@command.command("daemon")
@_code
@_workspace
@_root
def daemon(root: DataRoot, code: tuple[str, ...], workspace: str | None) -> None:
    """Run sensors, schedules, queue and backfills of the history in $DAGSTER_HOME, else of the data root."""
    text = _workspace_text(code, workspace)
    _refuse_no_history(root)
    from dagster_project.internals.instance import environment_of, serialized_history
    from dagster_project.service import ServiceSettings

    _run("daemon", environment_of(root), ServiceSettings(instance=serialized_history(root)[0]), text)


@command.command("code")
@click.option("--port", type=_port, help=f"Port to listen on (default: {CODE_PORT}, unless --socket is given).")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--socket", metavar="PATH", help="Unix socket to listen on instead of a port.")
@root_options
def code(session: Session, port: int | None, host: str, socket: str | None) -> None:
    """Serve the definitions of one data root, and execute its runs. It has no log-in: keep its port private."""
    root = session.root
    refuse_no_root(root)
    refuse_read_only(root.state)
    if socket and port:
        raise WrongUsage("--port and --socket are both given", do="give one of them")
    sweep_state(root)
    from dagster_project.internals.instance import environment_of_service, serialized_instance
    from dagster_project.service import ServiceSettings

    if socket:
        server = CodeServer(location=LOCATION, socket_path=str(local_path(socket, "--socket")))
    else:
        server = CodeServer(location=LOCATION, host=host, port=port or CODE_PORT)
        # Code servers share a port without an error, and each would answer a part of the requests.
        refuse_port(host, server.port)
    instance, name = serialized_instance(root)
    settings = ServiceSettings(instance=instance, code=replace(server, location=name or LOCATION))
    click.echo(f"imagemill: code server on {socket or f'{shown(host)}:{server.port}'} over {root.path}")
    _run("code", environment_of_service(root, name), settings)


@command.command("health")
@click.argument("service", type=OneOf(("webserver", "daemon", "code")))
@click.option("--port", type=_port, help="Port of the service (default: as for `imagemill serve`).")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address of the service.")
@click.option("--socket", metavar="PATH", help="Unix socket of the code server.")
@_root
def health(root: DataRoot, service: str, port: int | None, host: str, socket: str | None) -> None:
    """Exit with 0 if a service on this machine works, else with 1 and the reason."""
    from dagster_project.internals import health as checks

    port = port or _PORTS.get(service, 0)
    if service == "webserver":
        checks.check_webserver(host, port)
    elif service == "code":
        path = str(local_path(socket, "--socket")) if socket else ""
        checks.check_code_server(CodeServer(location=LOCATION, socket_path=path, host=host, port=port))
    else:
        _refuse_no_history(root)
        checks.check_daemon(root)
    click.echo(f"{service}: healthy")


@command.command("migrate")
@_root
def migrate(root: DataRoot) -> None:
    """Migrate the history to the schema of the installed Dagster. Stop all services and runs first."""
    _refuse_no_history(root)
    from dagster_project.internals.instance import read_instance

    with read_instance(root) as instance:
        instance.upgrade(click.echo)


def _workspace_text(code: tuple[str, ...], workspace: str | None) -> str:
    """Return the text of the workspace file that the options describe."""
    from dagster_project.supervisor import workspace_of

    if bool(code) == bool(workspace):
        raise WrongUsage("no code server is given" if not code else "--code and --workspace are both given",
                         do="give --code HOST:PORT for each code server, or --workspace FILE")  # fmt: skip
    if not workspace:
        return workspace_of(code_servers(code))
    file = local_path(workspace, "--workspace")
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise MissingInput(
            "cannot read the workspace file", where=file, why=error.strerror, do="check --workspace"
        ) from error


def _refuse_no_history(root: DataRoot) -> None:
    """Raise MissingInput if the history would be in a data root that does not exist."""
    if not os.environ.get(HOME_VARIABLE):
        refuse_no_root(root)


def _run(name: str, environment: Mapping[str, str], settings: "ServiceSettings", workspace: str = "") -> None:
    """Run a service until a signal, and exit. SIGTERM is the usual end of a service, so its exit code is 0."""
    from dagster_project.supervisor import ServicePlan, service_folder, supervise

    with service_folder() as folder:
        number = supervise(folder, [ServicePlan(name, settings, environment)], workspace=workspace)
    sys.exit(0 if number == signal.SIGTERM else 128 + number)
