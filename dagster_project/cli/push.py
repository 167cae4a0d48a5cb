"""`imagemill push`: publish the shard sets to object storage, as one version that readers see whole."""

import sys

import click
import msgspec

from dagster_project.cli.options import OneOf, root_options
from imagemill.domain.buckets import BUCKETS
from imagemill.errors import WrongUsage
from imagemill.pipeline.push import Publisher, Pushed, PushRequest, place_to_push, publisher
from imagemill.pipeline.session import Session
from imagemill.pipeline.shards.shard_sets import refuse_no_sets
from imagemill.store.locations import refuse_gone
from imagemill.text.units import as_size, counted


@click.command("push")
@click.argument("url", required=False, metavar="[URL]")
@click.option("--bucket", "buckets", multiple=True, type=OneOf(BUCKETS), help="Publish only this bucket; may repeat.")
@click.option("--gc", "collect", is_flag=True, help="Then delete what no kept version needs.")
@click.option("--now", is_flag=True, help="With --gc: keep the current version alone.")
@click.option("--verify", is_flag=True, help="Also send what is missing there; then read everything back and compare.")
@click.option("--take-over", is_flag=True, help="Replace the version of another data root.")
@click.option("--allow-preview", is_flag=True, help="Publish arrays of preview models too.")
@click.option("--dry-run", is_flag=True, help="Say what would be sent; write nothing.")
@click.option("--json", "as_json", is_flag=True, help="For programs.")
@root_options
def command(
    session: Session, url: str | None, buckets: tuple[str, ...], collect: bool, now: bool, as_json: bool, **flags: bool
) -> None:
    """Publish the shards to URL, by default `push` of imagemill.yaml. Readers see the old version or the new one.

    URL is s3://bucket/prefix. Only tars that are not there are sent; an interrupted push is continued by the next one.
    """
    location = place_to_push(session, url)
    if now and not collect:
        raise WrongUsage("--now has no effect alone", why="it is about what --gc deletes", do="give --gc --now")
    refuse_gone(session.root, "shards")
    refuse_no_sets(session.root.shards)
    request = PushRequest(buckets=buckets, **flags)
    call = publisher(session, location)
    result = call.push(request)
    if collect and not request.dry_run:
        result.deleted = call.collect(now=now)
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(result)).decode())
    else:
        for line in result_lines(result, request, call, collect=collect, now=now):
            click.echo(line)
    sys.stdout.flush()


def result_lines(result: Pushed, request: PushRequest, call: Publisher, *, collect: bool, now: bool) -> list[str]:
    """Return the result for people."""
    sent = f"{counted(result.sent_tars, 'tar')} of {result.tars}, {as_size(result.sent_bytes)}"
    if not result.changed and result.sent_tars:
        verb = "would be sent" if request.dry_run else "had been missing and were sent"
        lines = [f"restored: version {result.version} at {result.url}, {sent} {verb}"]
    elif not result.changed:
        lines = [f"nothing to do: version {result.version} is published at {result.url}"]
    elif request.dry_run:
        lines = [f"dry run, nothing written: version {result.version} would send {sent} to {result.url}"]
    else:
        lines = [f"published: version {result.version} at {result.url}, {sent} sent"]
    if result.verified:
        lines.append(f"verified: {result.verified} objects are those of the disk")
    if collect and not request.dry_run:
        kept = (
            "the current version"
            if now
            else f"versions replaced within {call.settings.keep_days:g} days, and the current one"
        )
        lines.append(f"deleted: {counted(result.deleted, 'object')}; kept are {kept}")
        if now:
            lines.append("if the bucket keeps versions of objects, it may still have copies of deleted ones")
    return lines
