"""The npy files of one kind as packing needs them: a ledger row for each record's file, or why there is none.

Nearly always every record has its image and its files, all in order of id: then whole columns are compared at once. What is
left gets a closer look, one by one.

Belongs here: which row vouches for a record's file; files that no row vouches for.
Belongs elsewhere: which records are packed (readiness.py), whether a file is valid (formats/npy.py).
Source: CONTRACTS section 0, "Completion is validity", section 2, "Readiness".
"""

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

import msgspec

from imagemill.columns import Column
from imagemill.embedding_specs import EmbeddingSpec
from imagemill.errors import InvalidNpy
from imagemill.files import FileSignature
from imagemill.formats.npy import NpyStore, check_npy_header
from imagemill.listing import Listing
from imagemill.pipeline.shards.slim import SlimRecord
from imagemill.pipeline.stage2.plan import row_of_bytes
from imagemill.provenance import maker_of_adopted
from imagemill.store.ledger import FileColumns, FileRow, Ledger, SourceColumns

# Reason code of a file that the disk did not give: ours to answer for, not the record's.
READ_ERROR = "read_error"


class Refusal(NamedTuple):
    reason: str
    detail: str


class FilesAt(msgspec.Struct, frozen=True, gc=False):
    """A ledger row per kind, each built when it is asked for: of most samples only a verdict is wanted."""

    columns: tuple[FileColumns, ...]
    at: tuple[int, ...]

    def __iter__(self) -> Iterator[FileRow]:
        return (columns.row(at) for columns, at in zip(self.columns, self.at, strict=True))

    def __getitem__(self, kind: int) -> FileRow:
        return self.columns[kind].row(self.at[kind])


def positions(of: Column, ids: Column) -> Sequence[int | None]:
    """Where in `of` each id stands, None where it does not."""
    if of == ids:
        return range(len(ids.values))
    return list(map({image_id: n for n, image_id in enumerate(of.values)}.get, ids.values))


class Image(NamedTuple):
    """What is known of a record's image: its fingerprint, and its oriented height and width in pixels."""

    fingerprint: str | None = None
    size: tuple[int, int] | None = None


class Records:
    """The records that look for their files, in order, held against what is known of their images.

    `images`: fingerprint of each record's image, empty where the image is not known or not of the record's size.
    `all_known`: none is empty, and images and records stand in the same order.
    """

    def __init__(self, records: Sequence[SlimRecord], known: SourceColumns):
        self.records, self._known = records, known
        self.ids = Column.of(record.image_id for record in records)
        self.captions = Column.of(record.caption for record in records)
        self._at = positions(known.image_ids, self.ids)
        heights = Column.of(str(record.height) for record in records)
        widths = Column.of(str(record.width) for record in records)
        self.all_known = known.image_ids == self.ids and known.heights == heights and known.widths == widths
        self.images = known.fingerprints if self.all_known else self._of_size(heights, widths)

    def within(self, names: Column) -> Sequence[int | None]:
        """Where in `names` each record's id stands, None where it does not."""
        return self._at if names == self._known.image_ids else positions(names, self.ids)

    def image(self, record: int) -> Image:
        at = self._at[record]
        return Image() if at is None else Image(self._known.fingerprints.values[at], self._known.size(at))

    def _of_size(self, heights: Column, widths: Column) -> Column:
        fingerprints, *sides = (column.values for column in self._known[1:])
        sizes = list(zip(*sides, strict=True))
        wanted = zip(self._at, zip(heights.values, widths.values, strict=True), strict=True)
        return Column.of("" if at is None or sizes[at] != size else fingerprints[at] for at, size in wanted)


class KindFiles:
    """The files of one kind. `rows`: every row of the ledger, in order of id."""

    def __init__(self, spec: EmbeddingSpec, store: NpyStore, listing: Listing, rows: FileColumns, ledger: Ledger):
        self.spec, self.store, self.listing, self.rows, self.ledger = spec, store, listing, rows, ledger
        self.of_caption = spec.source == "caption"
        self._unchanged = listing == rows.listing

    def vouched(self, records: Records) -> Sequence[int | None]:
        """Where in `rows` each record's file stands; None where it needs a closer look."""
        wanted = records.captions if self.of_caption else records.images
        names, sources = self.rows.listing.names, self.rows.sources
        at = records.within(names) if self._unchanged else list(map(self._at.get, records.ids.values))
        if self._unchanged and names == records.ids and records.all_known and sources == wanted:
            return at
        return [
            n if n is not None and image and sources.values[n] in ("", want) else None
            for n, image, want in zip(at, records.images.values, wanted.values, strict=True)
        ]

    def look(self, record: SlimRecord, image: Image, adopted: list[FileRow]) -> FileRow | Refusal:
        """The row of this record's file, or why there is none to pack."""
        at = self._at.get(record.image_id)
        try:
            if at is None:
                listed = self._listed.get(record.image_id)
                if listed is None:
                    return Refusal("missing_file", f"no {self.spec.folder}/{record.image_id}.npy")
                row = self._unlisted(record, self.listing.stat(listed), image)
                adopted.append(row)
            else:
                row = self.rows.row(at)
                self._check_shape(record, image)
        except InvalidNpy as invalid:
            return Refusal(invalid.reason, invalid.what)
        except OSError as error:
            return Refusal(READ_ERROR, str(error))
        if row.source is not None and row.source != self._wanted(record, image):
            earlier = "caption" if self.of_caption else "image"
            return Refusal("stale", f"{self.spec.folder}/{record.image_id}.npy was made from an earlier {earlier}")
        return row

    @cached_property
    def _at(self) -> dict[str, int]:
        """Where the rows stand whose files are as they were."""
        if self._unchanged:
            return {image_id: n for n, image_id in enumerate(self.rows.listing.names.values)}
        now = set(_files(self.listing))
        return {file[0]: n for n, file in enumerate(_files(self.rows.listing)) if file in now}

    @cached_property
    def _listed(self) -> dict[str, int]:
        return {image_id: n for n, image_id in enumerate(self.listing.names.values)}

    def _wanted(self, record: SlimRecord, image: Image) -> str | None:
        """Fingerprint of what a current file is made from."""
        return record.caption if self.of_caption else image.fingerprint

    def _check_shape(self, record: SlimRecord, image: Image) -> None:
        """A file the ledger vouches for is whole; whether it is of this record's size is for the record to show.

        Raises:
            InvalidNpy: it is not.
        """
        shape = self.spec.shape(record.height, record.width)
        if image.size is None or self.spec.shape(*image.size) != shape:
            check_npy_header(self.store.path(record.image_id), shape, self.spec.dtype)

    def _unlisted(self, record: SlimRecord, present: FileSignature, image: Image) -> FileRow:
        """A file the ledger did not vouch for when the folder was listed: read it, or find that a run has replaced it since."""
        image_id = record.image_id
        content = self.store.check(image_id, record.height, record.width)
        now, known = self.store.stat(image_id), self.ledger.files(self.spec.kind, [image_id])
        if now != present:
            return known.get((image_id, now)) or self._unlisted(record, now, image)
        same = row_of_bytes(known.values(), content, present, self._wanted(record, image))
        return same or FileRow(self.spec.kind, image_id, present, None, content, maker_of_adopted(self.store, image_id))


def _files(listing: Listing) -> Iterator[tuple[str, ...]]:
    """Name, size, time and inode of each file as text: to compare them nobody needs the numbers."""
    return zip(*(column.values for column in listing), strict=True)
