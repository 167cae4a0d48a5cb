"""Image ids: derivation from file names, and conversion to tar member names and back.

Spec: docs/spec/stage2.md#image-id, docs/spec/shards.md#members
"""

import re
from typing import NewType

from imagemill.errors import ImagemillError

ImageId = NewType("ImageId", str)
"""An id that may name a file and a tar member; made by `image_id` only."""

# A file name may have 255 bytes on every common file system; the longest suffix added to an id is `.npy`.
_LONGEST = 255 - len(".npy")


class InvalidImageId(ImagemillError, ValueError):
    """A text that is not a valid file or tar member name: a path, a control character, a temporary or overlong name."""


def image_id(value: object) -> ImageId:
    """Return the value as an image id.

    Raises:
        InvalidImageId: if it could refer to something outside a folder, or is not a valid file name.
    """
    if problem := id_problem(value):
        raise InvalidImageId(
            f"bad image id {str(value)[:80]!r}: {problem}",
            why="ids become file names and tar member names",
            do="use the image's file name without its extension as id",
        )
    return ImageId(str(value))


def image_id_of(file_name: str) -> str:
    """Return the file's stem: `abc123xyz.jpg` → `abc123xyz`, `a.b.png` → `a.b`."""
    return file_name.removesuffix(suffix_of(file_name))


def suffix_of(file_name: str) -> str:
    """Return the extension of a file's name with its dot, as `PurePath.suffix` does, in a tenth of the time.

    >>> suffix_of("a.b.png"), suffix_of(".png"), suffix_of("a.")
    ('.png', '', '')
    """
    dot = file_name.rfind(".")
    return file_name[dot:] if 0 < dot < len(file_name) - 1 else ""


def member_key(image_id: str) -> str:
    """Return the id as a tar member's key. WebDataset ends a key at the first dot, so dots (and `%`) are percent-encoded.

    >>> member_key("a.b%")
    'a%2Eb%25'
    """
    return image_id.replace("%", "%25").replace(".", "%2E")


def id_of_member_key(key: str) -> str:
    """Undo `member_key`."""
    return key.replace("%2E", ".").replace("%25", "%")


def id_problem(image_id: object) -> str | None:
    """Return the reason why this id is not a valid file or tar member name; None if it is valid."""
    if isinstance(image_id, str) and _PLAIN_ID(image_id):
        return None
    if problem := name_problem(image_id):
        return problem
    return f"is longer than {_LONGEST} bytes" if len(str(image_id).encode()) > _LONGEST else None


def name_problem(name: object) -> str | None:
    """Return the reason why a text is not a valid name in a folder or tar, regardless of length; None if it is valid."""
    if not isinstance(name, str) or not name:
        return "not a non-empty string"
    return next((problem for problem, pattern in _PROBLEMS if pattern.search(name)), None)


# Ids that match are valid by all rules; this takes a third of the time of checking each rule.
_PLAIN_ID = re.compile(r"\w[\w.-]{0,60}", re.ASCII).fullmatch
_PROBLEMS = [
    ("contains a path separator", re.compile(r"[/\\]")),
    ("is a relative path", re.compile(r"\A\.{1,2}\Z")),
    ("contains a control character", re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]")),
    ("is a temporary file's name", re.compile(r"\A\.tmp-")),
]
