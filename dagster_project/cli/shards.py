"""`imagemill shards`: the seed's command. It refuses existing shards unless told `--overwrite`."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import click

from dagster_project.cli.ended import leave_by_checks, leave_if_ended
from dagster_project.cli.options import root_options
from imagemill.domain.buckets import BUCKETS
from imagemill.errors import WrongUsage
from imagemill.pipeline.session import Session
from imagemill.pipeline.shards.packing import Packing, dry_run
from imagemill.pipeline.shards.shard_plan import Existing, check_buckets
from imagemill.pipeline.shards.shard_sets import refuse_no_sets
from imagemill.store.locations import refuse_no_folder


@click.command("shards")
@click.option(
    "--bucket", "chosen", multiple=True, metavar="WxH", help="Only this bucket; may repeat (default: all seven)."
)
@click.option("--limit", type=click.IntRange(min=1), help="Samples over all buckets, after the shuffle.")
@click.option("--shuffle", is_flag=True, default=None, help="Reorder the ready samples.")
@click.option("--seed", type=click.IntRange(min=0), help="Seed of the shuffle (default: 1337).")
@click.option("--shard-size", type=click.IntRange(min=1), help="Samples per tar (default: imagemill.yaml's, 1000).")
@click.option("--overwrite", is_flag=True, help="Replace each chosen bucket's whole set.")
@click.option("--append", is_flag=True, help="New tars and tombstones over sets that stay; nothing is rewritten.")
@click.option("--repack", is_flag=True, help="Write sets anew that were appended to or have tombstones.")
@click.option("--workers", type=click.IntRange(min=1), help="Tars written at a time (default: imagemill.yaml's, 2).")
@click.option("--allow-preview", is_flag=True, help="Pack captions of a preview model too.")
@click.option("--dry-run", "rehearse", is_flag=True, help="Count and print conflicts; write nothing.")
@click.option(
    "--progress-every",
    type=click.IntRange(min=1),
    default=500,
    show_default=True,
    help="Ready records per progress line.",
)
@click.option(
    "--output-dir", type=click.Path(path_type=Path), help="Folder for the shards (default: shards/ in the data root)."
)
@root_options
def command(
    session: Session,
    chosen: tuple[str, ...],
    limit: int | None,
    shuffle: bool | None,
    seed: int | None,
    shard_size: int | None,
    overwrite: bool,
    append: bool,
    repack: bool,
    workers: int | None,
    allow_preview: bool,
    rehearse: bool,
    progress_every: int,
    output_dir: Path | None,
) -> None:
    """Pack every ready sample into WebDataset tars, bucket by bucket."""
    buckets = check_buckets(chosen or BUCKETS)
    existing = _existing(overwrite=overwrite, append=append, repack=repack)
    output = output_dir or session.root.shards
    refuse_no_folder("shards", output)
    refuse_no_sets(output)
    parameters = {"shard_size": shard_size, "shuffle": shuffle, "seed": seed, "limit": limit}
    if rehearse:
        asked = {name: value for name, value in parameters.items() if value is not None}
        sys.exit(_dry_run(session, Packing(buckets, output, existing, asked, progress_every, allow_preview)))
    from dagster_project.work import open_work

    with open_work(session) as work:
        work.pack(
            buckets,
            **{**parameters, "shuffle": shuffle and "yes"},
            existing=existing,
            workers=workers,
            output_dir=os.path.abspath(output_dir) if output_dir else None,
            progress_every=progress_every,
            allow_preview=allow_preview,
        )
        leave_if_ended(work)
        counts = work.counts()
        for line in told({**counts["bucket_shards"], **counts["written"]}):
            click.echo(line)
        leave_by_checks(work)


def _existing(**asked: bool) -> Existing:
    names = [name for name, given in asked.items() if given]
    if len(names) > 1:
        raise WrongUsage(f"--{names[0]} and --{names[1]} contradict each other", do="give one of them")
    modes: dict[str, Existing] = {"overwrite": "replace", "append": "append", "repack": "repack"}
    return modes[names[0]] if names else "refuse"


def told(counts: dict[str, int]) -> Iterator[str]:
    """What a packing command says at its end; the seed's line is the last one."""
    if dead := counts.get("tombstones"):
        yield (
            f"{dead} samples in the tars count no more (tombstones.jsonl): imagemill.reading leaves them out, readers that "
            "take every member of a tar still see them until `imagemill shards --repack`"
        )
    yield counters(counts)


def counters(counts: dict[str, int]) -> str:
    """The seed's last line."""
    names = ("total_records", "ready_records", "skipped_incomplete", "filtered", "written_samples", "written_shards")
    return " ".join(f"{name}={counts[name]}" for name in names)


def _dry_run(session: Session, packing: Packing) -> int:
    found = dry_run(session.overview(), session.config, session.reading, packing)
    for problem in found.conflicts:
        click.echo(f"conflict: {problem}", err=True)
    click.echo("dry run, nothing written: " + counters(found.counts))
    return 1 if found.conflicts else 0
