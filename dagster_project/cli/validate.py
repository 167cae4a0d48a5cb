"""`imagemill validate FILE…`: the unified validator, for a launch script to call before training."""

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import get_args

import click

from dagster_project.cli.options import root_options
from imagemill.domain.embedding_specs import T5, mask_length
from imagemill.domain.preset_records import PresetRules
from imagemill.errors import MissingInput
from imagemill.fs.location import Location, is_url, parse_location
from imagemill.pipeline.session import Session
from imagemill.validation.findings import Report, as_json, as_text
from imagemill.validation.images import FIRST, ImageMode
from imagemill.validation.validator import KINDS, Options, missing, validate_each

image_check_mode = click.option(
    "--image-check-mode", type=click.Choice(get_args(ImageMode)), default="open", show_default=True,
    help="How closely to look at images.",
)  # fmt: skip
image_check_n = click.option(
    "--image-check-n", type=int, default=FIRST, show_default=True,
    help="Look at the images of the first N valid records of each file; 0 or less: of all.",
)  # fmt: skip
as_lines = click.option("--json", "as_lines", is_flag=True, help="One JSON report per line, for programs.")


@click.command("validate")
@click.argument("files", metavar="FILE…", nargs=-1, required=True)
@click.option("--kind", type=click.Choice(list(KINDS)), help="What the files are (default: by name and first lines).")
@click.option("--max-pixels", type=click.IntRange(min=1), help="Limit of width times height (default: the manifest's).")
@click.option("--multiple-of", type=click.IntRange(min=1), help="Factor of both sides (default: the manifest's).")
@image_check_mode
@image_check_n
@click.option("--enforce-real-images-dir", is_flag=True, help="Demand a real images/ also beside no manifest.")
@click.option("--sample", type=int, metavar="N",
              help="Shards: compare the npy members of the first N samples of each tar with the files; 0: of all.")  # fmt: skip
@as_lines
@root_options
def command(
    session: Session,
    files: tuple[str, ...],
    kind: str | None,
    max_pixels: int | None,
    multiple_of: int | None,
    image_check_mode: ImageMode,
    image_check_n: int,
    enforce_real_images_dir: bool,
    sample: int | None,
    as_lines: bool,
) -> None:
    """Check records (.jsonl), shards (a tar or its bucket's folder) or a preset's folder by every rule of their kind.

    FILE may be the URL of published shards; every tar is then read, one at a time. Exit 1 on any error; warnings do not count.
    """
    code, contents = 0, None
    # A wrong URL is refused before anything is read.
    given = [parse_location(each, "FILE") if is_url(each) else Path(each) for each in files]
    # Members are compared with this data root's files if requested.
    if sample is not None and any(map(_is_shards, given)):
        from imagemill.validation.contents import RecordedContents  # imports numpy, which records alone do not need

        contents = RecordedContents(session.reading, session.in_force)
    for path in given:
        if isinstance(path, Location):
            code |= _validate_version(session, path, as_lines=as_lines)
            continue
        options = Options(
            limits=PresetRules(max_pixels, multiple_of),
            image_mode=image_check_mode,
            image_first=image_check_n,
            enforce_real_images_folder=enforce_real_images_dir,
            derived=session.root.derived if sample is not None and _is_shards(path) else None,
            sample=sample,
            contents=contents,
            tokens=mask_length([session.in_force(T5)]),
            data_root=session.root if path.absolute() == session.root.stage2_jsonl.absolute() else None,
        )
        try:
            code |= show(validate_each(path, kind=kind, options=options), as_lines=as_lines)
        except MissingInput as error:
            code = _show_missing(path, error, as_lines=as_lines)
    sys.exit(code)


def _validate_version(session: Session, location: Location, *, as_lines: bool) -> int:
    from imagemill.fs.objects import Objects
    from imagemill.reading.published import current_version
    from imagemill.validation.published import validate_published

    try:
        return show(validate_published(current_version(Objects(location, session.storage()))), as_lines=as_lines)
    except MissingInput as error:
        return _show_missing(location, error, as_lines=as_lines)


def _show_missing(path: Path | Location, error: MissingInput, *, as_lines: bool) -> int:
    """Say that there is nothing to validate; the remaining files are still checked, so that one call reports everything."""
    click.echo(f"imagemill: {error}", err=True)
    if as_lines:
        show([missing(path, error)], as_lines=True)
    return 1


def show(reports: Iterable[Report], *, as_lines: bool = False) -> int:
    """Print reports, for people or as one line each for programs; return the exit code."""
    code = 0
    for report in reports:
        code |= not report.passed
        for line in [as_json(report).decode()] if as_lines else as_text(report):
            click.echo(line)
        if report.kind == "stage2" and not as_lines:
            click.echo(f"{report.file}: the npy files were not opened; `imagemill verify` reads them")
    return code


def _is_shards(path: Path | Location) -> bool:
    return isinstance(path, Path) and (path.is_dir() or path.suffix == ".tar")
