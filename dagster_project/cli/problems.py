"""`imagemill problems`: list every input that did not reach the output, with the remedy."""

import csv
import sys
from collections.abc import Sequence

import click
import msgspec

from dagster_project.cli.options import root_options
from imagemill.errors import WrongUsage
from imagemill.pipeline.problem_list import InputProblem
from imagemill.pipeline.session import Session
from imagemill.pipeline.status import read_status
from imagemill.text.units import counted


@click.command("problems")
@click.option("--reason", multiple=True, metavar="REASON", help="Only inputs with this reason code; may repeat.")
@click.option("--json", "as_json", is_flag=True, help="One JSON array, for programs.")
@click.option("--csv", "as_csv", is_flag=True, help="A table with a header, for spreadsheets.")
@root_options
def command(session: Session, reason: tuple[str, ...], as_json: bool, as_csv: bool) -> None:
    """List every input that did not reach the output: images, captions, records, groups, annotations."""
    if as_json and as_csv:
        raise WrongUsage("--json and --csv exclude each other", do="give one of them")
    status = read_status(session)
    if unknown := sorted(set(reason) - status.reasons().keys()):
        known = ", ".join(status.reasons()) or "none"
        click.echo(f"imagemill: no input has the reason {', '.join(unknown)}; reasons here: {known}", err=True)
    chosen = [problem for problem in status.problems if not reason or problem.reason in reason]
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(chosen)).decode())
    elif as_csv:
        _write_csv(chosen)
    else:
        _print(chosen)


def _print(problems: Sequence[InputProblem]) -> None:
    for problem in problems:
        since = f", since {problem.since}" if problem.since else ""
        click.echo(f"{problem.item}: {problem.outcome}: {problem.reason} ({', '.join(problem.assets)}{since})")
        click.echo(f"  {problem.detail}")
        click.echo(f"  do: {problem.remedy}")
    click.echo(counted(len(problems), "problem"))


def _write_csv(problems: Sequence[InputProblem]) -> None:
    rows = csv.writer(sys.stdout, lineterminator="\n")
    rows.writerow(InputProblem.__struct_fields__)
    for problem in problems:
        row = msgspec.structs.asdict(problem) | {"assets": " ".join(problem.assets)}
        rows.writerow(row.values())
