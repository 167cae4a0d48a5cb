"""`imagemill run`: approved images → embeddings → records → shards → checks."""

import sys

import click

from dagster_project.cli.options import accept_node, fail_on_skip, root_options
from imagemill.config import read_share
from imagemill.pipeline.session import Session
from imagemill.pipeline.stage2.passes import Passes, pass_names
from imagemill.store.locations import refuse_no_images, refuse_no_root


def split_names(context: click.Context, option: click.Parameter, given: str) -> tuple[str, ...]:
    """Return the pass names in a text with commas. Raises BadParameter for an unknown name."""
    names = tuple(name.strip() for name in given.split(",") if name.strip())
    for name in names:
        if name not in pass_names():
            raise click.BadParameter(f"{name!r} is not one of {', '.join(pass_names())}")
    return names


@click.command("run")
@click.option(
    "--approved",
    metavar="DIR|URL",
    help="Folder of the images instead of approved/, or s3://bucket/prefix; only read, and remembered.",
)
@click.option(
    "--share",
    metavar="I/N",
    callback=lambda _, __, given: given and read_share(given, f"--share {given}"),
    help="Only the images of share I of N, counted from 0, for N data roots over one folder; remembered.",
)
@click.option("--passes", callback=split_names, default="", metavar="A,B", help="Embedding passes (default: all).")
@click.option(
    "--accept-renames",
    is_flag=True,
    help="Renamed images take over the captions and records of their earlier names, which end.",
)
@accept_node
@fail_on_skip
@root_options
def command(
    session: Session,
    approved: str | None,
    share: str | None,
    passes: tuple[str, ...],
    accept_renames: bool,
    accept_node: str | None,
    fail_on_skip: bool,
) -> None:
    """Bring everything up to date: only what is missing, invalid or stale is made."""
    from dagster_project.snapshot import Unchanged, settled_snapshot
    from dagster_project.summary import report, report_unchanged

    if approved:
        refuse_no_root(session.root, may_begin=True)
        session.put("approved", approved)
    refuse_no_images(session.root)
    if share:
        session.take_share(share)
    if not passes and (snapshot := settled_snapshot(session)) and not (accept_renames and snapshot.renames):
        sys.exit(report_unchanged(Unchanged(session, snapshot), fail_on_skip=fail_on_skip))
    from dagster_project.work import open_command

    with open_command(session) as work:
        chosen = Passes.named(passes)
        if accept_renames:
            work.accept_renames()
        work.embed(chosen, packs=True, accept_node=accept_node)
        if work.interrupted:
            work.write_records(chosen)
        else:
            work.publish(chosen)
            work.end_former_names()
        sys.exit(report(work, fail_on_skip=fail_on_skip, everything=not passes))
