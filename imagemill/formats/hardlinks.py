"""Image sharing between presets by hardlinks: missing files are linked, and existing files are never changed.

    coco/rescale_32_768/images/a.jpg          inode 7
    coco/rescale_32_768_max60/images/a.jpg    inode 7: a second name of the same file, without bytes of its own

    missing                      linked
    exists, same inode           nothing to do
    exists, anything else        refused: never replaced, never repaired
    missing in the base, too     refused: the base must be repaired first

The images of a preset are determined in pipeline/presets/coords.py; linking is called in pipeline/presets/derive.py.
Spec: docs/spec/presets.md#hardlinks
"""

import os
import stat
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from imagemill.errors import ImagemillError, is_disk_full
from imagemill.fs.atomic import sync_folder, temporary_path
from imagemill.fs.listing import nearest_existing

_MISSING = "not in the base preset"
_FOREIGN = "there already, and not the base's file"

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class LinksRefused(ImagemillError, OSError):
    """Some images cannot be shared; `refused` maps each path to its reason."""

    def __init__(self, plan: "LinkPlan") -> None:
        listed = "\n".join(f"  {path}: {why}" for path, why in plan.refused.items())
        super().__init__(
            f"{len(plan.refused)} images cannot be linked:\n{listed}",
            where=plan.target,
            why="images of a derived preset are the base's own files, and none is ever replaced",
            do=remedy(plan),
        )
        self.refused = plan.refused


class NotLinkable(ImagemillError, OSError):
    """Base and derived preset are not on one file system with hardlinks."""


class LinkPlan(NamedTuple):
    """Links that are missing in `target` for it to have the files of `source`.

    Attributes:
        source: folder of the base preset.
        target: folder of the derived preset.
        missing: file names to link, by their folder (`images/train`), both relative.
        linked: number of files that are linked already.
        refused: paths that cannot be linked, with the reason.
    """

    source: Path
    target: Path
    missing: dict[str, list[str]]
    linked: int
    refused: dict[str, str]


def remedy(plan: LinkPlan) -> str:
    """Return the remedy for the refused paths."""
    foreign = f"delete {plan.target.name} and run coord again"
    repair = f"repair the base: run imagemill preset rescale for {plan.source.name}, then coord again"
    reasons = set(plan.refused.values())
    return "; ".join([*([repair] if reasons - {_FOREIGN} else []), *([foreign] if _FOREIGN in reasons else [])])


def check_file_system(source: Path, target: Path) -> None:
    """Check that files of one folder can be linked into another, by a trial link that is removed at once.

    Raises:
        NotLinkable: if the folders are on two devices, or the file system has no hardlinks.
    """
    trial = temporary_path(target)
    try:
        if source.stat().st_dev != target.stat().st_dev:
            raise NotLinkable("two file systems", where=f"{source} and {target}", why=_WHY, do=_TOGETHER)
        os.link(source, trial, follow_symlinks=False)
    except NotLinkable:
        raise
    except OSError as error:
        if is_disk_full(error):
            raise
        raise NotLinkable(
            f"no hardlinks here: {error.strerror}", where=f"{source} to {target}", why=_WHY, do=_TOGETHER
        ) from error
    finally:
        with suppress(OSError):
            trial.unlink()


_WHY = "a derived preset shares its base's image files and never copies them"
_TOGETHER = "keep all presets of a dataset in one folder, on a file system that has hardlinks"


def plan_links(names: Collection[str], source: Path, target: Path) -> LinkPlan:
    """Compare two folders, and return the links needed for `target` to have all these files of `source`.

    Folders are listed; a single file is examined only if the listings do not decide.

    Args:
        names: relative paths with `/`, without duplicates.
        source: folder of the existing files.
        target: folder of the links; need not exist.
    """
    folders = sorted({name.rpartition("/")[0] for name in names})
    refused = {folder: why for folder in folders if (why := _folder_problem(folder, source, target))}
    usable = [folder for folder in folders if folder not in refused]
    at_target = _inodes(target, usable)
    if _all_linked(names, usable, source, at_target):
        return LinkPlan(source, target, {}, len(names), {})
    at_source = _inodes(source, usable, regular_only=True)
    plan = LinkPlan(source, target, {}, 0, {})
    linked = 0
    for name in names:
        inode, have = at_source.get(name), at_target.get(name)
        folder, _, file = name.rpartition("/")
        if inode == have and inode is not None:
            linked += 1
        elif why := refused.get(folder):
            plan.refused[name] = why
        elif inode is not None and have is None:
            plan.missing.setdefault(folder, []).append(file)
        elif why := _problem(name, source, target):
            plan.refused[name] = why
        else:
            linked += 1
    return plan._replace(linked=linked)


