"""`imagemill import TAR…`: unpack archives of img2dataset and WebDataset into `approved/`."""

import os
import shlex
import shutil
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import click

from dagster_project.cli.options import root_options
from imagemill.domain.layout import DataRoot, local_path
from imagemill.errors import MissingInput, WrongUsage
from imagemill.fs.listing import is_inside
from imagemill.fs.owners import use
from imagemill.inputs.archives import MOST_FILES, SHARE_OF_FREE, assign_folders, printable
from imagemill.inputs.unpacking import Limits, MemberProblem, Unpacked, unpack
from imagemill.pipeline.session import Session
from imagemill.progress import Progress
from imagemill.store.imports import OtherArchive, record_import
from imagemill.store.locations import refuse_no_root, refuse_read_only
from imagemill.text.units import as_size, counted

SHOWN = 20


@click.command("import")
@click.argument("archives", nargs=-1, required=True, metavar="TAR…")
@click.option(
    "--max-files", type=click.IntRange(min=1), default=MOST_FILES, show_default=True, metavar="N",
    help="Write at most this many files.",
)  # fmt: skip
@click.option(
    "--max-bytes",
    type=click.IntRange(min=1),
    metavar="N",
    help="Write at most this many bytes (default: 90 % of the free space).",
)
@root_options
def command(session: Session, archives: tuple[str, ...], max_files: int, max_bytes: int | None) -> None:
    """Unpack each TAR (also .tar.gz) into a folder of its own in `approved/`, named like the archive.

    A TAR is a path, also one below `approved/`. Existing files are never replaced; the same command again continues an
    import that was interrupted.
    """
    root = session.root
    refuse_no_root(root, may_begin=True)
    approved = _own_images(root)
    folders = assign_folders([_existing(approved, each) for each in archives], session.inputs.exclude)
    refuse_read_only(approved)
    approved.mkdir(parents=True, exist_ok=True)
    use(root.owners)
    limits = Limits(max_files, max_bytes or int(shutil.disk_usage(approved).free * SHARE_OF_FREE))
    click.echo(f"imagemill: {root.path}")
    reasons, problems = Counter[str](), list[tuple[Path, MemberProblem]]()
    sizes = [archive.stat().st_size for archive in folders]
    done = 0
    with Progress("import", len(folders), unit="archive", work=sum(sizes), work_unit="B") as progress:
        for archive, folder in folders.items():
            result = _unpack(root, approved, archive, folder, limits, progress)
            done += 1
            for line in _result_lines(root, archive, folder, result):
                click.echo(line)
            reasons += result.reasons
            problems += [(archive, each) for each in result.problems]
            if result.limit_reached:
                break
    for line in _last_lines(session, list(folders), done, reasons, problems):
        click.echo(line)
    sys.exit(1 if reasons else 0)


def _own_images(root: DataRoot) -> Path:
    """Return the folder of images. Raises WrongUsage if it is one that imagemill only reads."""
    own = root.path / "approved"
    link = next((each for each in (root.approved, own) if isinstance(each, Path) and each.is_symlink()), None)
    if root.approved != own or link:
        raise WrongUsage(
            "the folder of images is only read",
            where=root.approved,
            why=f"{link} is a link" if link else "imagemill run --approved named it",
            do="unpack the archives there with another program, or import them into another --data-root",
        )
    return own


def _existing(approved: Path, given: str) -> Path:
    """Return the archive at a path, else at that path below `approved/`. Raises MissingInput if neither is a file."""
    path = local_path(given, "TAR")
    found = next((each for each in (path, approved / given) if each.is_file()), None)
    if found is None:
        folder = path.is_dir()
        raise MissingInput(
            "a folder instead of an archive" if folder else "no such archive",
            where=path,
            why="nothing was imported",
            do=f"give the archives in it: {shlex.quote(str(path))}/*.tar" if folder else "check the path",
        )
    return Path(os.path.abspath(found))


def _unpack(root: DataRoot, approved: Path, archive: Path, folder: str, limits: Limits, progress: Progress) -> Unpacked:
    read = 0

    def advance(position: int) -> None:
        nonlocal read
        progress.advance(0, position - read)
        read = position

    try:
        record_import(root, archive, folder)
    except OtherArchive as error:
        result = Unpacked()
        result.note("", "other_archive", f"{error.what}: {error.why}", str(error.do))
    else:
        result = unpack(archive, approved, folder, limits, advance)
    progress.advance(1, 0)
    return result


def _result_lines(root: DataRoot, archive: Path, folder: str, result: Unpacked) -> Iterator[str]:
    """Yield what became of one archive."""
    present = f", {result.present:,} already present" if result.present else ""
    files = f"{counted(result.files, 'file')} ({as_size(result.size)})"
    yield f"  imported   {printable(archive.name)}: {files} into approved/{folder}{present}"
    if result.hidden:
        names = ", ".join([*result.hidden_names, *(["…"] if result.hidden > len(result.hidden_names) else [])])
        yield f"  ignored    {counted(result.hidden, 'member')} with a name that begins with a dot: {names}"
    if is_inside(str(archive), str(root.approved)):
        yield f"  archive    move {printable(str(archive))} elsewhere: an archive in approved/ is a problem of every run"


def _last_lines(
    session: Session,
    archives: Sequence[Path],
    done: int,
    reasons: Counter[str],
    problems: Sequence[tuple[Path, MemberProblem]],
) -> Iterator[str]:
    """Yield the problems, and what to do next."""
    if done < len(archives):
        names = ", ".join(printable(each.name) for each in archives[done : done + 3])
        yield f"  not begun  {counted(len(archives) - done, 'archive')}: {names}{', …' if len(archives) - done > 3 else ''}"
    for reason, count in sorted(reasons.items()):
        yield f"  problem    {reason:<18} {count:,}"
    for archive, each in problems[:SHOWN]:
        where = f"{printable(str(archive))}: {each.member}" if each.member else printable(str(archive))
        yield f"    {where}: {each.reason}: {each.detail}; {each.remedy}"
    if reasons.total() > SHOWN:
        yield f"    and {reasons.total() - min(SHOWN, len(problems)):,} more"
    if not session.inputs.recursive:
        yield "  inputs     this data root does not read sub-folders: set inputs.recursive: true in imagemill.yaml"
    yield f"  next       imagemill run --data-root {shlex.quote(str(session.root.path))}"
