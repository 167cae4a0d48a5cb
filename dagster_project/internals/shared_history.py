"""The data roots of a Dagster history that several of them share.

    session of a data root ──> id, name, path ──joined──> the history's list of roots, or a refusal

Partition sets and asset keys are global in a history. Under the same names, the images of one root would become partitions of the
other. The list is kept in the instance's key-value table, and written only in a history that DAGSTER_HOME names.

Spec: docs/spec/conventions.md#several-data-roots
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import dagster as dg
import msgspec
from filelock import FileLock

from imagemill.config import name_in_history
from imagemill.domain.layout import DataRoot, home_of, shares_history
from imagemill.errors import ImagemillError, WrongUsage
from imagemill.store.ledger import ROOT_ID, Ledger
from imagemill.store.second_copy import newest, open_ledger
from resources.keys import IMAGES

_KEY = "imagemill/roots"
_LOCK = ".roots.lock"
_OWN_HISTORY = "or unset DAGSTER_HOME: the root then has a history of its own"


class RegisteredRoot(msgspec.Struct, frozen=True):
    """A data root of a history.

    Attributes:
        root_id: its id; empty for one without a ledger.
        name: what its keys begin with; None for plain keys.
        path: its absolute path.
    """

    root_id: str
    name: str | None
    path: str


def joined(
    known: Sequence[RegisteredRoot], new: RegisteredRoot, id_at: Callable[[str], str | None]
) -> list[RegisteredRoot]:
    """Return the roots of a history that a root has joined; one that was moved keeps its place.

    Args:
        known: the roots so far.
        new: the root.
        id_at: returns the id of the data root at a path; None without one.

    Raises:
        WrongUsage: if the root must not use this history.
    """
    earlier = next((each for each in known if each.root_id == new.root_id), None)
    if earlier and earlier.path != new.path and id_at(earlier.path) == new.root_id:
        raise WrongUsage(
            "two data roots have the same id",
            where=new.path,
            why=f"one of them is a copy of the other: {earlier.path}",
            do="give the copy an id and, in its imagemill.yaml, a name of its own: run there "
            "`imagemill repair --new-id --apply`",
        )
    if earlier and earlier.name != new.name:
        before, now = (each or "no name" for each in (earlier.name, new.name))
        raise WrongUsage(
            f"the name of the data root was {before}, and is now {now}",
            where=new.path,
            why="names of partitions and assets in this history begin with it, and cannot change",
            do=f"set {f'name: {earlier.name}' if earlier.name else 'no name'} in imagemill.yaml, {_OWN_HISTORY}",
        )
    # A root that was made again in the same place, or whose ledger and copies were lost, takes its own place.
    earlier = earlier or next((each for each in known if (each.name, each.path) == (new.name, new.path)), None)
    other = next((each for each in known if each is not earlier and each.name == new.name), None)
    if other and new.name:
        raise WrongUsage(
            f"the name {new.name} is in use",
            where=new.path,
            why=f"another data root of this history has it: {other.path}",
            do=f"choose another name in imagemill.yaml, {_OWN_HISTORY}",
        )
    if other:
        raise WrongUsage(
            "a second data root without a name",
            where=new.path,
            why=f"its images would become partitions of the other one: {other.path}",
            do=f"set a name, such as name: animals, in imagemill.yaml, {_OWN_HISTORY}",
        )
    return [new if each is earlier else each for each in known] + ([] if earlier else [new])


def register_root(instance: dg.DagsterInstance, root: DataRoot) -> str | None:
    """Add a data root to the list of its history, if others may use that, and return its name; without a ledger it gets one.

    Raises:
        WrongUsage: if the root must not use this history, to which nothing is written, or if the root is not in the list and
            its configuration cannot be read.
    """
    if not shares_history(root):
        return None
    home = home_of(root)
    with FileLock(home / _LOCK):
        known = _read(instance)
        root_id = _id_of(root)
        name = _name_of(root, root_id, known)
        after = joined(known, RegisteredRoot(root_id, name, str(root.path)), _id_at)
        if name is None and all(each.root_id != root_id for each in known):
            _refuse_foreign_images(instance, root)
        if not root.ledger.exists():
            with open_ledger(root) as ledger:
                root_id = ledger.setting(ROOT_ID) or ""
            after = joined(known, RegisteredRoot(root_id, name, str(root.path)), _id_at)
        if after != known:
            instance.daemon_cursor_storage.set_cursor_values({_KEY: msgspec.json.encode(after).decode()})
    return name


def name_of_root(instance: dg.DagsterInstance, root: DataRoot) -> str | None:
    """Return the name of a data root in its history, also if its configuration cannot be read but the root is in the list."""
    return _name_of(root, _id_of(root), _read(instance)) if shares_history(root) else None


def _name_of(root: DataRoot, root_id: str, known: Sequence[RegisteredRoot]) -> str | None:
    """Return the configured name of a root; the listed one if its configuration cannot be read, so that it keeps its keys."""
    try:
        return name_in_history(root)
    except ImagemillError:
        if listed := [each.name for each in known if root_id and each.root_id == root_id]:
            return listed[0]
        raise


def folders_of_owners(instance: dg.DagsterInstance) -> list[Path]:
    """Return the folders of lock files of the roots that share the history."""
    return [DataRoot(Path(each.path)).owners for each in _read(instance)]


def _read(instance: dg.DagsterInstance) -> list[RegisteredRoot]:
    text = instance.daemon_cursor_storage.get_cursor_values({_KEY}).get(_KEY)
    return msgspec.json.decode(text, type=list[RegisteredRoot]) if text else []


def _id_at(path: str) -> str | None:
    ledger = DataRoot(Path(path)).ledger
    if not ledger.exists():
        return None
    try:
        with Ledger(ledger, read_only=True) as opened:
            return opened.setting(ROOT_ID)
    except ImagemillError:
        return None


def _id_of(root: DataRoot) -> str:
    return _id_at(str(root.path)) or _id_of_copy(root) or ""


def _id_of_copy(root: DataRoot) -> str | None:
    """Return the id that a new ledger takes from the second copy of one that was lost."""
    found = newest(root)
    return found.copy.settings.get(ROOT_ID) if found else None


def _refuse_foreign_images(instance: dg.DagsterInstance, root: DataRoot) -> None:
    """Raise WrongUsage if the history has images, none of which this root's ledger knows: they are another root's."""
    keys = instance.get_dynamic_partitions(IMAGES)
    if not keys:
        return
    ids: set[str] = set()
    if root.ledger.exists():
        with Ledger(root.ledger, read_only=True) as ledger:
            ids = ledger.source_ids()
    if ids.isdisjoint(keys):
        raise WrongUsage(
            "the history has images of another data root",
            where=home_of(root),
            why=f"none of its {len(keys):,} partitions is an image of {root.path}",
            do=f"set a name, such as name: animals, in imagemill.yaml, {_OWN_HISTORY}",
        )
