"""`imagemill withdraw ID…`: take samples out of the shards; only the tars that contain them are written again."""

from collections.abc import Sequence

import click

from dagster_project.cli.exit_codes import leave_by_checks, leave_if_ended
from dagster_project.cli.options import root_options
from dagster_project.cli.shards import result_lines
from imagemill.domain.buckets import BUCKETS
from imagemill.domain.ids import image_id_of
from imagemill.domain.layout import DataRoot
from imagemill.errors import MissingInput, WrongUsage
from imagemill.pipeline.session import Session
from imagemill.pipeline.shards.shard_sets import bucket_folder, live_lines, read_manifest, refuse_no_sets
from imagemill.pipeline.stage2.record_index import known_images, read_recorded
from imagemill.store.locations import refuse_gone
from imagemill.text.close_names import MOST, name_hint
from imagemill.text.units import counted

# Images that a message names.
SHOWN = 20


@click.command("withdraw")
@click.argument("ids", nargs=-1, metavar="[ID…]")
@click.option("--marked", is_flag=True, help="The images that are marked in the viewer; removes the marks.")
@click.option(
    "--from",
    "file",
    metavar="FILE",
    help="The images that a text file lists, one in each line; `-` for standard input.",
)
@click.option("--restore", is_flag=True, help="Undo: they count again.")
@root_options
def command(session: Session, ids: tuple[str, ...], marked: bool, file: str | None, restore: bool) -> None:
    """Take images out of the shards, or bring them back. Their files and records stay.

    An ID is that of an image, or the path of its file below `approved/`. Images of other shares are left out.
    """
    root = session.root
    if bool(ids) + marked + (file is not None) != 1:
        raise WrongUsage("no image is named, or in several ways", do="give ids, --from FILE or --marked: one of them")
    if marked and restore:
        raise WrongUsage(
            "--marked and --restore exclude each other",
            why="marks are removed when their images are withdrawn",
            do="give ids or --from FILE",
        )
    refuse_gone(root, "shards")
    refuse_no_sets(root.shards)
    given = tuple(session.reading.marks()) if marked else ids if file is None else tuple(_listed(file))
    if not given:
        click.echo("nothing to do: no image is marked" if marked else f"nothing to do: {file} lists no image")
        return
    from dagster_project.work import open_command

    with open_command(session) as work:
        ids = _known_ids(session, given)
        if not ids:
            return
        (session.ledger.restore if restore else session.ledger.withdraw)(ids)
        work.pack(BUCKETS, existing="withdraw")
        leave_if_ended(work)
        counts = work.counts()
        click.echo(f"{'restored' if restore else 'withdrawn'}: {_named(ids)}")
        if restore and (absent := set(ids) - _counting(root)):
            click.echo(
                f"not in any shard now: {_named(sorted(absent))}; `imagemill shards --append` packs what is ready"
            )
        for line in result_lines({**counts["bucket_shards"], **counts["written"]}):
            click.echo(line)
        leave_by_checks(work)


def _listed(file: str) -> list[str]:
    """Return the lines of a file that are not empty."""
    try:
        with click.open_file(file, encoding="utf-8-sig", errors="surrogateescape") as lines:
            return list(dict.fromkeys(line for line in lines.read().splitlines() if line.strip()))
    except OSError as error:
        raise WrongUsage(f"cannot read the list of images: {error.strerror}", where=file, do="check the path") from None


def _named(ids: Sequence[str]) -> str:
    rest = f" and {len(ids) - SHOWN:,} more" if len(ids) > SHOWN else ""
    return f"{', '.join(ids[:SHOWN])}{rest}"


def _known_ids(session: Session, given: tuple[str, ...]) -> tuple[str, ...]:
    """Return the ids that are meant. Unknown ones are refused: a typing error must not look like a withdrawn sample.

    Those of other shares are left out with a line, so that all shares can be given one list.
    """
    root = session.root
    known = known_images(session.ledger, read_recorded(root.stage2_jsonl))
    if not known.issuperset(given):
        known |= _counting(root)
    ids = tuple(each if each in known else image_id_of(each) for each in given)
    if share := session.inputs.own_share:
        own = tuple(pair for pair in zip(given, ids, strict=True) if pair[1] in known or share.has(pair[1]))
        if left_out := len(ids) - len(own):
            click.echo(f"left out: {counted(left_out, 'image')} of other shares than {share}")
        given, ids = tuple(each for each, _ in own), tuple(image_id for _, image_id in own)
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
