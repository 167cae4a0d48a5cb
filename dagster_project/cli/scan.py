"""`imagemill scan [FOLDER]`: what a run would find in a folder of images."""

import os
from collections.abc import Iterator
from pathlib import Path

import click
import msgspec

from dagster_project.cli.options import root_options
from imagemill.domain.inputs import NEW_INPUTS
from imagemill.domain.layout import DataRoot, local_path
from imagemill.pipeline.colours import colour_lines
from imagemill.pipeline.folder_report import FolderReport, report_folder
from imagemill.pipeline.session import open_session
from imagemill.store.locations import refuse_no_images
from imagemill.text.units import counted

SHOWN = 20


def _command(root: DataRoot, folder: str | None, as_json: bool) -> None:
    """List what a run would find in FOLDER, by default `approved/` of the data root, from file headers.

    No model is needed, nothing is written, and FOLDER need not be part of a data root.
    """
    threads = os.cpu_count() or 1
    if folder is not None:
        report = report_folder(local_path(folder, "FOLDER"), NEW_INPUTS, threads=threads)
    else:
        with open_session() as session:
            refuse_no_images(session.root)
            own = session.root.other_folders
            report = report_folder(session.root.approved, session.inputs, own, threads=threads)
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(report)).decode())
        return
    for line in report_lines(report):
        click.echo(line)


command = click.command("scan", help=_command.__doc__)(
    click.argument("folder", required=False, metavar="[FOLDER]")(
        click.option("--json", "as_json", is_flag=True, help="For programs.")(root_options(_command, opens=False))
    )
)


def report_lines(report: FolderReport) -> Iterator[str]:
    """Yield the report for people."""
    formats = ", ".join(f"{count:,} {name}" for name, count in report.formats.items())
    yield f"folder      {Path(report.folder)}"
    yield f"images      {report.images:,}" + (f": {formats}" if formats else "")
    yield f"captions    {counted(report.captions, 'image')} with a caption"
    if report.companions:
        yield f"companions  {counted(report.companions, 'file')} that accompany an image (masks, control images)"
    if report.ignored:
        yield f"ignored     {counted(report.ignored, 'input')}"
    yield f"pixels      pixels.color: {report.colours.color}"
    for n, line in enumerate(colour_lines(report.colours, report.first_frames)):
        yield f"{'' if n else 'colours':<11} {line}"
    if not report.colours.profiles:
        yield "colours     no image has a colour profile: sRGB"
    reasons: dict[str, int] = {}
    for problem in report.problems:
        reasons[problem.reason] = reasons.get(problem.reason, 0) + 1
    for reason, count in sorted(reasons.items()):
        yield f"problem     {reason:<18} {counted(count, 'input')}"
    for problem in report.problems[:SHOWN]:
        yield f"  {problem.item}: {problem.reason}: {problem.detail}; {problem.remedy}"
    if len(report.problems) > SHOWN:
        yield f"  and {len(report.problems) - SHOWN:,} more: `imagemill scan --json` lists them all"
