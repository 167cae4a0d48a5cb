"""The entries of a folder, each looked up once. Their names are interpreted in scan.py.

Spec: docs/spec/stage2.md#inputs
"""

import errno
import heapq
import os
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from itertools import pairwise
from operator import attrgetter
from pathlib import Path
from typing import Final, Literal, NamedTuple

import msgspec

from imagemill.domain.ids import image_id_of, path_of_id, stem_of, suffix_of
from imagemill.domain.inputs import FORMATS, InputSettings, folded
from imagemill.fs.blobs import Blob
from imagemill.fs.fingerprints import FileSignature, file_signature
from imagemill.fs.folders import Folder, ObjectFolder
from imagemill.fs.listing import is_inside

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
_CACHES: Final = (".npz", ".safetensors")
_TABLES: Final = re.compile(r"[0-9]+(\.parquet|_stats\.json)").fullmatch
# Extensions that none of these names has.
_USUAL: Final = (".jpg", ".txt", ".png", ".webp", ".jpeg")


class Remark(NamedTuple):
    """Details of an unusual entry.

    Attributes:
        names: what a folder directly contains.
        why: of something that is neither file nor folder, or of a folder that cannot be entered: why.
        do: what to do in that case.
        reason: code of the problem in that case, if it is a special one.
    """

    names: tuple[str, ...] = ()
    why: str = ""
    do: str = ""
    reason: str = ""


NO_REMARK: Final = Remark()


class Entry(msgspec.Struct, frozen=True, gc=False):
    """One file or folder below the folder of images.

    Attributes:
        path: relative to the folder, as on disk, its parts separated by `/`.
        kind: a file, a folder that is not entered, something else (or something that cannot be looked up), or ignored.
        signature: of a file or folder; of the target of a link.
        changed_ns: the later of its modification and change times, in nanoseconds.
    """

    path: str
    kind: Literal["file", "folder", "other", "ignored"]
    signature: FileSignature | None = None
    changed_ns: int = 0

    @property
    def remark(self) -> Remark:
        """Details, if the entry is an unusual one."""
        return NO_REMARK


class UnusualEntry(Entry, frozen=True, gc=False):
    """An entry with details; a class of its own, because each field would need memory in all entries."""

    details: Remark = NO_REMARK

    @property
    def remark(self) -> Remark:
        """Details."""
        return self.details


def is_ignored(path: str, exclude: Collection[str] = ()) -> bool:
    """Return whether a path alone is a reason to ignore an entry.

    >>> is_ignored("a/.DS_Store"), is_ignored("00000.parquet"), is_ignored("a.jpg"), is_ignored("b/a.jpg", ["b/*"])
    (True, True, False, True)
    """
    name = path[path.rfind("/") + 1 :]
    if name.startswith("."):
        return True
    # Nearly every name; the comparisons below take twice as long.
    if not name.endswith(_USUAL):
        lower = name.lower()
        if lower in _LITTER or lower.endswith(_CACHES) or _TABLES(lower):
            return True
    return bool(exclude) and any(fnmatchcase(path, each) for each in exclude)


def list_entries(
    folder: Folder,
    inputs: InputSettings,
    own: Collection[Path] = (),
    *,
    wanted: Callable[[str], bool] | None = None,
) -> list[Entry]:
    """Return the entries of a folder, in order of their paths; with `inputs.recursive` those of its sub-folders, too.

    A folder that is entered is no entry. Every real folder is entered once: first those that are no links, then links.

    Args:
        folder: the folder.
        inputs: whether sub-folders are entered, and which entries are ignored.
        own: folders of the data root, which links must not lead into.
        wanted: returns whether an entry with a path is listed at all; unset: every one is.

    Raises:
        OSError: if the folder cannot be listed.
    """
    return in_order(iterate_entries(folder, inputs, own, wanted=wanted))


def iterate_entries(
    folder: Folder,
    inputs: InputSettings,
    own: Collection[Path] = (),
    *,
    wanted: Callable[[str], bool] | None = None,
) -> Iterator[Entry]:
    """Yield the entries of `list_entries` in any order, each as soon as it has been looked up.

    Raises:
        OSError: if the folder cannot be listed.
    """
    if isinstance(folder, ObjectFolder):
        return (each for each in _entries_of(folder, inputs) if wanted is None or wanted(each.path))
    found = _walk(folder, inputs, own, wanted)
    return (_entry(*each) for each in found if wanted is None or wanted(each[0]))


