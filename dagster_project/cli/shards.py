"""`imagemill shards`: pack ready samples into tars. Existing shards are refused unless an option permits a change."""

import sys
from collections.abc import Iterator, Mapping

import click

from dagster_project.cli.exit_codes import leave_by_checks, leave_if_ended
from dagster_project.cli.options import options, root_options
from imagemill.domain.buckets import BUCKETS
from imagemill.domain.layout import local_path
from imagemill.errors import WrongUsage
from imagemill.options import ShardOptions
from imagemill.pipeline.session import Session
from imagemill.pipeline.shards.packing import PackRequest, change_lines, dry_run
from imagemill.pipeline.shards.shard_plan import WriteMode
from imagemill.pipeline.shards.shard_sets import refuse_no_sets
from imagemill.store.locations import refuse_no_folder


@click.command("shards")
@options(ShardOptions)
@click.option("--overwrite", is_flag=True, help="Replace each chosen bucket's whole set.")
@click.option("--append", is_flag=True, help="Bring sets up to date; tars without a change stay.")
@click.option("--repack", is_flag=True, help="Pack sets from scratch that were brought up to date in place.")
@root_options
def command(session: Session, options: ShardOptions, **modes: bool) -> None:
    """Pack every ready sample into WebDataset tars, bucket by bucket."""
    output = local_path(options.output_dir, "--output-dir") if options.output_dir else session.root.shards
    options = options.model_copy(
        update={"existing": _existing(modes), "output_dir": options.output_dir and str(output)}
    )
    packing = options.packing(BUCKETS, output)
    refuse_no_folder("shards", output)
    refuse_no_sets(output)
    if options.dry_run:
        sys.exit(_dry_run(session, packing))
    from dagster_project.work import open_command

    with open_command(session) as work:
        work.pack(packing.buckets, **options.given() | {"only": packing.buckets})
        leave_if_ended(work)
        counts = work.counts()
        for line in result_lines({**counts["bucket_shards"], **counts["written"]}):
            click.echo(line)
        leave_by_checks(work)


def _existing(modes: Mapping[str, bool]) -> WriteMode:
    names = [name for name, given in modes.items() if given]
    if len(names) > 1:
        raise WrongUsage(f"--{names[0]} and --{names[1]} contradict each other", do="give one of them")
    existing: dict[str, WriteMode] = {"overwrite": "replace", "append": "append", "repack": "repack"}
    return existing[names[0]] if names else "refuse"


def result_lines(counts: dict[str, int]) -> Iterator[str]:
    """Yield the result of a packing command; the line of counters is the last one."""
    yield from change_lines(counts)
    yield counters(counts)


def counters(counts: dict[str, int]) -> str:
    """Return the line of counters.

    Spec: docs/spec/shards.md#progress
    """
    names = ("total_records", "ready_records", "skipped_incomplete", "filtered", "written_samples", "written_shards")
    return " ".join(f"{name}={counts[name]}" for name in names)


def _dry_run(session: Session, packing: PackRequest) -> int:
    found = dry_run(session.overview(), session.config, session.reading, packing)
    for problem in found.conflicts:
        click.echo(f"conflict: {problem}", err=True)
    click.echo("dry run, nothing written: " + counters(found.counts))
    return 1 if found.conflicts else 0
