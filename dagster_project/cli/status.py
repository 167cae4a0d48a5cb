"""`imagemill status`: the state of the data root."""

from collections.abc import Iterator
from contextlib import closing

import click
import msgspec

from dagster_project.cli.options import root_options
from imagemill.fs.folders import is_folder
from imagemill.fs.location import parse_location
from imagemill.pipeline.changes import parse_since, read_changes
from imagemill.pipeline.problem_list import renames_line
from imagemill.pipeline.session import Session
from imagemill.pipeline.shards.shard_statistics import POOR_USE, is_poor, use_line
from imagemill.pipeline.snapshot import names_state, read_snapshot
from imagemill.pipeline.stage2.models_in_use import preview_notice
from imagemill.pipeline.status import Status, input_lines, ledger_of_runs, read_status
from imagemill.store.locations import gone
from imagemill.text.units import as_size, counted

SHOWN = 20


@click.command("status")
@click.argument("url", required=False, metavar="[URL]")
@click.option("--fresh", is_flag=True, help="Look at every file instead of reporting the end of the last command.")
@click.option("--since", metavar="TIME", help="What changed since then: 24h, 7d, 2026-11-24, or the id of a run.")
@click.option("--json", "as_json", is_flag=True, help="For programs.")
@root_options
def command(session: Session, url: str | None, fresh: bool, since: str | None, as_json: bool) -> None:
    """Count images, embeddings, records, shards, and inputs that did not reach the output; of URL, what is published there.

    The state is that at the end of the last command; only the names in approved/ are compared with it.
    """
    if url is not None:
        _print_published(session, url, as_json=as_json)
        return
    if since is not None:
        _print_changes(session, since, as_json=as_json)
        return
    snapshot = None if fresh or not is_folder(session.root.approved) else read_snapshot(session.root)
    inventory = session.overview()
    status, lost = snapshot.status if snapshot else read_status(session, inventory=inventory), gone(session.root)
    changed = bool(snapshot and snapshot.names != names_state(session))
    if as_json:
        from imagemill.pipeline.image_states import read_states  # NumPy: a quarter of the time of other reports

        with closing(read_states(session, inventory, fresh=fresh).table) as table:
            filters = table.named_counts()
        document = {**msgspec.to_builtins(status), "filters": filters, "reasons": status.reasons(), "complete": status.complete,
                    "folders_gone": {name: str(place) for name, place in lost.items()},
                    "as_of": snapshot.written_at if snapshot else None, "names_changed": changed}  # fmt: skip
        click.echo(msgspec.json.format(msgspec.json.encode(document)).decode())
        return
    if snapshot:
        click.echo(f"state       at the end of the last command, {snapshot.time}; --fresh looks at every file")
    if changed:
        click.echo(
            "changed     files were added to approved/ or removed since; `imagemill run` brings everything up to date"
        )
    for line in status_lines(status):
        click.echo(line)
    for name, place in lost.items():
        click.echo(f"gone        {name}: the recorded folder {place} does not exist")


def _print_published(session: Session, url: str, *, as_json: bool) -> None:
    from imagemill.fs.objects import Objects
    from imagemill.reading.published import read_published

    found = read_published(Objects(parse_location(url, "URL"), session.storage()))
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(found)).decode())
        return
    click.echo(f"published   version {found.version}, {found.time:%Y-%m-%d %H:%M:%S} UTC, by data root {found.root}")
    if found.preview:
        click.echo("model       preview models made arrays of it: nothing can be learned from them")
    for bucket, one in found.buckets.items():
        contents = f"{counted(one.samples, 'sample')} in {counted(one.tars, 'shard')}, {as_size(one.bytes)}"
        click.echo(f"bucket      {bucket:<10} {contents}")
    for each in found.previous:
        until = f"{each.until:%Y-%m-%d %H:%M:%S} UTC"
        click.echo(f"replaced    version {each.version}, {until}; still readable if nothing was deleted")


def _print_changes(session: Session, since: str, *, as_json: bool) -> None:
    ledger = ledger_of_runs(session)
    changes = read_changes(ledger, parse_since(since, ledger))
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(changes)).decode())
        return
    click.echo(f"since       {changes.since}")
    for name, ids in changes.images.items():
        rest = f" and {len(ids) - SHOWN:,} more: --json lists them all" if len(ids) > SHOWN else ""
        names = f": {', '.join(ids[:SHOWN])}{rest}" if ids else ""
        click.echo(f"{name.replace('_', ' '):<13} {len(ids):>7,}{names}")
    if changes.unknown:
        click.echo(f"{'unknown':<13} {changes.unknown:>7,}: an earlier release recorded these images without a time")


def status_lines(status: Status) -> Iterator[str]:
    """Yield the report for people."""
    yield f"images      {status.images}"
    yield f"pixels      pixels.color: {status.colours.color}"
    yield from (f"{label:<11} {line}" for label, line in input_lines(status))
    for kind, counts in status.kinds.items():
        yield f"{kind:<11} " + ", ".join(f"{count:,} {name}" for name, count in counts.items())
    parts = (
        (status.stage1, "of Stage 1"),
        (status.truncated, "with a caption longer than the text encoder's input"),
        (status.cut_off, "with a caption that the captioner did not finish"),
    )
    yield ", ".join([f"records     {status.records:,}", *(f"{count:,} {words}" for count, words in parts if count)])
    for line in preview_notice(status.previews):
        yield f"model       {line}"
    for kind in status.regenerating:
        yield f"{kind:<11} is being regenerated: it is not packed until its last file is replaced"
    for bucket, (samples, shards) in status.buckets.items():
        use = f": {use_line(status.crops[bucket])}" if bucket in status.crops else ""
        yield f"bucket      {bucket:<10} {counted(samples, 'sample')} in {counted(shards, 'shard')}{use}"
    if poor := [bucket for bucket, crop in status.crops.items() if is_poor(crop)]:
        yield f"warning     {', '.join(poor)}: {POOR_USE}"
    for bucket, problem in status.unreadable.items():
        yield f"bucket      {bucket:<10} {problem}"
    if renames := renames_line(status.problems):
        yield f"renamed     {renames}"
    for reason, count in status.reasons().items():
        yield f"problem     {reason:<18} {counted(count, 'input')}"
    for problem in status.problems[:SHOWN]:
        yield f"  {problem.item}: {problem.outcome}: {problem.reason}: {problem.detail}"
    if len(status.problems) > SHOWN:
        yield f"  and {len(status.problems) - SHOWN:,} more: `imagemill problems` lists them all"
