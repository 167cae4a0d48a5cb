"""`imagemill withdraw ID…`: take samples out of the shards; only the tars that contain them are written again."""

import click

from dagster_project.cli.exit_codes import leave_by_checks, leave_if_ended
from dagster_project.cli.options import root_options
from dagster_project.cli.shards import result_lines
from imagemill.domain.buckets import BUCKETS
from imagemill.domain.ids import image_id_of
from imagemill.domain.layout import DataRoot
from imagemill.errors import MissingInput
from imagemill.pipeline.session import Session
from imagemill.pipeline.shards.shard_sets import bucket_folder, live_lines, read_manifest, refuse_no_sets
from imagemill.pipeline.stage2.record_index import read_recorded
from imagemill.store.ledger import Ledger
from imagemill.store.locations import refuse_gone
from imagemill.text.close_names import MOST, name_hint


@click.command("withdraw")
@click.argument("ids", nargs=-1, required=True, metavar="ID…")
@click.option("--restore", is_flag=True, help="Undo: they count again.")
@root_options
def command(session: Session, ids: tuple[str, ...], restore: bool) -> None:
    """Take images out of the shards, or bring them back. Their files and records stay.

    An ID is that of an image, or the path of its file below `approved/`.
    """
    root = session.root
    refuse_gone(root, "shards")
    refuse_no_sets(root.shards)
    from dagster_project.work import open_command

    with open_command(session) as work:
        ids = _known_ids(root, session.ledger, ids)
        (session.ledger.restore if restore else session.ledger.withdraw)(ids)
        work.pack(BUCKETS, existing="withdraw")
        leave_if_ended(work)
        counts = work.counts()
        click.echo(f"{'restored' if restore else 'withdrawn'}: {', '.join(ids)}")
        if restore and (absent := set(ids) - _counting(root)):
            click.echo(
                f"not in any shard now: {', '.join(sorted(absent))}; `imagemill shards --append` packs what is ready"
            )
        for line in result_lines({**counts["bucket_shards"], **counts["written"]}):
            click.echo(line)
        leave_by_checks(work)


def _known_ids(root: DataRoot, ledger: Ledger, given: tuple[str, ...]) -> tuple[str, ...]:
    """Return the ids that are meant. Unknown ones are refused: a typing error must not look like a withdrawn sample."""
    known = {*ledger.ids("sources"), *ledger.ids("withdrawn"), *read_recorded(root.stage2_jsonl).lines}
    if not known.issuperset(given):
        known |= _counting(root)
    ids = tuple(each if each in known else image_id_of(each) for each in given)
    if unknown := {each for each, image_id in zip(given, ids, strict=True) if image_id not in known}:
        similar = [f"for {one!r}, {name_hint(one, known) or 'there are no images'}" for one in sorted(unknown)[:MOST]]
        raise MissingInput(
            f"no image {', '.join(sorted(unknown))}",
            where=root.path,
            why="nothing was withdrawn or restored",
            do="; ".join(["check the ids", *similar]),
        )
    return ids


def _counting(root: DataRoot) -> set[str]:
    """Return the ids of the live samples in all buckets."""
    folders = [bucket_folder(root.shards, bucket) for bucket in BUCKETS]
    return {line.image_id for folder in folders if read_manifest(folder) for line in live_lines(folder)}
