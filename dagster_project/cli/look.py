"""`imagemill look`: the photographs of a data root in a browser."""

import secrets
import webbrowser

import click

from dagster_project.cli.addresses import refuse_port
from dagster_project.cli.options import root_options
from imagemill.domain.layout import local_path
from imagemill.errors import WrongUsage
from imagemill.pipeline.session import Session
from imagemill.store.locations import refuse_gone, refuse_no_root
from imagemill.text.units import counted


@click.command("look")
@click.option("--port", type=click.IntRange(1, 65535), default=3100, show_default=True, help="Port on this machine.")
@click.option("--no-open", is_flag=True, help="Print the address, and open no browser.")
@click.option("--read-only", is_flag=True, help="Show everything, and change nothing.")
@click.option("--export", "file", metavar="FILE", help="Write one HTML file to send instead: up to 500 pictures.")
@click.option("--filter", "query", default="", metavar="QUERY", help="For --export: end of a grid's address.")
@root_options
def command(session: Session, port: int, no_open: bool, read_only: bool, file: str | None, query: str) -> None:
    """View photographs, crops, captions and problems; mark images and withdraw them. Ends with Ctrl-C."""
    root = session.root
    refuse_no_root(root)
    refuse_gone(root, "approved")
    if query and not file:
        raise WrongUsage("--filter is given without --export", do="give --export FILE.html, or leave out --filter")
    from imagemill.look.server import export, serve

    if file:
        shown, number = export(root.path, local_path(file, "--export"), query)
        click.echo(f"{file}: {shown:,} of {counted(number, 'input')}")
        return
    refuse_port("127.0.0.1", port)

    token = secrets.token_urlsafe(24)
    address = f"http://127.0.0.1:{port}/?token={token}"
    click.echo(f"imagemill: {address} over {root.path}")
    if not no_open:
        webbrowser.open(address)
    serve(root.path, port=port, token=token, read_only=read_only)
