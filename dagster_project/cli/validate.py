"""`imagemill validate FILE…`: the unified validator, for a launch script to call before training."""

import sys
from pathlib import Path

import click
import msgspec

from dagster_project.cli.options import root_options
from imagemill.layout import DataRoot
from imagemill.validation.findings import as_text
from imagemill.validation.validator import KINDS, validate


@click.command("validate")
@click.argument("files", metavar="FILE…", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--kind", type=click.Choice(list(KINDS)), help="What the files are (default: by their names).")
@click.option("--json", "as_json", is_flag=True, help="One JSON report per line, for programs.")
@root_options
def command(root: DataRoot, files: tuple[Path, ...], kind: str | None, as_json: bool) -> None:
    """Check Stage 2 records (.jsonl) or shards (a tar or its bucket folder) by every rule. Exit 1 on any finding."""
    passed = True
    for path in files:
        report = validate(path, kind=kind)
        passed &= report.passed
        if as_json:
            click.echo(msgspec.json.encode(report).decode())
        else:
            for line in as_text(report):
                click.echo(line)
    sys.exit(0 if passed else 1)
