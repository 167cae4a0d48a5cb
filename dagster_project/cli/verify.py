"""`imagemill verify`: every record, header and value of Stage 2, and the shards against index and checksums."""

import sys

import click

from dagster_project.cli.options import root_options
from imagemill.layout import DataRoot
from imagemill.pipeline.story import open_ledger
from imagemill.validation.findings import Report, as_text
from imagemill.validation.validator import Options, validate, verify_stage2


@click.command("verify")
@click.option(
    "--sample", type=int, metavar="N", default=0, help="Compare the first N samples of each tar (default: all)."
)
@root_options
def command(root: DataRoot, sample: int) -> None:
    """Read everything back and compare. Names each bad id; exit 1 on any finding."""
    open_ledger(root).close()
    reports = [verify_stage2(root.stage2_jsonl, root.derived)]
    options = Options(derived=root.derived, sample=sample)
    reports += [
        validate(folder, kind="shards", options=options)
        for folder in sorted(root.shards.glob("bucket_*"))
        if folder.is_dir()
    ]
    sys.exit(show(reports))


def show(reports: list[Report]) -> int:
    """Print reports; the exit code."""
    for report in reports:
        for line in as_text(report):
            click.echo(line)
    return 0 if all(report.passed for report in reports) else 1
