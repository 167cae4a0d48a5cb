"""`captions` and `captioned`: each image's caption, where it came from, and what a model has captioned."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec

from imagemill.fs.fingerprints import FileSignature
from imagemill.store.ledger.database import Database
from imagemill.store.ledger.sources import SOURCES, SourceRow
from imagemill.store.ledger.table import Codec, Table, qualified, split_columns

# Origins of a caption. One that begins with `preview` keeps the sample out of shards.
FROM_SIDECAR, FROM_RECORD, FROM_CAPTIONER = "sidecar", "record", "captioner"
FROM_PREVIEW, FROM_PREVIEW_RECORD = "preview captioner", "preview record"

# A caption that a model made of an earlier picture of this image.
_OUTDATED = f"""origin IN ('{FROM_CAPTIONER}', '{FROM_PREVIEW}') AND EXISTS (
    SELECT 1 FROM captioned m JOIN sources s ON s.image_id = m.image_id
    WHERE m.image_id = captions.image_id AND s.fingerprint != m.image)"""


class CaptionRow(msgspec.Struct, frozen=True):
    """A caption as it goes into the record.

    Attributes:
        stat: the sidecar's signature, None for other origins. mask: one int per token. truncated: whether the text encoder
            sees only the first tokens.
    """

    image_id: str
    stat: FileSignature | None = msgspec.field(name="signature")
    text: str
    origin: str
    fingerprint: str
    mask: list[int] | None = None
    truncated: bool = False


class Captioned(msgspec.Struct, frozen=True):
    """A caption that a model made: fingerprint of the image's bytes, key of the captioner's identity."""

    image_id: str
    image: str
    maker: str


def mask_text(mask: Sequence[int] | None) -> str | None:
    """Return a mask as it is stored: "1110…", one character per token instead of a JSON array."""
    return None if mask is None else "".join("1" if bit else "0" for bit in mask)


def _mask(text: str | None) -> list[int] | None:
    return None if text is None else [int(c) for c in text]


CAPTIONS = Table("captions", CaptionRow, mask=Codec(mask_text, _mask), truncated=Codec(int, bool))
CAPTIONED = Table("captioned", Captioned)


class RecordedCaption(msgspec.Struct, frozen=True):
    """Fingerprint of the caption that a record had after the last merge: another one there is an edit of the file."""

    image_id: str
    fingerprint: str


class CaptionKey(msgspec.Struct, frozen=True):
    """The identifying fields of a caption, without its text and mask."""

    image_id: str
    stat: FileSignature | None = msgspec.field(name="signature")
    origin: str
    fingerprint: str


RECORDED_CAPTIONS = Table("recorded_captions", RecordedCaption)
_KEYS = Table("captions", CaptionKey)


class Captions(Database):
    """Reads and writes of captions."""

    def caption_keys(self) -> dict[str, CaptionKey]:
        """Return every caption, outdated ones too, without text and mask."""
        return {row.image_id: row for row in self._select(_KEYS)}

    def recorded_captions(self) -> dict[str, str]:
        """Return the fingerprint of each record's caption, as the last merge left it."""
        return {row.image_id: row.fingerprint for row in self._select(RECORDED_CAPTIONS)}

    def record_recorded_captions(self, fingerprints: Mapping[str, str]) -> None:
        """Make these the captions that the records have after a merge."""
        known = self.recorded_captions()
        with self.transaction():
            gone = [image_id for image_id in known if image_id not in fingerprints]
            self._change_each("DELETE FROM recorded_captions WHERE image_id = ?", ((image_id,) for image_id in gone))
            changed = (item for item in fingerprints.items() if known.get(item[0]) != item[1])
            self._insert(RECORDED_CAPTIONS, (RecordedCaption(*item) for item in changed))

    def forget_sidecars(self, ids: Iterable[str]) -> None:
        """Note that these captions now come from the records alone: their sidecars are gone."""
        self._change_each(
            "UPDATE captions SET signature = NULL, origin = ? WHERE image_id = ? AND origin = ?",
            ((FROM_RECORD, image_id, FROM_SIDECAR) for image_id in ids),
        )

    def captions(self, ids: Sequence[str] | None = None, *, outdated: bool = False) -> dict[str, CaptionRow]:
        """Return the captions by image id, without those that a model made of an earlier picture unless `outdated`."""
        return {row.image_id: row for row in self._select(CAPTIONS, ids, "1" if outdated else f"NOT ({_OUTDATED})")}

    def captioned(self) -> dict[str, Captioned]:
        """Return every image that a model has captioned; its caption may come from another source by now."""
        return {row.image_id: row for row in self._select(CAPTIONED)}

    def outdated_captions(self) -> set[str]:
        """Return the images whose caption a model made of an earlier picture, as far as they have been read again."""
        return {image_id for (image_id,) in self._rows(f"SELECT image_id FROM captions WHERE {_OUTDATED}")}

    def preview_captions(self) -> set[str]:
        """Return the images whose caption a preview model made, or may have made."""
        return {image_id for (image_id,) in self._rows("SELECT image_id FROM captions WHERE origin GLOB 'preview*'")}

    def truncated(self) -> int:
        """Return how many captions are longer than the text encoder's limit."""
        row = self._one("SELECT count(*) FROM captions WHERE truncated")
        return row[0] if row else 0

    def facts(self) -> Iterator[tuple[str, SourceRow | None, CaptionRow]]:
        """Yield id, source and caption of every image with a caption (an outdated one too), in order of id.

        The source is None for an image that was never read.
        """
        columns = f"{qualified(CAPTIONS, 'c')}, {qualified(SOURCES, 's')}"
        joined = self._rows(
            f"SELECT {columns} FROM captions c LEFT JOIN sources s USING (image_id) ORDER BY c.image_id"
        )
        for row in joined:
            caption_values, source_values = split_columns(row, CAPTIONS, SOURCES)
            (caption,) = CAPTIONS.rows([caption_values])
            source = next(SOURCES.rows([source_values])) if source_values[0] is not None else None
            yield caption.image_id, source, caption

    def record_captions(self, rows: Iterable[CaptionRow]) -> None:
        self._insert(CAPTIONS, rows)

    def record_captioned(self, rows: Iterable[Captioned]) -> None:
        self._insert(CAPTIONED, rows)

    def record_masks(self, rows: Iterable[tuple[str, str, list[int], bool]]) -> None:
        """Record (image id, caption fingerprint, mask, truncated) where that is still the caption."""
        self._change_each(
            "UPDATE captions SET mask = ?, truncated = ? WHERE image_id = ? AND fingerprint = ?",
            ((mask_text(mask), int(cut), image_id, fingerprint) for image_id, fingerprint, mask, cut in rows),
        )