def link_tree(plan: LinkPlan) -> int:
    """Create the planned links durably; return their number. A file that another run linked in the meantime is accepted.

    Raises:
        LinksRefused: if the plan has refused paths (then nothing is linked), or a link failed (then all others are linked).
    """
    if plan.refused:
        raise LinksRefused(plan)
    refused: dict[str, str] = {}
    for folder, files in plan.missing.items():
        os.makedirs(plan.target / folder, exist_ok=True)
        with _opened(plan.source / folder) as source, _opened(plan.target / folder) as target:
            for file, why in _link_files(files, source, target):
                refused[f"{folder}/{file}"] = why
            os.fsync(target)
    for parent in {parent for folder in plan.missing for parent in (plan.target / folder).parents}:
        if parent.is_relative_to(plan.target):
            sync_folder(parent)
    if refused:
        raise LinksRefused(plan._replace(refused=refused))
    return sum(map(len, plan.missing.values()))


def _link_files(files: list[str], source: int, target: int) -> Iterator[tuple[str, str]]:
    """Link files from one open folder into another; yield those that cannot be linked, with the reason."""
    link = os.link
    for file in files:
        try:
            link(file, file, src_dir_fd=source, dst_dir_fd=target, follow_symlinks=False)
        except FileExistsError:
            if not _same_file(file, source, target):
                yield file, _FOREIGN
        except FileNotFoundError:
            yield file, _MISSING
        except OSError as error:
            if is_disk_full(error):
                raise
            yield file, str(error.strerror)


def _same_file(file: str, source: int, target: int) -> bool:
    with suppress(FileNotFoundError):
        one = os.stat(file, dir_fd=source, follow_symlinks=False)
        return os.path.samestat(one, os.stat(file, dir_fd=target, follow_symlinks=False))
    return False


def _problem(name: str, source: Path, target: Path) -> str | None:
    """Return why the two files of one name cannot be shared, or None if they are one file."""
    base = _look(source / name)
    if base is None:
        return _MISSING
    if not stat.S_ISREG(base.st_mode):
        return "no regular file in the base preset"
    other = _look(target / name)
    return None if other and os.path.samestat(base, other) else _FOREIGN


def _folder_problem(folder: str, source: Path, target: Path) -> str | None:
    """Return why a folder cannot be shared, or None. A symlink on the way would redirect writes and links."""
    parts = folder.split("/")
    if parts[0] != "images":
        return "not under images/"
    base, device = _look(source / folder), os.lstat(nearest_existing(target / folder)).st_dev
    if base is None:
        return _MISSING
    for place, missing_is_fine in ((source, False), (target, True)):
        for end in range(1, len(parts) + 1):
            path = place.joinpath(*parts[:end])
            found = _look(path)
            if found is None and missing_is_fine:
                break
            if found is None or not stat.S_ISDIR(found.st_mode):
                return f"{path} is no real folder"
    return None if base.st_dev == device else "base and derived preset are on two file systems"


def _look(path: Path) -> os.stat_result | None:
    try:
        return os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None


def _all_linked(names: Collection[str], folders: list[str], source: Path, at_target: dict[str, int]) -> bool:
    """Return whether every file of the target is a link to the source's, and all `names` are among them. False is inconclusive.

    This is a shortcut for reruns. It builds no second map and lists the source in its own order, which halves the cost of a rerun
    apart from its listings.
    """
    if not all(map(at_target.__contains__, names)):
        return False
    same, look = 0, at_target.get
    for folder in folders:
        with suppress(FileNotFoundError, NotADirectoryError), os.scandir(source / folder) as entries:
            prefix = folder + "/"
            same += sum([look(prefix + e.name) == e.inode() for e in entries])
    return same == len(at_target)


def _inodes(place: Path, folders: list[str], *, regular_only: bool = False) -> dict[str, int]:
    """Return inodes by relative path, from directory listings alone."""
    found: dict[str, int] = {}
    for folder in folders:
        with suppress(FileNotFoundError, NotADirectoryError), os.scandir(place / folder) as entries:
            prefix = folder + "/"
            if regular_only:
                here = {prefix + e.name: e.inode() for e in entries if e.is_file(follow_symlinks=False)}
            else:
                here = {prefix + e.name: e.inode() for e in entries}
            found = found | here if found else here
    return found


@contextmanager
def _opened(folder: Path) -> Iterator[int]:
    handle = os.open(folder, _FOLDER)
    try:
        yield handle
    finally:
        os.close(handle)
