"""`imagemill marks`: list or remove the marks that were set in the viewer."""

import click
import msgspec

from dagster_project.cli.options import root_options
from imagemill.errors import WrongUsage
from imagemill.pipeline.session import Session
from imagemill.store.locations import refuse_no_root
from imagemill.text.units import counted


@click.command("marks")
@click.option("--clear", is_flag=True, help="Remove all marks. The images stay as they are.")
@click.option("--json", "as_json", is_flag=True, help="For programs: ids with the time of their mark.")
@root_options
def command(session: Session, clear: bool, as_json: bool) -> None:
    """List the marked images, which `imagemill withdraw --marked` takes out of the shards."""
    if clear and as_json:
        raise WrongUsage("--clear and --json exclude each other", do="give one of them")
    refuse_no_root(session.root)
    if clear:
        marks = session.ledger.marks()
        session.ledger.unmark(marks)
        click.echo(f"removed {counted(len(marks), 'mark')}")
        return
    marks = session.reading.marks()
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(marks)).decode())
        return
    for image_id, at in marks.items():
        click.echo(f"{image_id}, marked {at}")
    click.echo(counted(len(marks), "marked image"))
