"""`imagemill trust ROOT`: consent to the settings of a data root that can run code or send data."""

import click

from imagemill.domain.layout import DataRoot
from imagemill.errors import MissingInput
from imagemill.store.trust import demands_of, record_consent


@click.command("trust")
@click.argument("root", metavar="ROOT")
def command(root: str) -> None:
    """Print the settings inside ROOT that can run code or send data, and permit them until their file changes."""
    place = DataRoot.resolve(root)
    if not place.path.is_dir():
        raise MissingInput("no such data root", where=place.path, do="check the folder")
    demands = demands_of(place)
    if not demands:
        click.echo(f"nothing in {place.path} needs consent")
        return
    for demand in demands:
        click.echo(f"permitted: {demand.file}: {demand}")
    store = record_consent([demand.file for demand in demands])
    click.echo(f"recorded in {store}, until these files change")
