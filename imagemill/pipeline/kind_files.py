"""The npy files of one kind as packing needs them: a ledger row for each record's file, or why there is none.

Nearly always every record has its image and its files, all in order of id: then whole columns are compared at once. What is
left gets a closer look, one by one.

Belongs here: which row vouches for a record's file; files that no row vouches for.
Belongs elsewhere: which records are packed (readiness.py), whether a file is valid (formats/npy.py).
Source: CONTRACTS section 0, "Completion is validity", section 2, "Readiness".
"""

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple, TypeVar

from imagemill.embedding_specs import EmbeddingSpec
from imagemill.errors import InvalidNpy
from imagemill.files import StatTriple
from imagemill.formats.npy import NpyStore, check_npy_header
from imagemill.ledger import FileRow, Ledger, SourceFacts
from imagemill.listing import Listing
from imagemill.pipeline.plan import row_of_bytes
from imagemill.pipeline.slim import SlimRecord
from imagemill.provenance import UNKNOWN
from imagemill.stat_folder import Triple

# Reason code of a file that the disk did not give: ours to answer for, not the record's.
READ_ERROR = "read_error"

Row = TypeVar("Row", FileRow, SourceFacts)


class Refusal(NamedTuple):
    reason: str
    detail: str


def aligned(rows: Sequence[Row], ids: Sequence[str]) -> Sequence[Row | None]:
    """The row of each id, None where there is none."""
    if [row.image_id for row in rows] == ids:
        return rows
    by_id = {row.image_id: row for row in rows}
    return [by_id.get(image_id) for image_id in ids]


def images_of_size(sources: Sequence[SourceFacts | None], records: Sequence[SlimRecord]) -> list[str | None]:
    """Fingerprint of each record's image, None where the image is not known or not of the record's size."""
    return [
        source.fingerprint
        if source is not None and source.height == record.height and source.width == record.width
        else None
        for source, record in zip(sources, records, strict=True)
    ]


class KindFiles:
    """The files of one kind. `known`: every row of the ledger, in order of id."""

    def __init__(self, spec: EmbeddingSpec, store: NpyStore, listing: Listing, known: list[FileRow], ledger: Ledger):
        self.spec, self.store, self.listing, self.ledger = spec, store, listing, ledger
        self.of_caption = spec.source == "caption"
        self.rows = _present(known, listing)

    def vouched(
        self, records: Sequence[SlimRecord], ids: Sequence[str], images: Sequence[str | None]
    ) -> Sequence[FileRow | None]:
        """The row of each record's file; None where it needs a closer look.

        Args:
            images: of each record, as `images_of_size` has it.
        """
        rows, wanted = aligned(self.rows, ids), images
        if self.of_caption:
            wanted = [image and record.caption for image, record in zip(images, records, strict=True)]
        if rows is self.rows and None not in wanted and [row.source for row in self.rows] == wanted:
            return rows
        return [
            row if row is not None and want is not None and row.source in {None, want} else None
            for row, want in zip(rows, wanted, strict=True)
        ]

    def look(self, record: SlimRecord, source: SourceFacts | None, adopted: list[FileRow]) -> FileRow | Refusal:
        """The row of this record's file, or why there is none to pack."""
        row = self._by_id.get(record.image_id)
        try:
            if row is None:
                present = self._listed.get(record.image_id)
                if present is None:
                    return Refusal("missing_file", f"no {self.spec.folder}/{record.image_id}.npy")
                row = self._unlisted(record, StatTriple._make(present), source)
                adopted.append(row)
            else:
                self._check_shape(record, source)
        except InvalidNpy as invalid:
            return Refusal(invalid.reason, invalid.what)
        except OSError as error:
            return Refusal(READ_ERROR, str(error))
        if row.source is not None and row.source != self._wanted(record, source):
            earlier = "caption" if self.of_caption else "image"
            return Refusal("stale", f"{self.spec.folder}/{record.image_id}.npy was made from an earlier {earlier}")
        return row

    @cached_property
    def _by_id(self) -> dict[str, FileRow]:
        return {row.image_id: row for row in self.rows}

    @cached_property
    def _listed(self) -> dict[str, Triple]:
        return dict(zip(self.listing.names, self.listing.triples, strict=True))

    def _wanted(self, record: SlimRecord, source: SourceFacts | None) -> str | None:
        """Fingerprint of what a current file is made from."""
        return record.caption if self.of_caption else (source.fingerprint if source else None)

    def _check_shape(self, record: SlimRecord, source: SourceFacts | None) -> None:
        """A file the ledger vouches for is whole; whether it is of this record's size is for the record to show.

        Raises:
            InvalidNpy: it is not.
        """
        shape = self.spec.shape(record.height, record.width)
        if source is None or self.spec.shape(source.height, source.width) != shape:
            check_npy_header(self.store.path(record.image_id), shape, self.spec.dtype)

    def _unlisted(self, record: SlimRecord, present: StatTriple, source: SourceFacts | None) -> FileRow:
        """A file the ledger did not vouch for when the folder was listed: read it, or find that a run has replaced it since."""
        image_id = record.image_id
        content = self.store.check(image_id, record.height, record.width)
        now, known = self.store.stat(image_id), self.ledger.files(self.spec.kind, [image_id])
        if now != present:
            return known.get((image_id, now)) or self._unlisted(record, now, source)
        same = row_of_bytes(known.values(), content, present, self._wanted(record, source))
        return same or FileRow(self.spec.kind, image_id, present, None, content, UNKNOWN)


def _present(known: list[FileRow], listing: Listing) -> list[FileRow]:
    """The rows of files that are as they were, in order of id."""
    if listing.names == [row.image_id for row in known] and listing.triples == [row.stat for row in known]:
        return known
    listed = dict(zip(listing.names, listing.triples, strict=True))
    return [row for row in known if listed.get(row.image_id) == row.stat]
