"""The entries of a folder, each looked up once. Their names are interpreted in scan.py.

Spec: docs/spec/stage2.md#inputs
"""

import errno
import os
import re
from collections.abc import Callable, Collection, Container
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Final, Literal

import msgspec

from imagemill.domain.ids import image_id_of, suffix_of
from imagemill.domain.inputs import FORMATS, folded

FILE, FOLDER, OTHER, IGNORED = "file", "folder", "other", "ignored"

# Names, in lower case, of what operating systems, network drives and trainers leave in folders.
_LITTER: Final = frozenset(
    {
        "__macosx",
        "@eadir",
        "$recycle.bin",
        "system volume information",
        "thumbs.db",
        "desktop.ini",
        "_latent_cache",
        "_controls_",
    }
)
# Caches of trainers, and the tables that img2dataset writes.
_CACHES: Final = re.compile(r".*\.(npz|safetensors)|[0-9]+\.parquet|[0-9]+_stats\.json", re.DOTALL).fullmatch


class Entry(msgspec.Struct, frozen=True, gc=False):
    """One name in a folder.

    Attributes:
        name: as on disk.
        kind: a file, a folder, something else (or something that cannot be looked up), or ignored by its name.
        stat: of a file or folder; of the target of a link.
        names: what a folder directly contains.
        why: of something else: what it is.
        do: of something else: what to do.
    """

    name: str
    kind: Literal["file", "folder", "other", "ignored"]
    stat: os.stat_result | None = None
    names: tuple[str, ...] = ()
    why: str = ""
    do: str = ""


def is_ignored(name: str, exclude: Collection[str] = ()) -> bool:
    """Return whether a name alone is a reason to ignore an entry.

    >>> is_ignored(".DS_Store"), is_ignored("00000.parquet"), is_ignored("a.jpg"), is_ignored("a.jpg", ["a.*"])
    (True, True, False, True)
    """
    if name.startswith("."):
        return True
    lower = name.lower()
    return lower in _LITTER or _CACHES(lower) is not None or any(fnmatchcase(name, each) for each in exclude)


def list_entries(
    folder: Path, exclude: Collection[str] = (), *, wanted: Callable[[str], bool] | None = None
) -> list[Entry]:
    """Return the entries at the top level of a folder, in name order.

    Args:
        folder: the folder.
        exclude: patterns of names to ignore.
        wanted: returns whether a name is listed at all; unset: every one is.

    Raises:
        OSError: if the folder cannot be listed.
    """
    with os.scandir(folder) as entries:
        listed = sorted(
            entries if wanted is None else (entry for entry in entries if wanted(entry.name)), key=lambda e: e.name
        )
        return [_entry(entry, exclude) for entry in listed]


def concerns(ids: Collection[str]) -> Callable[[str], bool]:
    """Return a function that tells whether an entry may be needed to classify these ids: theirs, or one that it belongs to."""
    stems = {folded(each) for each in ids}
    # An image is only a companion if the image that it accompanies exists.
    stems |= {base for base in map(companion_base, stems) if base}
    starts = tuple(f"{stem}." for stem in stems)
    # Problems show some characters as escapes; the name on disk starts with the text before the first escape.
    escaped = tuple(stem.partition("\\")[0] for stem in stems if "\\" in stem)

    def concerned(name: str) -> bool:
        name = folded(name)
        if name.startswith(escaped) or name in stems:
            return True
        # The first comparison is a tenth of the others.
        return name.startswith(starts) and ((stem := image_id_of(name)) in stems or _image_of(stem) in stems)

    return concerned


def _image_of(name: str) -> str | None:
    """Return the id of an image file's name, whose caption may be named after it: `x.jpg.txt`."""
    return image_id_of(name) if suffix_of(name)[1:] in FORMATS else None


def companion_base(stem: str) -> str | None:
    """Return the stem of the image that OneTrainer's mask or control image belongs to; None for every other stem.

    >>> companion_base("a-masklabel"), companion_base("a")
    ('a', None)
    """
    for end in ("-masklabel", "-condlabel"):
        if stem.endswith(end) and len(stem) > len(end):
            return stem[: -len(end)]
    return None


def is_companion(stem: str, stems: Container[str]) -> bool:
    """Return whether a file with this stem accompanies an image with one of the stems."""
    base = companion_base(stem)
    return base is not None and base in stems


def _entry(entry: os.DirEntry[str], exclude: Collection[str]) -> Entry:
    name = entry.name
    if is_ignored(name, exclude):
        return Entry(name, IGNORED)
    try:
        if entry.is_file():
            return Entry(name, FILE, entry.stat())
        if entry.is_dir():
            with os.scandir(entry) as inner:
                return Entry(name, FOLDER, entry.stat(), tuple(each.name for each in inner))
        kind = "a broken symlink" if entry.is_symlink() else "neither a file nor a link to one"
        return Entry(name, OTHER, why=kind, do="remove it, or restore the file")
    except OSError as error:
        if error.errno == errno.ELOOP:
            why, do = "a symlink that leads back to itself", "remove it, or restore the file"
        else:
            why, do = f"cannot be looked up: {error.strerror}", "make it readable, or move it elsewhere"
        return Entry(name, OTHER, why=why, do=do)
