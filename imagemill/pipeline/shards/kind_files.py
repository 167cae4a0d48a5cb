"""The npy files of one kind as packing needs them: the ledger row of each record's file, or the reason why it is not packed.

Which records are packed is decided in readiness.py, whether a file is valid in formats/npy.py.
Spec: docs/spec/conventions.md#completion, docs/spec/shards.md#readiness
"""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import msgspec

from imagemill.errors import InvalidNpy
from imagemill.formats.npy import NpyStore, check_npy_header
from imagemill.fs.fingerprints import FileSignature
from imagemill.pipeline.stage2.plan import adopted_row
from imagemill.store.ledger import FileRow, Ledger, SourceRow

# Reason code of a file that could not be read: an error of the disk, not of the record.
READ_ERROR = "read_error"


class PackingRecord(msgspec.Struct, frozen=True, gc=False):
    """A valid record. `member`: the sample's JSON in the tar; `caption`: fingerprint of its text; sizes in pixels."""

    image_id: str
    bucket: str
    mask: tuple[int, ...]
    height: int
    width: int
    caption: str
    member: bytes


class Refusal(NamedTuple):
    reason: str
    detail: str


class KindFiles:
    """The files of one kind, as listed. `adopted`: rows of files that the ledger did not know.

    Args:
        rows: of the ledger, read before `listing` was complete or after it.
    """

    def __init__(
        self, store: NpyStore, listing: Mapping[str, FileSignature], rows: Iterable[FileRow], ledger: Ledger
    ) -> None:
        self.spec, self.store, self.ledger = store.spec, store, ledger
        self.adopted: list[FileRow] = []
        self._of_caption = store.spec.source == "caption"
        self._listing = listing
        self._unchanged = {row.image_id: row for row in rows if listing.get(row.image_id) == row.stat}

    def find(self, record: PackingRecord, source: SourceRow | None) -> FileRow | Refusal:
        """Return the row of this record's file, or the reason why it is not packed. `source`: its image, if known."""
        image_id = record.image_id
        wanted = record.caption if self._of_caption else source.fingerprint if source else None
        try:
            row = self._unchanged.get(image_id)
            if row is None:
                present = self._listing.get(image_id)
                if present is None:
                    return Refusal("missing_file", f"no {self.spec.folder}/{image_id}.npy")
                row = self._adopt(record, present, wanted)
                self.adopted.append(row)
            elif source is None or source.height != record.height or source.width != record.width:
                # The ledger knows the file to be valid, but not for this record's size.
                shape = self.spec.shape(record.height, record.width)
                if source is None or self.spec.shape(source.height, source.width) != shape:
                    check_npy_header(self.store.path(image_id), shape, self.spec.dtype)
        except InvalidNpy as invalid:
            return Refusal(invalid.reason, invalid.what)
        except OSError as error:
            return Refusal(READ_ERROR, str(error))
        if row.source is not None and row.source != wanted:
            earlier = "caption" if self._of_caption else "image"
            return Refusal("stale", f"{self.spec.folder}/{image_id}.npy was made from an earlier {earlier}")
        return row

    def _adopt(self, record: PackingRecord, present: FileSignature, wanted: str | None) -> FileRow:
        """Read a file that the ledger did not know when the folder was listed, unless a run has replaced it since."""
        image_id = record.image_id
        content = self.store.check(image_id, record.height, record.width)
        now, known = self.store.stat(image_id), self.ledger.files(self.spec.kind, [image_id])
        if now != present:
            return known.get((image_id, now)) or self._adopt(record, now, wanted)
        return adopted_row(self.store, image_id, known.values(), content, present, wanted)
