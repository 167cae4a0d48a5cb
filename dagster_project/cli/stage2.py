"""`imagemill stage2`: embeddings and records, without shards."""

import sys

import click

from dagster_project.cli.options import root_options
from dagster_project.cli.run import Passes, pass_names
from imagemill.layout import DataRoot


@click.command("stage2")
@click.option(
    "--pass", "single", multiple=True, type=click.Choice(pass_names()), help="One pass; may repeat (default: all)."
)
@click.option("--passes", type=Passes(), default=(), metavar="A,B", help="The same as several --pass.")
@click.option(
    "--limit", type=click.IntRange(min=1), help="At most this many images that still have work, in name order."
)
@click.option("--verify", is_flag=True, help="Only read back every record, header and value; exit 1 on any finding.")
@click.option("--fail-on-skip", is_flag=True, help="Exit 1 if any input was refused.")
@root_options
def command(
    root: DataRoot,
    single: tuple[str, ...],
    passes: tuple[str, ...],
    limit: int | None,
    verify: bool,
    fail_on_skip: bool,
) -> None:
    """Make the missing embeddings and write the records. Resume = run again."""
    if verify:
        from dagster_project.cli.verify import show
        from imagemill.validation.validator import verify_stage2

        sys.exit(show([verify_stage2(root.stage2_jsonl, root.derived)]))
    from dagster_project.summary import exit_code, summary_lines
    from dagster_project.work import chosen_specs, open_work
    from imagemill.pipeline.story import read_status

    names = (*single, *passes)
    with open_work(root) as work:
        work.embed([] if names and set(names) == {"migrate"} else chosen_specs(names), limit=limit)
        work.write_records()
        status = read_status(root)
        for line in summary_lines(work, status):
            click.echo(line)
        sys.exit(exit_code(work, status, fail_on_skip=fail_on_skip))
