"""Folders outside the data root that a run was given by an option, recorded for later commands.

    approved   --approved      derived   --output-base-dir      shards   --output-dir      public_data   --public-data-root
    stage_a_input   --input_dir      stage_a_output   --output_dir

Locations below a root are defined in layout.py.

Spec: docs/spec/conventions.md#locations
"""

import os
import shlex
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Literal, get_args

from imagemill.domain.embedding_specs import embedding_specs
from imagemill.domain.layout import DEFAULT_ROOT, DataRoot, local_path
from imagemill.errors import ImagemillError, MissingInput, WrongUsage
from imagemill.fs.atomic import atomic_write, sweep_temporaries
from imagemill.fs.blobs import StorageSettings
from imagemill.fs.folders import Folder, ObjectFolder, is_folder
from imagemill.fs.listing import is_inside, nearest_existing
from imagemill.fs.location import FOR_WRITING, is_url, parse_location
from imagemill.fs.objects import Objects
from imagemill.store.ledger import Ledger
from imagemill.store.second_copy import refresh

Place = Literal["approved", "derived", "shards", "public_data", "stage_a_input", "stage_a_output"]

_OPTIONS: dict[Place, str] = {
    "approved": "--approved",
    "derived": "--output-base-dir",
    "shards": "--output-dir",
    "public_data": "--public-data-root",
    "stage_a_input": "--input_dir",
    "stage_a_output": "--output_dir",
}
_PLACE = "place."
_ONLY_READ = {"approved", "stage_a_input"}


Storage = Callable[[], StorageSettings]


def with_recorded(root: DataRoot, setting: Callable[[str], str | None], storage: Storage) -> DataRoot:
    """Return the data root with the recorded folders of earlier runs in place of the default ones.

    Args:
        root: the data root.
        setting: returns a recorded setting.
        storage: returns the settings of object storage, if a folder is there.
    """
    found = {name: setting(f"{_PLACE}{name}") for name in get_args(Place)}
    return replace(
        root, **{f"{name}_at": _folder(name, place, storage) if place else None for name, place in found.items()}
    )


def images_folder(given: str | os.PathLike[str], option: str, storage: Storage) -> Folder:
    """Return a folder of images by its path or its URL in object storage. Raises WrongUsage for a URL that cannot be used."""
    if not is_url(given):
        return local_path(given, option)
    return ObjectFolder(Objects(parse_location(os.fspath(given), option, schemes=FOR_WRITING), storage()))


def _folder(name: Place, given: str | os.PathLike[str], storage: Storage) -> Folder:
    option = _OPTIONS[name]
    return images_folder(given, option, storage) if name == "approved" else local_path(given, option)


def at(root: DataRoot, name: Place, folder: str | os.PathLike[str], storage: Storage = StorageSettings) -> DataRoot:
    """Return the data root with this folder elsewhere, without recording it."""
    return replace(root, **{f"{name}_at": _folder(name, folder, storage)})


def put(root: DataRoot, name: Place, folder: str | os.PathLike[str], storage: Storage) -> DataRoot:
    """Use this folder from now on; `remember` records it.

    A change is printed, and records in the old folder are copied into the new one.

    Raises:
        WrongUsage: if the folder does not exist and cannot be created, or cannot be a folder of images.
        StoreFailed: if object storage cannot be used.
    """
    now, before = at(root, name, folder, storage), getattr(root, name)
    place = getattr(now, name)
    if isinstance(place, ObjectFolder):
        place.store.check_listing()
    else:
        refuse_no_folder(name, place)
    if name == "approved":
        _refuse_images_in(now)
    if name not in _ONLY_READ and isinstance(place, Path):
        _make(name, place)
    if place != before:
        print(f"{name}: in {place} from now on, until now in {before}", file=sys.stderr, flush=True)
        if name == "derived":
            _copy_records(root.stage2_jsonl, now.stage2_jsonl)
    return now


def remember(root: DataRoot, ledger: Ledger, name: Place) -> None:
    """Record the location of this folder for later commands, unless it is recorded already."""
    setting, place = f"{_PLACE}{name}", str(getattr(root, name))
    if ledger.setting(setting) != place:
        ledger.record_setting(setting, place)
        refresh(root, ledger)


def refuse_no_folder(name: Place, folder: str | os.PathLike[str]) -> None:
    """Raise WrongUsage if there is not and cannot be a folder, because a file is in the way. Creates nothing."""
    place = local_path(folder, _OPTIONS[name])
    nearest = nearest_existing(place)
    if not nearest.is_dir():
        raise _no_folder(name, place, f"{nearest} is a {'broken symlink' if nearest.is_symlink() else 'file'}")
    try:
        os.lstat(place)
    except FileNotFoundError:
        return
    except OSError as error:  # a name that is too long, or a folder without search permission
        raise _no_folder(name, place, error.strerror) from error


