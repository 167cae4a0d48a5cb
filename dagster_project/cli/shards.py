"""`imagemill shards`: the seed's command. It refuses existing shards unless told `--overwrite`."""

import os
import sys
from pathlib import Path

import click

from dagster_project.cli.options import root_options
from imagemill.buckets import BUCKETS
from imagemill.layout import DataRoot
from imagemill.pipeline.readiness import find_ready, progress_lines
from imagemill.pipeline.shards import ShardParameters, check_buckets, conflicts, plan_shards


@click.command("shards")
@click.option(
    "--bucket", "chosen", multiple=True, metavar="WxH", help="Only this bucket; may repeat (default: all seven)."
)
@click.option("--limit", type=click.IntRange(min=1), help="Samples over all buckets, after the shuffle.")
@click.option("--shuffle", is_flag=True, help="Reorder the ready samples.")
@click.option("--seed", type=int, default=1337, show_default=True, help="Seed of the shuffle.")
@click.option("--shard-size", type=click.IntRange(min=1), help="Samples per tar (default: imagemill.yaml's, 1000).")
@click.option("--overwrite", is_flag=True, help="Replace each chosen bucket's whole set.")
@click.option("--dry-run", is_flag=True, help="Count and print conflicts; write nothing.")
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
    root: DataRoot,
    chosen: tuple[str, ...],
    limit: int | None,
    shuffle: bool,
    seed: int,
    shard_size: int | None,
    overwrite: bool,
    dry_run: bool,
    progress_every: int,
    output_dir: Path | None,
) -> None:
    """Pack every ready sample into WebDataset tars, bucket by bucket."""
    buckets = check_buckets(chosen or BUCKETS)
    if dry_run:
        from resources.data_root import config_of

        parameters = ShardParameters(shard_size or config_of(root).shard_size, shuffle, seed, limit)
        sys.exit(_dry_run(root, buckets, parameters, output_dir, overwrite, progress_every))
    from dagster_project.work import open_work

    with open_work(root) as work:
        work.pack(
            buckets,
            limit=limit,
            shuffle=shuffle,
            seed=seed,
            shard_size=shard_size,
            existing="replace" if overwrite else "refuse",
            output_dir=os.path.abspath(output_dir) if output_dir else None,
            progress_every=progress_every,
        )
        if work.error:
            click.echo(f"imagemill: {work.error}", err=True)
            sys.exit(128 + work.interrupted if work.interrupted else 1)
        counts = work.counts()
        click.echo(counters({**counts["bucket_shards"], **counts["written"]}))
        sys.exit(0 if all(work.checks().values()) else 1)


def counters(counts: dict[str, int]) -> str:
    """The seed's last line."""
    names = ("total_records", "ready_records", "skipped_incomplete", "filtered", "written_samples", "written_shards")
    return " ".join(f"{name}={counts[name]}" for name in names)


def _dry_run(
    root: DataRoot,
    buckets: list[str],
    parameters: ShardParameters,
    output_dir: Path | None,
    overwrite: bool,
    every: int,
) -> int:
    from imagemill.ledger import Ledger

    with Ledger(root.ledger) as ledger:
        found = find_ready(root.stage2_jsonl, root.derived, ledger, buckets=buckets, on_ready=progress_lines(every))
    output = output_dir or root.shards
    shard_set = plan_shards(found.ready, buckets, output, parameters, "replace" if overwrite else "refuse")
    problems = conflicts(shard_set)
    for problem in problems:
        click.echo(f"conflict: {problem}", err=True)
    planned = {
        "total_records": found.total_records,
        "ready_records": len(found.ready),
        "skipped_incomplete": found.skipped_incomplete,
        "filtered": found.filtered,
        "written_samples": sum(plan.samples for plan in shard_set.plans),
        "written_shards": sum(len(plan.shards) for plan in shard_set.plans),
    }
    click.echo("dry run, nothing written: " + counters(planned))
    return 1 if problems else 0
