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
from imagemill.layout import DataRoot
from imagemill.ledger import Ledger

Place = Literal["derived", "shards", "public_data", "stage_a_input", "stage_a_output"]


def locate(given: str | os.PathLike[str] | None = None) -> DataRoot:
    """The data root, with its folders where the last runs put them."""
    root = DataRoot.resolve(given)
    if not root.ledger.is_file():
        return root
    with Ledger(root.ledger, read_only=True) as ledger:
        return replace(root, **{f"{name}_at": ledger.place(name) for name in get_args(Place)})


def at(root: DataRoot, name: Place, folder: str | os.PathLike[str]) -> DataRoot:
    """The data root with this folder elsewhere, for whoever must not remember it."""
    return replace(root, **{f"{name}_at": Path(os.path.abspath(Path(folder).expanduser()))})


def put(root: DataRoot, name: Place, folder: str | os.PathLike[str]) -> DataRoot:
    """Use this folder from now on. Another one than before is said, and records that lie in the old one come along."""
    now, before = at(root, name, folder), getattr(root, name)
    place = getattr(now, name)
    if place != before:
        print(f"{name}: in {place} from now on, until now in {before}", file=sys.stderr, flush=True)
        if name == "derived":
            _bring_records(root.stage2_jsonl, now.stage2_jsonl)
    with Ledger(root.ledger) as ledger:
        ledger.remember_place(name, place)
    return now


def _bring_records(old: Path, new: Path) -> None:
    """Copy the file of records where there is none: what it holds costs more than its disk space. The old one stays."""
    if new.exists() or not old.is_file():
        return
    with atomic_write(new) as into, open(old, "rb") as source:
        shutil.copyfileobj(source, into, 1 << 20)
    print(f"records: copied from {old}", file=sys.stderr, flush=True)
