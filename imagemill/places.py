"""Folders outside the data root that a run was told to use, and that later commands find again.

    derived   --output-base-dir      shards   --output-dir      public_data   --public-data-root
    stage_a_input   --input_dir      stage_a_output   --output_dir

Belongs here: remembering them, and the data root with them in place.
Belongs elsewhere: what lies where below a root (layout.py).
Source: CONTRACTS, first table: "remembered in .imagemill/; a run with another place than the remembered one says so".
"""

import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Literal, get_args

from imagemill.atomic import atomic_write
from imagemill.errors import MissingInput, WrongUsage
from imagemill.layout import DataRoot
from imagemill.ledger import Ledger

Place = Literal["derived", "shards", "public_data", "stage_a_input", "stage_a_output"]

_OPTIONS: dict[Place, str] = {
    "derived": "--output-base-dir",
    "shards": "--output-dir",
    "public_data": "--public-data-root",
    "stage_a_input": "--input_dir",
    "stage_a_output": "--output_dir",
}
_ONLY_READ = {"stage_a_input"}


def locate(given: str | os.PathLike[str] | None = None) -> DataRoot:
    """The data root, with its folders where the last runs put them."""
    root = DataRoot.resolve(given)
    if not root.ledger.is_file():
        return root
    with Ledger(root.ledger, read_only=True) as ledger:
        return replace(root, **{f"{name}_at": ledger.place(name) for name in get_args(Place)})


def at(root: DataRoot, name: Place, folder: str | os.PathLike[str]) -> DataRoot:
    """The data root with this folder elsewhere, for whoever must not remember it."""
    return replace(root, **{f"{name}_at": Path(os.path.abspath(os.path.expanduser(folder)))})


def put(root: DataRoot, name: Place, folder: str | os.PathLike[str]) -> DataRoot:
    """Use this folder from now on. Another one than before is said, and records that lie in the old one come along.

    Raises:
        WrongUsage: it is none, and cannot be made. Nothing is remembered.
    """
    now, before = at(root, name, folder), getattr(root, name)
    place = getattr(now, name)
    refuse_no_folder(name, place)
    if name not in _ONLY_READ:
        _make(name, place)
    if place != before:
        print(f"{name}: in {place} from now on, until now in {before}", file=sys.stderr, flush=True)
        if name == "derived":
            _bring_records(root.stage2_jsonl, now.stage2_jsonl)
    with Ledger(root.ledger) as ledger:
        ledger.remember_place(name, place)
    return now


def refuse_no_folder(name: Place, folder: str | os.PathLike[str]) -> None:
    """Raises WrongUsage where no folder is, nor could be: a file is in its place or on the way to it. Makes nothing."""
    place = Path(os.path.abspath(os.path.expanduser(folder)))
    nearest = next(path for path in (place, *place.parents) if os.path.lexists(path))
    if not nearest.is_dir():
        raise _no_folder(name, place, f"{nearest} is a {'link to nothing' if nearest.is_symlink() else 'file'}")
    try:
        os.lstat(place)
    except FileNotFoundError:
        return
    except OSError as error:  # a name that is too long, a folder that may not be looked into
        raise _no_folder(name, place, error.strerror) from error


def gone(root: DataRoot) -> dict[str, Path]:
    """Remembered places where no folder is: a disk that is not mounted, a folder that somebody moved."""
    remembered = {name: getattr(root, f"{name}_at") for name in get_args(Place)}
    return {name: place for name, place in remembered.items() if place and not place.is_dir()}


def refuse_gone(root: DataRoot, name: Place) -> None:
    """Raises MissingInput where the remembered place is no folder now."""
    if name in gone(root):
        raise MissingInput(
            f"{name}: the remembered folder is not there",
            where=getattr(root, name),
            do=f"bring it back, or name another by {_OPTIONS[name]}",
        )


def _make(name: Place, place: Path) -> None:
    try:
        place.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _no_folder(name, place, error.strerror) from error


def _no_folder(name: Place, place: Path, why: str | None) -> WrongUsage:
    return WrongUsage(
        f"{name}: no folder, and none can be made", where=place, why=why, do=f"give another {_OPTIONS[name]}"
    )


def _bring_records(old: Path, new: Path) -> None:
    """Copy the file of records where there is none: what it holds costs more than its disk space. The old one stays."""
    if new.exists() or not old.is_file():
        return
    with atomic_write(new) as into, open(old, "rb") as source:
        shutil.copyfileobj(source, into, 1 << 20)
    print(f"records: copied from {old}", file=sys.stderr, flush=True)
