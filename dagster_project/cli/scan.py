"""`imagemill scan [FOLDER]`: what a run would find in a folder of images."""

import os
from collections import Counter
from collections.abc import Iterable, Iterator

import click
import msgspec

from dagster_project.cli.options import root_options
from imagemill.config import config_in_force
from imagemill.domain.inputs import NEW_INPUTS
from imagemill.domain.layout import DataRoot
from imagemill.inputs.scan import share_line
from imagemill.pipeline.colours import colour_lines
from imagemill.pipeline.folder_report import FolderReport, report_folder
from imagemill.pipeline.session import open_session
from imagemill.store.locations import images_folder, refuse_no_images
from imagemill.text.units import counted

SHOWN = 20


def _command(root: DataRoot, folder: str | None, as_json: bool) -> None:
    """List what a run would find in FOLDER, by default `approved/` of the data root, from file headers and captions.

    No model is needed, nothing is written, and FOLDER need not be part of a data root. Its settings are those of imagemill.yaml,
    if there is one. The lines that the report ends with would use what it lists as not used.
    """
    threads = os.cpu_count() or 1
    if folder is not None:
        config = config_in_force(root)
        images = images_folder(folder, "FOLDER", lambda: config.object_storage)
        report = report_folder(images, config.inputs_in_force(NEW_INPUTS), threads=threads, entries=as_json)
    else:
        with open_session() as session:
            refuse_no_images(session.root)
            own = session.root.other_folders
            report = report_folder(session.root.approved, session.inputs, own, threads=threads, entries=as_json)
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
    yield f"folder      {report.folder}"
    if report.share:
        yield f"share       {share_line(report.share, report.elsewhere)}"
    yield from _labelled("layout", report.layouts)
    yield f"images      {report.images:,}" + (f": {formats}" if formats else "")
    yield f"captions    {', '.join(_of_source(source, count) for source, count in report.captions.items()) or 'none'}"
    yield from _labelled("", _caption_lines(report))
    counts = report.counts
    if companions := counts.get("companion"):
        yield f"companions  {counted(companions, 'companion image')} (masks, control images)"
    if ignored := counts.get("ignored"):
        yield f"ignored     {counted(ignored, 'input')}"
    yield f"pixels      pixels.color: {report.colours.color}"
    yield from _labelled("colours", colour_lines(report.colours, report.first_frames))
    if not report.colours.profiles:
        yield "colours     no image has a colour profile: sRGB"
    for reason, count in sorted(Counter(problem.reason for problem in report.problems).items()):
        yield f"problem     {reason:<18} {counted(count, 'input')}"
    for problem in report.problems[:SHOWN]:
        yield f"  {problem.item}: {problem.reason}: {problem.detail}; {problem.remedy}"
    if len(report.problems) > SHOWN:
        yield f"  and {len(report.problems) - SHOWN:,} more: `imagemill scan --json` lists them all"
    if report.settings:
        yield "settings    these lines in imagemill.yaml would use what is not used:"
        yield from report.settings


def _of_source(source: str, count: int) -> str:
    return f"{count:,} without" if source == "none" else f"{count:,} from {source}"


def _labelled(label: str, lines: Iterable[str]) -> Iterator[str]:
    for n, line in enumerate(lines):
        yield f"{'' if n else label:<11} {line}"


def _caption_lines(report: FolderReport) -> Iterator[str]:
    if report.without_caption:
        first = report.without_caption[0]
        yield f"{counted(len(report.without_caption), 'image')} without a caption, the first {first}"
    if report.several_captions:
        yield f"{counted(report.several_captions, 'image')} with several captions"
    if report.several_lines:
        yield f"{counted(report.several_lines, 'text')} of several lines: see captions.lines"
    if report.conflicts:
        yield f"{counted(report.conflicts, 'image')} with another caption in a source of a lower rank (caption_conflict)"
