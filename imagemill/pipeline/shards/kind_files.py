"""The npy files of one kind for packing: the ledger row of each record's file, or the reason why it is not packed.

Which records are packed is decided in readiness.py, whether a file is valid in formats/npy.py.

Spec: docs/spec/conventions.md#completion, docs/spec/shards.md#readiness
"""

from collections.abc import Callable, Iterable, Sequence, Set
from functools import cached_property

import msgspec

from imagemill.domain.embedding_specs import Refusal
from imagemill.errors import InvalidNpy
from imagemill.formats.npy import NpyStore, check_npy_header
from imagemill.fs.fingerprints import FileSignature, signature_bytes
from imagemill.fs.listing import FileListing
from imagemill.pipeline.stage2.plan import adopted_row
from imagemill.store.inputs import PixelRule
from imagemill.store.ledger import FileRow, Ledger, SourceRow

# Reason code of a file that could not be read: a disk error, not a fault of the record.
READ_ERROR = "read_error"


class PackingRecord(msgspec.Struct, frozen=True, gc=False):
    """A valid record.

    `member`: the sample's JSON in the tar. `caption`: fingerprint of the caption's text. Sizes are in pixels.
    """

    image_id: str
    bucket: str
    mask: tuple[int, ...]
    height: int
    width: int
    caption: str
    member: bytes


_AGAIN = "run `imagemill stage2`"


class KindFiles:
    """The files of one kind.

    Attributes:
        adopted: rows of files that had no valid ledger row and were checked.

    Args:
        store: the files on disk.
        listing: returns the signatures of the files by image id. It is called when they are first needed, which `rows` does not,
            so that rows can be read while files are listed.
        ledger: the ledger.
        compared: images whose listed files are known to be those that their rows describe.
    """

    def __init__(
        self,
        store: NpyStore,
        listing: Callable[[], FileListing],
        ledger: Ledger,
        compared: Set[str] = frozenset(),
    ) -> None:
        self.spec, self.store, self.ledger = store.spec, store, ledger
        self.adopted: list[FileRow] = []
        self._pixels = PixelRule.read(ledger)
        self._of_caption = store.spec.source == "caption"
        self._list, self._compared = listing, compared
        self._unchanged: dict[str, FileRow] = {}

    @cached_property
    def _listing(self) -> FileListing:
        return self._list()

    def rows(self, ids: Sequence[str]) -> list[FileRow]:
        """Return the ledger's rows of these images."""
        return list(self.ledger.file_rows(self.spec.kind, ids))

    def compare(self, rows: Iterable[FileRow]) -> None:
        """Compare these rows with the listing: `unchanged` and `find` apply to their images from now on."""
        self._unchanged = self._listing.unchanged(rows)

    def unchanged(self, image_id: str) -> FileRow | None:
        """Return the row of an image's file if the file is the one that the row describes."""
        return self._unchanged.get(image_id)

    def models(self, ids: Set[str]) -> dict[str, tuple[int, str]]:
        """Return size in bytes and model key of each of these images' files that is the one that its row describes."""
        listing, between = self._listing, (min(ids), max(ids))
        if ids <= self._compared and len(keys := self.ledger.model_keys(self.spec.kind, between)) == 1:
            (key,) = keys
            return {image_id: (listing.size(image_id), key) for image_id in ids}
        return {
            image_id: (signature_bytes(signature), key)
            for image_id, signature, key in self.ledger.file_models(self.spec.kind, *between)
            if listing.get(image_id) == signature
        }

    def find(self, record: PackingRecord, source: SourceRow | None) -> FileRow | Refusal:
        """Return the row of this record's file, or the reason why it is not packed.

        Args:
            record: the record.
            source: the ledger row of its image, if known.
        """
        image_id = record.image_id
        if refused := self.spec.refuses(record.height, record.width):
            return refused
        expected_source = record.caption if self._of_caption else source and source.pixel_input(self._pixels.color)
        try:
            row = self._unchanged.get(image_id)
            if row is None:
                listed_as = self._listing.get(image_id)
                if listed_as is None:
                    return Refusal("missing_file", f"no {self.spec.folder}/{image_id}.npy", _AGAIN)
                row = self._adopt(record, listed_as, expected_source)
                self.adopted.append(row)
            elif source is None or source.height != record.height or source.width != record.width:
                # The ledger row proves the file valid, but not for this record's size.
                layout = self.spec.layout(record.height, record.width)
                if source is None or self.spec.layout(source.height, source.width) != layout:
                    check_npy_header(self.store.path(image_id), *layout)
        except InvalidNpy as invalid:
            return Refusal(invalid.reason, invalid.what, _AGAIN)
        except OSError as error:
            return Refusal(READ_ERROR, str(error), _AGAIN)
        if not self._is_current(row, source, expected_source):
            earlier = "an earlier caption" if self._of_caption else "an earlier image, or its pixels with other colours"
            return Refusal("stale", f"{self.spec.folder}/{image_id}.npy was made from {earlier}", _AGAIN)
        return row

    def _is_current(self, row: FileRow, source: SourceRow | None, expected_source: str | None) -> bool:
        if row.source is not None:
            return row.source == expected_source
        return self._of_caption or source is None or self._pixels.is_current(None, source)

    def _adopt(self, record: PackingRecord, listed_as: FileSignature, expected_source: str | None) -> FileRow:
        """Check a file without a current ledger row.

        If a run has replaced the file since the listing, use the run's row, or check the new file.
        """
        image_id = record.image_id
        content = self.store.check(image_id, record.height, record.width)
        now, known = self.store.stat(image_id), self.ledger.files(self.spec.kind, [image_id])
        if now != listed_as:
            return known.get((image_id, now)) or self._adopt(record, now, expected_source)
        return adopted_row(self.store, image_id, known.values(), content, listed_as, expected_source)
