"""Archives of images, as img2dataset and WebDataset write them: the folder of each archive, and the file of each member.

    archives/00000.tar             000000000.jpg  000000000.txt  train/000000001.jpg
    approved/00000/                000000000.jpg  000000000.txt  train/000000001.jpg

Nothing here accesses a disk. Members are read in formats/tar_members.py and written in unpacking.py.

Spec: docs/spec/stage2.md#archives
"""

import os
import shlex
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Final, NamedTuple

from imagemill.domain.ids import name_problem, suffix_of
from imagemill.errors import WrongUsage
from imagemill.formats.tar_members import TarMember
from imagemill.inputs.listing import is_ignored

TAR_SUFFIXES: Final = (".tar", ".tar.gz", ".tgz")

# Bytes of a name on common file systems, and of a path below `approved/`. A system's limit for whole paths is 4,096 bytes.
_LONGEST_NAME: Final = 255
_LONGEST_PATH: Final = 2_000
_MOST_PARTS: Final = 100

# Files of one run, and the share of the free space that it may fill.
MOST_FILES: Final = 1_000_000
SHARE_OF_FREE: Final = 0.9

_UNPACK: Final = "unpack the archive with another program, and rename the file"


class Target(NamedTuple):
    """The file that a member becomes: its folders below that of the archive, and its name."""

    folders: tuple[str, ...]
    name: str

    @property
    def path(self) -> str:
        """Its path below the folder of the archive."""
        return "/".join((*self.folders, self.name))


class Rejected(NamedTuple):
    """A member that is not imported; `hidden` if its name begins with a dot, which is no problem."""

    reason: str
    detail: str = ""
    remedy: str = ""


HIDDEN: Final = Rejected("hidden")


def is_tar(name: str) -> bool:
    """Return whether a file has the name of an archive that `imagemill import` unpacks.

    >>> is_tar("00000.TAR"), is_tar("photos.zip")
    (True, False)
    """
    return name.lower().endswith(TAR_SUFFIXES)


def archive_stem(name: str) -> str:
    """Return the name of the folder for an archive of this name.

    >>> archive_stem("00000.tar"), archive_stem("a.b.tar.gz"), archive_stem("photos.tgz")
    ('00000', 'a.b', 'photos')
    """
    suffix = next((each for each in sorted(TAR_SUFFIXES, key=len, reverse=True) if name.lower().endswith(each)), None)
    return name[: -len(suffix)] if suffix else name.removesuffix(suffix_of(name))


def assign_folders(archives: Iterable[Path], exclude: Collection[str] = ()) -> dict[Path, str]:
    """Return the folder's name of each archive; an archive that is given twice is one.

    Raises:
        WrongUsage: if two archives have the same one, or if images in a folder of that name would be ignored.
    """
    folders: dict[str, Path] = {}
    for archive in archives:
        stem = archive_stem(archive.name)
        if problem := _folder_problem(stem, exclude):
            raise WrongUsage(
                "the archive's name gives no folder for its images",
                where=printable(str(archive)),
                why=problem,
                do="rename the archive",
            )
        if (other := folders.setdefault(stem, archive)) != archive:
            raise WrongUsage(
                f"two archives would be unpacked into approved/{stem}",
                where=f"{other}, {archive}",
                why="keys may repeat between archives, so each needs a folder of its own",
                do="rename one of them",
            )
    return {archive: stem for stem, archive in folders.items()}


def _folder_problem(stem: str, exclude: Collection[str]) -> str | None:
    if problem := name_problem(stem):
        return f"the folder's name {problem}" if stem else "the folder's name would be empty"
    if is_ignored(stem, exclude):
        return f"a folder {stem} in approved/ is ignored"
    return None


def plan_member(member: TarMember) -> Target | Rejected | None:
    """Return the file that a member becomes, or why it is not imported; None for a folder, which its files create.

    Spec: docs/spec/stage2.md#archives
    """
    parts = [part for part in member.name.split("/") if part not in {"", "."}]
    if member.name.startswith("/") or ".." in parts:
        return Rejected("unsafe_path", "its path leads out of the archive's folder", _UNPACK)
    if problem := _name_problem(parts):
        return Rejected("bad_name", problem, _UNPACK)
    if member.kind == "folder":
        return None
    if any(part.startswith(".") for part in parts):
        return HIDDEN
    if member.kind != "file":
        return _rejected_kind(member)
    return Target(tuple(parts[:-1]), parts[-1]) if parts else Rejected("bad_name", "it has no name", _UNPACK)


def _name_problem(parts: list[str]) -> str | None:
    for part in parts:
        if problem := name_problem(part):
            return "its name is not UTF-8" if any("\ud800" <= c <= "\udfff" for c in part) else f"its name {problem}"
        if len(os.fsencode(part)) > _LONGEST_NAME:
            return f"a part of its path is longer than {_LONGEST_NAME} bytes"
    if len(parts) > _MOST_PARTS or len(os.fsencode("/".join(parts))) > _LONGEST_PATH:
        return f"its path has more than {_MOST_PARTS} parts or {_LONGEST_PATH} bytes"
    return None


def _rejected_kind(member: TarMember) -> Rejected:
    if member.kind == "link":
        return Rejected(
            "link", f"a link to {printable(member.target)}", "put the file into the archive instead of the link"
        )
    if member.kind == "sparse":
        return Rejected("sparse", "a sparse file", "make the archive again without --sparse")
    return Rejected("not_a_file", "a device, a pipe, or of an unknown type", "leave it out of the archive")


def printable(name: str) -> str:
    """Return a name as messages show it, at most 200 characters of it."""
    cut = name if len(name) <= 200 else f"{name[:100]}…{name[-99:]}"
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in cut)


def archive_remedy(path: str) -> str:
    """Return what to do with a tar at this path below `approved/`."""
    return f"unpack it (`imagemill import {_shell_word(path)}`), then move the archive elsewhere"


def _shell_word(path: str) -> str:
    """Return a path as a word of a command line, whole; with characters that cannot be shown in the form `$'…'`."""
    if path.isprintable():
        return shlex.quote(path)
    plain = (chr(byte) if 32 <= byte < 127 and byte not in b"'\\" else f"\\x{byte:02x}" for byte in os.fsencode(path))
    return f"$'{''.join(plain)}'"
