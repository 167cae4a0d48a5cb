"""`imagemill look`: the photographs of a data root in a browser."""

import secrets
import webbrowser

import click

from dagster_project.cli.addresses import refuse_port
from dagster_project.cli.options import root_options
from imagemill.pipeline.session import Session
from imagemill.store.locations import refuse_gone, refuse_no_root


@click.command("look")
@click.option("--port", type=click.IntRange(1, 65535), default=3100, show_default=True, help="Port on this machine.")
@click.option("--no-open", is_flag=True, help="Print the address, and open no browser.")
@click.option("--read-only", is_flag=True, help="Show everything, and change nothing.")
@root_options
def command(session: Session, port: int, no_open: bool, read_only: bool) -> None:
    """View photographs, crops, captions and problems; mark images and withdraw them. Ends with Ctrl-C."""
    root = session.root
    refuse_no_root(root)
    refuse_gone(root, "approved")
    refuse_port("127.0.0.1", port)
    from imagemill.look.server import serve

    token = secrets.token_urlsafe(24)
    address = f"http://127.0.0.1:{port}/?token={token}"
    click.echo(f"imagemill: {address} over {root.path}")
    if not no_open:
        webbrowser.open(address)
    serve(root.path, port=port, token=token, read_only=read_only)
