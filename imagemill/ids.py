"""Image ids: from file names, into tar member names and back.

Source: seed 000 "File naming convention"; CONTRACTS sections 1 (image_id) and 2 (member names, refused ids).
"""

import difflib
import itertools
import unicodedata
from collections.abc import Callable, Iterable, Mapping
from pathlib import PurePath
from typing import NewType

from imagemill.errors import ImagemillError

ImageId = NewType("ImageId", str)
"""An id that may name a file and a tar member; made by `image_id` only."""

# A file name takes 255 bytes on every common file system; the longest suffix that we add to an id is `.npy`.
_LONGEST = 255 - len(".npy")


class InvalidImageId(ImagemillError, ValueError):
    """A text that may not name a file or a tar member: a path, a control character, a hidden or overlong name."""


def image_id(value: object) -> ImageId:
    """Return the value as an image id.

    Raises:
        InvalidImageId: if it could name something outside a folder, or no file at all.
    """
    if problem := id_problem(value):
        raise InvalidImageId(
            f"bad image id {str(value)[:80]!r}: {problem}",
            why="ids become file names and tar member names",
            do="use the image's file name without its extension as id",
        )
    return ImageId(str(value))


def image_id_of(file_name: str) -> str:
    """The file's stem: `abc123xyz.jpg` → `abc123xyz`, `a.b.png` → `a.b`."""
    return PurePath(file_name).stem


def similar_ids(wanted: str, ids: Iterable[str]) -> list[str]:
    """Return up to three ids that a mistyped one may mean: the stem of a file name first, then ids with similar letters.

    Of very many ids, only the first 100,000 are compared.
    """
    compared = list(itertools.islice(ids, 100_000))
    stem = image_id_of(wanted)
    exact = [stem] if stem != wanted and stem in compared else []
    close = difflib.get_close_matches(wanted, compared, n=3)
    return list(dict.fromkeys([*exact, *close]))[:3]


def member_key(image_id: str) -> str:
    """The id as a tar member's key. WebDataset ends a key at the first dot, so dots (and `%`) are percent-encoded.

    >>> member_key("a.b%")
    'a%2Eb%25'
    """
    return image_id.replace("%", "%25").replace(".", "%2E")


def id_of_member_key(key: str) -> str:
    """Undo `member_key`."""
    return key.replace("%2E", ".").replace("%25", "%")


def id_problem(image_id: object) -> str | None:
    """Return why this id may not name a file or a tar member, None if it may."""
    if problem := name_problem(image_id):
        return problem
    too_long = len(str(image_id).encode()) > _LONGEST
    return f"is longer than {_LONGEST} bytes" if too_long else None


def name_problem(name: object) -> str | None:
    """Return why a text may not be a name in a folder or a tar of any length, None if it may."""
    if not isinstance(name, str) or not name:
        return "not a non-empty string"
    return next((problem for problem, holds in _PROBLEMS.items() if holds(name)), None)


_PROBLEMS: Mapping[str, Callable[[str], bool]] = {
    "holds a path separator": lambda text: "/" in text or "\\" in text,
    "is a relative path": lambda text: text in {".", ".."},
    "holds a control character": lambda text: any(unicodedata.category(c) in {"Cc", "Cs"} for c in text),
    "is a temporary file's name": lambda text: text.startswith(".tmp-"),
}
