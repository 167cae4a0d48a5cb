"""`imagemill explain ID`: report why an image is, or is not, in the shards."""

from collections.abc import Iterator, Mapping
from typing import Any

import click
import msgspec

from dagster_project.cli.options import root_options
from imagemill.pipeline.image_report import explain
from imagemill.pipeline.session import Session


@click.command("explain")
@click.argument("image_id", metavar="ID")
@click.option("--json", "as_json", is_flag=True, help="For programs.")
@root_options
def command(session: Session, image_id: str, as_json: bool) -> None:
    """Report everything known about one image: source, caption, embeddings, record, bucket, shard, and problems."""
    report = explain(session, image_id)
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(report)).decode())
        return
    for line in report_lines(report):
        click.echo(line)


def report_lines(report: Mapping[str, Any]) -> Iterator[str]:
    """Yield the report on one image for people."""
    yield report["image_id"]
    yield f"  source     {_facts(report.get('source')) or 'no image in approved/'}"
    if "renamed" in report:
        yield f"  renamed    {_facts(report['renamed'])}"
    if "colours" in report:
        yield f"  colours    {_facts(report['colours'])}"
    yield f"  caption    {_facts(report.get('caption')) or 'none'}"
    yield f"  bucket     {report.get('bucket') or 'unknown until the image is read'}"
    for kind, embedding in report["embeddings"].items():
        yield f"  {kind:<10} {_facts(embedding) or 'no file'}"
    yield f"  record     {'line ' + str(report['record']) if report['record'] else 'none'}"
    yield f"  shard      {_facts(report['shard']) or _in_none(report)}"
    for problem in report["problems"]:
        yield f"  {problem['outcome']} by {problem['asset']}: {problem['reason']}: {problem['detail']}"
        yield f"    do: {problem['do']}"


def _in_none(report: Mapping[str, Any]) -> str:
    if limit := report.get("limit"):
        return f"in none: packed with a limit of {limit} samples; `imagemill shards --overwrite` packs all"
    return "in none"


def _facts(facts: Mapping[str, Any] | None) -> str:
    return ", ".join(f"{name} {value}" for name, value in (facts or {}).items())
