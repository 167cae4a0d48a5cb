"""Shares of the images: one of N data roots takes the images whose ids have its number.

Spec: docs/spec/stage2.md#shares
"""

import hashlib
import re
from typing import Final, NamedTuple

_FORM: Final = re.compile(r"(\d{1,9})/(\d{1,9})").fullmatch


class ImageShare(NamedTuple):
    """Share `number` of `total`; numbers begin at 0."""

    number: int
    total: int

    def of(self, image_id: str) -> "ImageShare":
        """Return the share, of as many, to which an image belongs: SHA-256 of its id as a big-endian integer, modulo `total`.

        >>> ImageShare(0, 3).of("photo0001")
        ImageShare(number=1, total=3)
        """
        # Names that are not UTF-8 arrive as lone surrogates.
        digest = hashlib.sha256(image_id.encode("utf-8", "surrogateescape")).digest()
        return ImageShare(int.from_bytes(digest, "big") % self.total, self.total)

    def has(self, image_id: str) -> bool:
        """Return whether an image belongs to the share."""
        return self.of(image_id) == self

    def __str__(self) -> str:
        """`2/16`, as it is written."""
        return f"{self.number}/{self.total}"


def parse_share(text: str) -> ImageShare:
    """Return the share of `I/N`. Raises ValueError, with the reason, if the text has another form."""
    found = _FORM(text)
    if not found:
        raise ValueError("write I/N, such as 0/16 for the first of 16 shares")
    share = ImageShare(int(found[1]), int(found[2]))
    if not share.total:
        raise ValueError("the number of shares is at least 1")
    if share.number >= share.total:
        raise ValueError(f"the shares of {share.total} are 0/{share.total} to {share.total - 1}/{share.total}")
    return share
