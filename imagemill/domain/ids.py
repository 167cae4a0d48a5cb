"""Image ids: derivation from file names, and conversion to tar member names and back.

Spec: docs/spec/stage2.md#image-id, docs/spec/shards.md#members
"""

import hashlib
import re
from typing import NewType

from imagemill.errors import ImagemillError

ImageId = NewType("ImageId", str)
"""An id that may name a file and a tar member; made by `image_id` only."""

# A file name may have 255 bytes on every common file system; the longest suffix added to an id is `.npy`.
_LONGEST = 255 - len(".npy")

# A nested id of more bytes is cut after this many, and ends in a digest of the path.
_LONGEST_NESTED, _KEPT = 240, 200
_SHORTENED = re.compile(r".*~[0-9a-f]{16}", re.DOTALL).fullmatch


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


def image_id_of(path: str) -> str:
    """Return the id of a file from its path below the folder of images, whose parts are separated by `/`.

    At the top level, the id is the file's stem. In a sub-folder, the parts of the path are joined by `%2F`, with `%25` for `%`.

    >>> image_id_of("abc123xyz.jpg"), image_id_of("a.b.png"), image_id_of("10_dog/50%/a.jpg")
    ('abc123xyz', 'a.b', '10_dog%2F50%25%2Fa')
    """
    stem = stem_of(path)
    if "/" not in stem:
        return stem
    encoded = stem.replace("%", "%25").replace("/", "%2F")
    if len(encoded) <= _LONGEST_NESTED // 4 or len(_bytes(encoded)) <= _LONGEST_NESTED:
        return encoded
    return f"{_beginning(_bytes(encoded))}~{hashlib.sha256(_bytes(stem)).hexdigest()[:16]}"


def path_of_id(image_id: str) -> str | None:
    """Return the path without its extension that a nested id was made from; None for an id that does not tell it.

    >>> path_of_id("10_dog%2F50%25%2Fa"), path_of_id("a")
    ('10_dog/50%/a', None)
    """
    if "%2F" not in image_id or _SHORTENED(image_id):
        return None
    return image_id.replace("%2F", "/").replace("%25", "%")


def path_problem(path: str) -> str | None:
    """Return the reason why a file with this path below the folder of images cannot have an id; None if it can."""
    folder, _, stem = stem_of(path).rpartition("/")
    return folder_problem(folder) or stem_problem(stem, folder)


def folder_problem(folder: str) -> str | None:
    """Return the reason why no file in a folder below that of images can have an id; None if one can."""
    if not folder:
        return None
    return next((problem for part in folder.split("/") if (problem := name_problem(part))), None)


def stem_problem(stem: str, folder: str) -> str | None:
    """Return the reason why a file with this stem cannot have an id, in a folder where others can; None if it can."""
    # The id of a file in a sub-folder may be longer than a file's name: it is shortened.
    return name_problem(stem) if folder else id_problem(stem)


def stem_of(path: str) -> str:
    """Return a path without the extension of its last part."""
    return split_suffix(path)[0]


def suffix_of(path: str) -> str:
    """Return the extension of a path's last part with its dot, as `PurePath.suffix` does, in a tenth of the time.

    >>> suffix_of("a.b.png"), suffix_of(".png"), suffix_of("a."), suffix_of("a.b/c")
    ('.png', '', '', '')
    """
    return split_suffix(path)[1]


def split_suffix(path: str) -> tuple[str, str]:
    """Return `stem_of` and `suffix_of`."""
    dot = path.rfind(".")
    return (path[:dot], path[dot:]) if path.rfind("/") + 1 < dot < len(path) - 1 else (path, "")


def _bytes(text: str) -> bytes:
    """Return a name as bytes on disk."""
    return text.encode("utf-8", "surrogateescape")


def _beginning(encoded: bytes) -> str:
    """Return the first bytes of a nested id, without cutting a character or an escape."""
    end = _KEPT
    while encoded[end] & 0xC0 == 0x80:
        end -= 1
    escape = encoded.rfind(b"%", end - 2, end)
    return encoded[: end if escape < 0 else escape].decode("utf-8", "surrogateescape")


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
    if isinstance(image_id, str) and is_plain_id(image_id):
        return None
    if problem := name_problem(image_id):
        return problem
    return f"is longer than {_LONGEST} bytes" if len(str(image_id).encode()) > _LONGEST else None


def name_problem(name: object) -> str | None:
    """Return the reason why a text is not a valid name in a folder or tar, regardless of length; None if it is valid."""
    if not isinstance(name, str) or not name:
        return "not a non-empty string"
    if is_plain_id(name):
        return None
    return next((problem for problem, pattern in _PROBLEMS if pattern.search(name)), None)


# Names that match are valid ids by all rules; this takes a third of the time of checking each rule. The characters of `\w` are
# written out, because that takes less time.
is_plain_id = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,60}").fullmatch
_PROBLEMS = [
    ("contains a path separator", re.compile(r"[/\\]")),
    ("is a relative path", re.compile(r"\A\.{1,2}\Z")),
    ("contains a control character", re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]")),
    ("is a temporary file's name", re.compile(r"\A\.tmp-")),
]
