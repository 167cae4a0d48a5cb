"""`imagemill withdraw ID…`: samples that nobody should train on, out of the shards without rewriting a tar."""

import sys

import click

from dagster_project.cli.ended import leave_if_ended
from dagster_project.cli.options import root_options
from dagster_project.cli.shards import told
from imagemill.buckets import BUCKETS
from imagemill.errors import MissingInput
from imagemill.layout import DataRoot
from imagemill.ledger import Ledger
from imagemill.pipeline.stage2.recorded import read_recorded


@click.command("withdraw")
@click.argument("ids", nargs=-1, required=True, metavar="ID…")
@click.option("--restore", is_flag=True, help="Undo: they count again.")
@root_options
def command(root: DataRoot, ids: tuple[str, ...], restore: bool) -> None:
    """Take images out of the shards, or bring them back. Their files and records stay."""
    from dagster_project.work import open_work

    with open_work(root) as work:
        with Ledger(root.ledger) as ledger:
            _refuse_unknown(root, ledger, ids)
            (ledger.restore if restore else ledger.withdraw)(ids)
        work.pack(BUCKETS, existing="withdraw")
        leave_if_ended(work)
        counts = work.counts()
        click.echo(f"{'restored' if restore else 'withdrawn'}: {', '.join(ids)}")
        for line in told({**counts["bucket_shards"], **counts["written"]}):
            click.echo(line)
        sys.exit(0 if all(work.checks().values()) else 1)


def _refuse_unknown(root: DataRoot, ledger: Ledger, ids: tuple[str, ...]) -> None:
    """A typing error must not look like a sample that is gone."""
    known = {*ledger.ids("sources"), *ledger.ids("withdrawn"), *read_recorded(root.stage2_jsonl).lines}
    if unknown := [image_id for image_id in ids if image_id not in known]:
        raise MissingInput(
            f"no image {', '.join(unknown)}",
            where=root.path,
            why="nothing was withdrawn or restored",
            do="check the ids",
        )
