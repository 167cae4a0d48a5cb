"""`inputs`: which images have, or have had, a fingerprint as that of their bytes or of the input of one of their files.

Rows are added with those of `sources` and `files`, and stay when these change or go: they are looked up first, and count only
where the other row still has the fingerprint.
"""

from collections.abc import Iterable

import msgspec

from imagemill.store.ledger.stamps import Stamped
from imagemill.store.ledger.table import Table


class Input(msgspec.Struct, frozen=True):
    """An image has had a fingerprint: of its bytes, or of the input of a file."""

    fingerprint: str
    image_id: str


INPUTS = Table("inputs", Input)
# Fingerprints are random, so each row changes another page: one that is known must change none.
_ADD = f"INSERT OR IGNORE INTO inputs ({INPUTS.columns}) VALUES (?, ?)"


class Inputs(Stamped):
    """Writes of inputs."""

    def _add_inputs(self, inputs: Iterable[tuple[str, str]]) -> None:
        """Add the rows of these fingerprints and images that are not known yet."""
        self._insert_each(_ADD, sorted(set(inputs)))