def in_order(entries: Iterable[Entry]) -> list[Entry]:
    """Return entries in order of their paths."""
    listed = list(entries)
    # Keys of object storage arrive in order; a sort would need 16 bytes more for each.
    if any(one.path > other.path for one, other in pairwise(listed)):
        listed.sort(key=attrgetter("path"))
    return listed


def list_paths(folder: Folder, inputs: InputSettings, own: Collection[Path] = ()) -> list[str]:
    """Return the paths of `list_entries` in any order, without looking up files.

    Raises:
        OSError: if the folder cannot be listed.
    """
    if isinstance(folder, ObjectFolder):
        return [each.path for each in _entries_of(folder, inputs)]
    return [path for path, _, _ in _walk(folder, inputs, own)]


def _entries_of(folder: ObjectFolder, inputs: InputSettings) -> Iterator[Entry]:
    """Yield the entries of a folder in object storage: its keys, read as paths."""
    folders: dict[str, set[str]] = defaultdict(set)
    ignored: set[str] = set()
    entered: set[str] = set()
    marks: list[Blob] = []
    changed = 0
    for blob in folder.list():
        *parents, name = parts = blob.key.split("/")
        if not name:
            continue  # a mark that file managers write for a folder
        if any(part in ("", ".", "..") for part in parts):
            yield UnusualEntry(blob.key, OTHER, details=_BAD_KEY)
            continue
        above = ["/".join(parts[:n]) for n in range(1, len(parts) + 1)]
        entered.update(above[:-1])
        if (first := next((path for path in above if is_ignored(path, inputs.exclude)), None)) is not None:
            ignored.add(first)
        elif parents and not inputs.recursive:
            folders[parents[0]].add(parts[1])
        elif not blob.size and "." not in name:
            marks.append(blob)  # or an empty file without an extension: the library leaves out a `/` at the end
        else:
            # Times of objects are whole seconds, and many are equal.
            changed = changed if changed == blob.modified_ns else blob.modified_ns
            yield Entry(blob.key, FILE, blob.signature, changed)
    yield from (Entry(each.key, FILE, each.signature, each.modified_ns) for each in marks if each.key not in entered)
    yield from (Entry(path, IGNORED) for path in ignored)
    yield from (
        UnusualEntry(path, FOLDER, FileSignature(""), 0, Remark(tuple(sorted(names))))
        for path, names in folders.items()
    )


_BAD_KEY: Final = Remark(why="a key with an empty part, or a part . or ..", do="rename the object", reason="bad_key")


_IGNORE: Final = Remark(reason=IGNORED)


def _walk(
    folder: Path, inputs: InputSettings, own: Collection[Path], wanted: Callable[[str], bool] | None = None
) -> Iterator[tuple[str, os.DirEntry[str], Remark | None]]:
    """Yield what is in a folder, and in its sub-folders if they are entered. Files that are not wanted may be left out.

    Yields:
        path, entry, and a remark: `_IGNORE` for what is ignored, or why a folder is not entered although it should be. It is a
        plain tuple, which takes a tenth of the time of a named one.
    """
    own_folders = {os.path.realpath(each): _identity(os.stat(each)) for each in own if os.path.isdir(each)}
    # By device and inode: the path at which each real folder was entered.
    entered: dict[tuple[int, int], str] = {_identity(os.stat(folder)): "."}
    folders: list[tuple[str, os.DirEntry[str] | None]] = [("", None)]
    links: list[tuple[str, os.DirEntry[str]]] = []
    recursive, exclude = inputs.recursive, inputs.exclude
    while folders or links:
        path, at = folders.pop() if folders else heapq.heappop(links)
        try:
            if at is not None and (refusal := _refused_folder(at, entered, own_folders)):
                yield path, at, refusal
                continue
            if at is not None:
                entered[_identity(at.stat())] = path
            with os.scandir(folder if at is None else at) as inner:
                entries = list(inner)
        except OSError as error:
            if at is None:
                raise
            yield path, at, Remark(why=f"a folder that cannot be listed: {error.strerror}", do=_READABLE)
            continue
        prefix = f"{path}/" if path else ""
        entries.reverse()
        while entries:
            entry = entries.pop()  # which keeps half a kilobyte once it has been looked up
            inside = prefix + entry.name
            try:
                enters = recursive and entry.is_dir()
            except OSError:
                enters = False
            if wanted is not None and not wanted(inside) and not enters:
                continue
            if is_ignored(inside, exclude):
                yield inside, entry, _IGNORE
            elif not enters:
                yield inside, entry, None
            elif entry.is_symlink():
                heapq.heappush(links, (inside, entry))
            else:
                folders.append((inside, entry))


