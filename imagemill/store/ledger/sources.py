"""`sources`: each approved image as it was last read."""

from collections.abc import Iterable, Iterator, Sequence

import msgspec

from imagemill.domain.inputs import IGNORE, UNCHANGED, ColorSetting, converts
from imagemill.fs.fingerprints import FileSignature
from imagemill.store.ledger.database import in_range, json_of
from imagemill.store.ledger.inputs import Inputs
from imagemill.store.ledger.stamps import stamped
from imagemill.store.ledger.table import Table


class SourceRow(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """An approved image as last read.

    Attributes:
        image_id: of the image.
        file_name: its name in `approved/`.
        stat: signature of the file.
        fingerprint: of its bytes.
        height: in pixels, after orientation.
        width: in pixels, after orientation.
        color: state of its colours, see `formats.colour.Colour`; None if unknown.
        profile: name of its colour description, empty without one.
        first_frame: 1 if the file has more pictures than the one that is used.
    """

    image_id: str
    file_name: str
    stat: FileSignature = msgspec.field(name="signature")
    fingerprint: str
    height: int
    width: int
    color: str | None = None
    profile: str = ""
    first_frame: int = 0

    @property
    def converts(self) -> bool:
        """Whether conversion to sRGB changes the pixels; False if it is not known."""
        return self.color is not None and converts(self.color)

    def is_read(self, color: ColorSetting) -> bool:
        """Whether everything is known that the setting needs. If not, the image has to be opened."""
        return color == IGNORE or self.color is not None

    def pixel_input(self, color: ColorSetting) -> str | None:
        """Return the fingerprint of the input of an array made from the pixels; None if none can be made, or it is unknown.

        It is that of the bytes and, if conversion changes pixels, also of the setting and the colour description.

        Spec: docs/spec/conventions.md#staleness
        """
        if color == IGNORE or (self.color is not None and self.color in UNCHANGED):
            return self.fingerprint
        return f"{self.fingerprint}+{color}:{self.color}" if self.converts else None


class Arrival(msgspec.Struct, frozen=True):
    """An image that may have been renamed. `at`: when it was compared with other images, UTC, ISO 8601; empty before that."""

    image_id: str
    at: str = ""


SOURCES = Table("sources", SourceRow)
ARRIVALS = Table("arrivals", Arrival)
# The rows of each wanted size, from the index of signatures, unless there are too many. Only files of a file system have sizes.
_OF_SIZES = f"""WITH wanted AS (
    SELECT 'posix:' || value || ':' AS low, 'posix:' || value || ';' AS high FROM json_each(?))
SELECT {SOURCES.columns} FROM wanted CROSS JOIN sources ON signature >= low AND signature < high
WHERE (SELECT count(*) FROM (SELECT 1 FROM sources WHERE signature >= low AND signature < high LIMIT ?)) <= ?"""
_WITH_BYTES = f"""SELECT {SOURCES.columns} FROM inputs CROSS JOIN sources USING (fingerprint, image_id)
WHERE inputs.fingerprint IN (SELECT value FROM json_each(?))"""
_COLOURS = """SELECT color, profile, count(*) FROM sources
WHERE image_id IN (SELECT value FROM json_each(?)) GROUP BY color, profile"""
_RECORD = stamped(SOURCES, "image_id", "sources.fingerprint = excluded.fingerprint", added=True)


class Sources(Inputs):
    """Reads and writes of approved images."""

    def sources(self, ids: Sequence[str] | None = None) -> dict[str, SourceRow]:
        """Return the images by id, or only those of `ids`."""
        rows = self._select(SOURCES) if ids is None else self._of_images(SOURCES, ids)
        return {row.image_id: row for row in rows}

    def source_ids(self, between: tuple[str, str] | None = None) -> set[str]:
        """Return the ids of all images that were opened, or of those from the first of two ids to the last."""
        where, given = in_range(between)
        return {image_id for (image_id,) in self._rows(f"SELECT image_id FROM sources WHERE {where}", given)}

    def signatures_read(self, color: ColorSetting, first: str, last: str) -> dict[str, FileSignature]:
        """Return, by id, the signature of each image of which everything is known that the setting needs.

        `first`, `last`: ids between which the images are. See `SourceRow.is_read`.
        """
        where = "image_id BETWEEN ? AND ?" + ("" if color == IGNORE else " AND color IS NOT NULL")
        return dict(self._rows(f"SELECT image_id, signature FROM sources WHERE {where}", (first, last)))  # type: ignore[arg-type]

    def first_frames(self) -> set[str]:
        """Return the images of which only one of several pictures is used."""
        return {image_id for (image_id,) in self._rows("SELECT image_id FROM sources WHERE first_frame")}

    def sources_with(self, fingerprints: Iterable[str]) -> dict[str, SourceRow]:
        """Return the images whose bytes have any of these fingerprints, by id."""
        rows = SOURCES.rows(self._rows(_WITH_BYTES, (json_of(list(fingerprints)),)))
        return {row.image_id: row for row in rows}

    def sources_at(self, signatures: Iterable[FileSignature]) -> dict[FileSignature, SourceRow]:
        """Return an image for each of these signatures of files, as last read: of several, the first by id."""
        found = sorted(self._select(SOURCES, list(signatures), key="signature"), key=lambda row: row.image_id)
        return {row.stat: row for row in reversed(found)}

    def sources_of_sizes(self, sizes: Iterable[int], most: int) -> list[SourceRow]:
        """Return the images whose files have one of these sizes in bytes, except of a size that more than `most` files have."""
        rows = self._rows(_OF_SIZES, (json_of(sorted(set(sizes))), most + 1, most))
        return list(SOURCES.rows(rows))

    def colour_counts(self, ids: Iterable[str]) -> list[tuple[str | None, str, int]]:
        """Return the number of these images for each state of the colours and name of the description."""
        return list(self._rows(_COLOURS, (json_of(list(ids)),)))  # type: ignore[arg-type]

    def source_files(self) -> Iterator[tuple[str, str]]:
        """Yield id and file name of each image."""
        return self._rows("SELECT image_id, file_name FROM sources")  # type: ignore[return-value]

    def as_read(self) -> Iterator[tuple[str, FileSignature, str, str | None, int, int]]:
        """Yield id, signature, fingerprint, state of the colours, height and width of each image, in order of their ids."""
        columns = "image_id, signature, fingerprint, color, height, width"
        return self._rows(f"SELECT {columns} FROM sources ORDER BY image_id")  # type: ignore[return-value]

    def forget_sources(self, ids: Iterable[str]) -> None:
        """Delete the rows of these images, which are then opened again."""
        self._delete("sources", ids)

    def record_sources(self, rows: Iterable[SourceRow], *, seen: bool = True) -> None:
        """Insert or replace rows of images. Those that had none are also recorded as arrivals.

        `seen`: whether they have just been read; if not, their time is unknown.
        """
        given = list(rows)
        with self.transaction():
            self._change(
                "INSERT OR REPLACE INTO arrivals (image_id, at) SELECT value, '' FROM json_each(?)"
                " WHERE NOT EXISTS (SELECT 1 FROM sources WHERE image_id = value)",
                (json_of([row.image_id for row in given]),),
            )
            self._record_stamped(_RECORD, SOURCES.values(given), known=seen)
            self._add_inputs((row.fingerprint, row.image_id) for row in given)
