"""Checks of the images in records: exactly the first N, in file order, without replacement by later ones.

A check covers existence, decoding, declared size, and identity with the base preset's file. Which records count is
decided by the rules of their kinds; pixels for a model are decoded in imagemill/formats/images.py.

Spec: docs/spec/presets.md#hardlinks, docs/spec/validation.md#image-checks
"""

import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from imagemill.domain.layout import DataRoot
from imagemill.errors import Refused
from imagemill.validation.catalogue import finding
from imagemill.validation.findings import Finding

ImageMode = Literal["none", "exists", "open"]
FIRST = 64


@dataclass(slots=True)
class ImageLook:
    """The extent of image checks, and the number of records checked so far.

    Attributes:
        mode: `none`, `exists` or `open`.
        first: number of records to check; 0 or less means all.
    """

    mode: ImageMode = "open"
    first: int = FIRST
    _taken: int = field(default=0, init=False)

    @property
    def wanted(self) -> bool:
        """Whether the next valid record's image is to be checked."""
        return self.mode != "none" and (self.first <= 0 or self._taken < self.first)

    def take(self) -> bool:
        """Count one valid record; return whether its image is to be checked."""
        is_due = self.wanted
        self._taken += is_due
        return is_due

    def look_at_preset(
        self, folder: Path, base: Path | None, record: dict[str, Any], line: dict[str, Any]
    ) -> Iterator[Finding]:
        """Check the image of a valid preset record, relative to the folder of its file.

        Args:
            folder: the folder of the file of records.
            base: the folder of the preset that this one is derived from.
            record: the record.
            line: file and line of the record, for findings.
        """
        name = record["images"][0]
        at = {**line, "item": name, "field": "images"}
        found = _stat(folder / name)
        if isinstance(found, str):
            yield finding(found, _MESSAGES[found], **at)
            return
        shared = found if base is None else _stat(base / name)
        if base is not None and (isinstance(shared, str) or not os.path.samestat(shared, found)):
            yield finding("not_shared", f"not a link to the file of {base.name}", **at)
        if self.mode == "open":
            yield from _opened(folder / name, (record["width"], record["height"]), upright=False, at=at)

    def look_at_source(self, root: DataRoot, record: dict[str, Any], line: dict[str, Any]) -> Iterator[Finding]:
        """Check the image of a valid Stage 2 record: at its recorded path, or in the folder of images."""
        if not isinstance(root.approved, Path):
            return  # a run lists the objects
        at = {**line, "field": "image_path"}
        name = PurePosixPath(record["image_path"]).name
        places = (
            root.path.parent / record["image_path"],
            root.approved / (record["image_path"].partition("/approved/")[2] or name),
            root.approved / name,
        )
        found = [(path, _stat(path)) for path in places]
        path, result = next((pair for pair in found if pair[1] != "image_missing"), found[0])
        if isinstance(result, str):
            yield finding("source_missing" if result == "image_missing" else result, _MESSAGES[result], **at)
        elif self.mode == "open":
            yield from _opened(path, (record["width"], record["height"]), upright=True, at=at)


_MESSAGES = {"image_missing": "no such file", "not_a_file": "a folder, or nothing that holds bytes"}


def is_real_directory(path: Path) -> bool:
    """Return whether the path is a directory itself, not a link."""
    try:
        return stat.S_ISDIR(os.lstat(path).st_mode)
    except OSError:
        return False


def _stat(path: Path) -> os.stat_result | str:
    """Return the stat of a regular file, or the rule that is violated."""
    try:
        found = os.stat(path)
    except (OSError, ValueError):  # no such file, or a name that is too long or invalid
        return "image_missing"
    return found if stat.S_ISREG(found.st_mode) else "not_a_file"


def _opened(path: Path, size: tuple[int, int], *, upright: bool, at: dict[str, Any]) -> Iterator[Finding]:
    from imagemill.formats.images import (  # Pillow and numpy are imported only if images are checked
        check_decodable,
        header_size,
        stored_header,
    )

    try:
        data = path.read_bytes()
        check_decodable(data, path.name)
        header = stored_header(data, path.name)
        found = header_size(path)[::-1] if upright else (header.width, header.height)
    except OSError as error:
        yield finding("undecodable", f"cannot be read: {error}", remedy="make the file readable", **at)
        return
    except Refused as refused:
        yield finding("undecodable", refused.what, **at)
        return
    if found != size:
        yield finding("size_differs", f"the file has {found[0]}x{found[1]}, the record {size[0]}x{size[1]}", **at)