_READABLE: Final = "make it readable, or move it elsewhere"


def _refused_folder(
    at: os.DirEntry[str], entered: Mapping[tuple[int, int], str], own: Mapping[str, tuple[int, int]]
) -> Remark | None:
    """Return why a folder must not be entered, and what to do; None if it may be."""
    identity = _identity(at.stat())
    target = os.path.realpath(at.path) if at.is_symlink() else None
    for path, each in own.items():
        if identity == each or (target and (is_inside(target, path) or is_inside(path, target))):
            return Remark(why=f"a folder that leads to {path}, which belongs to the data root", do="move it elsewhere")
    if (place := entered.get(identity)) is not None:
        return Remark(why=f"a folder that is already read as {place}", do="remove the link to it")
    return None


def _identity(stat: os.stat_result) -> tuple[int, int]:
    return stat.st_dev, stat.st_ino


def concerns(ids: Collection[str]) -> Callable[[str], bool]:
    """Return a function that tells whether a path may be needed to classify these ids: theirs, or one that it belongs to."""
    in_folder: dict[str, set[str]] = defaultdict(set)
    for each in ids:
        for path in {each, path_of_id(each) or each}:
            folder, _, stem = path.rpartition("/")
            in_folder[folder].add(stem)
    by_folder = {folder: _concerns(stems) for folder, stems in in_folder.items()}
    cut = frozenset(each for each in ids if path_of_id(each) is None and "%2F" in each)

    def concerned(path: str) -> bool:
        folder, _, name = path.rpartition("/")
        here = by_folder.get(folder)
        return (here is not None and here(name)) or (bool(cut) and image_id_of(path) in cut)

    return concerned


def _concerns(stems: Collection[str]) -> Callable[[str], bool]:
    """Return `concerns` for the names in one folder."""
    stems = {folded(each) for each in stems}
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
        return name.startswith(starts) and ((stem := stem_of(name)) in stems or _image_of(stem) in stems)

    return concerned


def _image_of(name: str) -> str | None:
    """Return the stem of an image file's name, whose caption may be named after it: `x.jpg.txt`."""
    return stem_of(name) if suffix_of(name)[1:] in FORMATS else None


_COMPANIONS: Final = ("-masklabel", "-condlabel")


def companion_base(stem: str) -> str | None:
    """Return the stem of the image that OneTrainer's mask or control image belongs to; None for every other stem.

    >>> companion_base("a-masklabel"), companion_base("a")
    ('a', None)
    """
    if stem.endswith(_COMPANIONS):
        base, _, _ = stem.rpartition("-")
        return base or None
    return None


def is_companion(stem: str, stems: Container[str]) -> bool:
    """Return whether a file with this stem accompanies an image with one of the stems."""
    base = companion_base(stem)
    return base is not None and base in stems


def _changed(stat: os.stat_result) -> int:
    # Include the change time: a copy that preserves modification times is still being written although it looks old.
    return max(stat.st_mtime_ns, stat.st_ctime_ns)


def _entry(path: str, entry: os.DirEntry[str], remark: Remark | None) -> Entry:
    if remark is not None:
        return Entry(path, IGNORED) if remark is _IGNORE else UnusualEntry(path, FOLDER, details=remark)
    try:
        if entry.is_file():
            stat = entry.stat()
            return Entry(path, FILE, file_signature(stat), _changed(stat))
        if entry.is_dir():
            with os.scandir(entry) as inner:
                stat, names = entry.stat(), tuple(each.name for each in inner)
                return UnusualEntry(path, FOLDER, file_signature(stat), _changed(stat), Remark(names))
        kind = "a broken symlink" if entry.is_symlink() else "neither a file nor a link to one"
        return UnusualEntry(path, OTHER, details=Remark(why=kind, do="remove it, or restore the file"))
    except OSError as error:
        if error.errno == errno.ELOOP:
            why, do = "a symlink that leads back to itself", "remove it, or restore the file"
        else:
            why, do = f"cannot be looked up: {error.strerror}", _READABLE
        return UnusualEntry(path, OTHER, details=Remark(why=why, do=do))
