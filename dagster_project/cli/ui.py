"""`imagemill ui`: the Dagster UI over this data root's history."""

import os
import sys
from pathlib import Path

import click

from dagster_project.cli.options import root_options
from imagemill.layout import DataRoot


@click.command("ui")
@click.option("--port", type=int, default=3000, show_default=True, help="Port on this machine.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@root_options
def command(root: DataRoot, port: int, host: str) -> None:
    """Open the UI: assets, partitions, checks, runs, backfills, sensors. Ends with Ctrl-C."""
    from dagster_project.instance import environment_of, prepare_home

    prepare_home(root)
    os.environ.update(environment_of(root))
    click.echo(f"imagemill: http://{host}:{port} over {root.path}")
    arguments = ["-m", "dagster", "dev", *_location(), "--host", host, "--port", str(port)]
    os.execv(sys.executable, [sys.executable, *arguments])


def _location() -> list[str]:
    """The checkout's workspace.yaml, else the installed module."""
    workspace = Path(__file__).parents[2] / "workspace.yaml"
    return ["-w", str(workspace)] if workspace.is_file() else ["-m", "dagster_project.definitions"]
