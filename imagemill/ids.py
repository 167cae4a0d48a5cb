"""Image ids: from file names, into tar member names and back.

Source: seed 000 "File naming convention"; CONTRACTS sections 1 (image_id) and 2 (member names, refused ids).
"""

import unicodedata
from pathlib import PurePath


def image_id_of(file_name: str) -> str:
    """The file's stem: `abc123xyz.jpg` → `abc123xyz`, `a.b.png` → `a.b`."""
    return PurePath(file_name).stem


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
    """Why this id may not name a file or a tar member; None where it may."""
    if not isinstance(image_id, str) or not image_id:
        return "not a non-empty string"
    if "/" in image_id or "\\" in image_id:
        return "holds a path separator"
    if image_id in {".", ".."}:
        return "is a relative path"
    if any(unicodedata.category(c) in {"Cc", "Cs"} for c in image_id):
        return "holds a control character"
    return None