class ReadOnly(ImagemillError, PermissionError):
    """A folder that a command has to write to is read-only for this user."""


def refuse_read_only(folder: Path) -> None:
    """Raise ReadOnly if this user cannot create files in the folder, or cannot create the folder. Creates nothing."""
    nearest = nearest_existing(folder)
    if nearest.is_dir() and not os.access(nearest, os.W_OK | os.X_OK):
        raise ReadOnly(
            "the data root is read-only",
            where=folder,
            why=f"{nearest} cannot be written to by this user",
            do="make it writable, or copy it and give the copy as --data-root",
        )


def refuse_no_root(root: DataRoot, *, may_begin: bool = False) -> None:
    """Raise MissingInput if the folder is not a data root, so that a mistyped path leaves no files behind.

    Args:
        root: the data root.
        may_begin: whether the command may create a data root, in a folder that exists or in the default one.
    """
    if root.is_begun or (may_begin and (root.path.is_dir() or root.path == DataRoot.resolve(DEFAULT_ROOT).path)):
        return
    raise MissingInput(
        "not a data root" if root.path.is_dir() else "the data root does not exist",
        where=root.path,
        why="nothing was written",
        do="check --data-root; for a new one, create the folder"
        + ("" if may_begin else " with your images in approved/"),
    )


def nothing_has_run(root: DataRoot) -> MissingInput:
    """Return the error of a command that reads the results of an earlier run."""
    do = f"imagemill run --data-root {shlex.quote(str(root.path))}"
    return MissingInput("nothing has run on this data root yet", where=root.path, do=do)


def refuse_no_images(root: DataRoot) -> None:
    """Raise MissingInput if there is no folder of approved images. Creates nothing."""
    refuse_gone(root, "approved")
    if not is_folder(root.approved):
        raise MissingInput(
            "no folder of approved images",
            where=root.approved,
            do="check --data-root; put images there, captions beside them as {image_id}.txt, or name the folder by --approved",
        )


def sweep_state(root: DataRoot) -> None:
    """Remove temporary files of dead processes from the folders in which commands write single files.

    The folders of embedding kinds, shard sets, presets and Stage-A are swept by their writers.
    """
    kinds = {spec.folder for spec in embedding_specs()}
    reports = [entry.path for entry in _folders(root.derived) if entry.name not in kinds]
    for folder in (root.state, root.quarantine, root.derived, root.shards, *map(Path, reports)):
        sweep_temporaries(folder)


def _folders(folder: Path) -> list[os.DirEntry[str]]:
    return [entry for entry in os.scandir(folder) if entry.is_dir()] if folder.is_dir() else []


def gone(root: DataRoot) -> dict[str, Path]:
    """Return the recorded folders that do not exist: an unmounted disk, or a folder that was moved."""
    remembered = {name: getattr(root, f"{name}_at") for name in get_args(Place)}
    return {name: place for name, place in remembered.items() if place and not is_folder(place)}


def refuse_gone(root: DataRoot, name: Place) -> None:
    """Raise MissingInput if the recorded folder does not exist now."""
    if name in gone(root):
        raise MissingInput(
            f"{name}: the recorded folder does not exist",
            where=getattr(root, name),
            do=f"restore it, or give another with {_OPTIONS[name]}",
        )


def _refuse_images_in(root: DataRoot) -> None:
    """Raise WrongUsage if the folder of images does not exist, contains the data root, or is part of another folder of it."""
    if not isinstance(root.approved, Path):
        return
    if not root.approved.is_dir():
        raise WrongUsage("approved: there is no such folder", where=root.approved, do="give the folder of the images")
    place = os.path.realpath(root.approved)
    for folder in (root.path, *root.other_folders):
        other = os.path.realpath(folder)
        if place == other or is_inside(other, place) or (folder != root.path and is_inside(place, other)):
            relation = "is" if place == other else "contains" if is_inside(other, place) else "is part of"
            raise WrongUsage(
                f"approved: {root.approved} {relation} {folder}",
                why=f"imagemill writes to {folder}, and only reads the folder of images",
                do="give the folder of the images, or another --data-root",
            )


def _make(name: Place, place: Path) -> None:
    try:
        place.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _no_folder(name, place, error.strerror) from error


def _no_folder(name: Place, place: Path, why: str | None) -> WrongUsage:
    return WrongUsage(f"{name}: cannot create the folder", where=place, why=why, do=f"give another {_OPTIONS[name]}")


def _copy_records(old: Path, new: Path) -> None:
    """Copy the record file if the new folder has none; the old file stays.

    Recomputing its content costs more than the disk space.
    """
    if new.exists() or not old.is_file():
        return
    with atomic_write(new) as into, open(old, "rb") as source:
        shutil.copyfileobj(source, into, 1 << 20)
    print(f"records: copied from {old}", file=sys.stderr, flush=True)
