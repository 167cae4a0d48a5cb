"""`imagemill status`: how the data root stands."""

import click

from dagster_project.cli.options import root_options
from imagemill.layout import DataRoot
from imagemill.pipeline.story import Status, read_status
from imagemill.places import gone


@click.command("status")
@root_options
def command(root: DataRoot) -> None:
    """Count images, embeddings, records, shards, and what is in the way."""
    for line in status_lines(read_status(root)):
        click.echo(line)
    for name, place in gone(root).items():
        click.echo(f"gone        {name}: the remembered folder {place} is not there")


def status_lines(status: Status) -> list[str]:
    lines = [f"images      {status.images} seen, source_missing {status.source_missing}"]
    for kind, counts in status.kinds.items():
        lines.append(f"{kind:<11} " + ", ".join(f"{count} {name}" for name, count in counts.items()))
    told = ((status.stage1, "of Stage 1"), (status.truncated, "with a caption longer than the text encoder sees"))
    lines.append(", ".join([f"records     {status.records}", *(f"{count} {what}" for count, what in told if count)]))
    lines += [f"{kind:<11} being regenerated: nothing packs it yet" for kind in status.regenerating]
    lines += [
        f"bucket      {bucket:<10} {samples} samples in {shards} shards"
        for bucket, (samples, shards) in status.buckets.items()
    ]
    lines += [f"bucket      {bucket:<10} {problem}" for bucket, problem in status.unreadable.items()]
    lines += [f"not arrived {reason:<18} {count}" for reason, count in sorted(status.reasons().items())]
    lines += [f"  {p.item}: {p.outcome} by {p.asset}: {p.reason}: {p.detail}" for p in status.problems[:20]]
    if len(status.problems) > 20:
        lines.append(f"  and {len(status.problems) - 20} more; `imagemill explain ID` tells each one's story")
    return lines
