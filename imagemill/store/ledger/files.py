"""`files`: npy files that are known to be valid, identified by their signature on disk.

A file's row is committed before the file gets its final name, and is found by signature. A kill between the two leaves
either the old file with its old row or the new file with its new one, never a file with the wrong history.
"""

from collections.abc import Iterable, Iterator, Sequence

import msgspec

from imagemill.fs.fingerprints import FileSignature
from imagemill.store.ledger.database import in_range, json_of
from imagemill.store.ledger.inputs import Inputs
from imagemill.store.ledger.stamps import stamped
from imagemill.store.ledger.table import Table

# ModelEntry of an existing file whose kind is being regenerated.
SUPERSEDED = "superseded"


class FileRow(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """One valid npy file.

    Attributes:
        kind: embedding kind.
        image_id: the image.
        stat: the file's signature.
        source: fingerprint of its input, None if unknown.
        content: fingerprint of the file's bytes.
        model_key: key of the model's identity, or `unknown` for adopted files.
    """

    kind: str
    image_id: str
    stat: FileSignature = msgspec.field(name="signature")
    source: str | None
    content: str
    model_key: str = msgspec.field(name="maker")


FILES = Table("files", FileRow)
_OF_INPUTS = f"""SELECT {FILES.columns} FROM inputs CROSS JOIN files USING (image_id)
WHERE inputs.fingerprint IN (SELECT value FROM json_each(?)) AND kind = ? AND source = inputs.fingerprint"""
_RECORD = stamped(FILES, "kind, image_id, signature", "files.content = excluded.content")


class Files(Inputs):
    """Reads and writes of npy files."""

    def files(self, kind: str, ids: Sequence[str] | None = None) -> dict[tuple[str, FileSignature], FileRow]:
        """Return the valid files of a kind by (image id, signature)."""
        return {(row.image_id, row.stat): row for row in self.file_rows(kind, ids)}

    def file_rows(self, kind: str, ids: Sequence[str] | None = None) -> Iterator[FileRow]:
        """Yield the rows of a kind.

        An image has two rows while its file is being replaced, or after a process was killed doing so.
        """
        if ids is None:
            return self._select(FILES, where="kind = ?", given=(kind,))
        return self._of_images(FILES, ids, "kind = ?", (kind,))

    def ids_with_file(self, kind: str) -> set[str]:
        """Return the images with a valid file of a kind."""
        return {image_id for (image_id,) in self._rows("SELECT image_id FROM files WHERE kind = ?", (kind,))}

    def ids_by_model(self, kind: str, model_keys: Sequence[str]) -> list[str]:
        """Return the images with a file of a kind by one of these models, sorted."""
        places = ", ".join("?" * len(model_keys))
        statement = f"SELECT DISTINCT image_id FROM files WHERE kind = ? AND maker IN ({places}) ORDER BY image_id"
        return [image_id for (image_id,) in self._rows(statement, (kind, *model_keys))]

    def file_states(self, kind: str, first: str, last: str) -> set[tuple[str, FileSignature]]:
        """Return image id and signature of each valid file of a kind, of the images from the first id to the last."""
        where = "kind = ? AND image_id BETWEEN ? AND ?"
        return set(self._rows(f"SELECT image_id, signature FROM files WHERE {where}", (kind, first, last)))  # type: ignore[arg-type]

    def file_models(self, kind: str, first: str, last: str) -> Iterator[tuple[str, FileSignature, str]]:
        """Yield image id, signature and model key of each valid file of a kind. `first`, `last`: as for `file_states`."""
        where = "kind = ? AND image_id BETWEEN ? AND ?"
        return self._rows(f"SELECT image_id, signature, maker FROM files WHERE {where}", (kind, first, last))  # type: ignore[return-value]

    def file_inputs(self, kind: str, first: str, last: str) -> Iterator[tuple[str, FileSignature, str]]:
        """Yield image id, signature and source of each file of a kind that has a known source and is not superseded.

        `first`, `last`: ids of the images, as for `file_states`.
        """
        where = "kind = ? AND image_id BETWEEN ? AND ? AND maker != ? AND source IS NOT NULL"
        given = kind, first, last, SUPERSEDED
        return self._rows(f"SELECT image_id, signature, source FROM files WHERE {where}", given)  # type: ignore[return-value]

    def files_of_inputs(self, kind: str, inputs: Iterable[str]) -> Iterator[FileRow]:
        """Yield the rows of a kind whose files were made from one of these inputs, given by their fingerprints."""
        return FILES.rows(self._rows(_OF_INPUTS, (json_of(list(inputs)), kind)))

    def model_keys(self, kind: str, between: tuple[str, str] | None = None) -> set[str]:
        """Return the model keys of a kind's files: keys of identities, `unknown`, `superseded`.

        `between`: first and last id of the images; None for all.
        """
        where, given = in_range(between)
        rows = self._rows(f"SELECT DISTINCT maker FROM files WHERE kind = ? AND {where}", (kind, *given))
        return {model_key for (model_key,) in rows}

    def has_files_by(self, kind: str, model_key: str) -> bool:
        """Return whether a kind has files with a model key."""
        return self._one("SELECT 1 FROM files WHERE kind = ? AND maker = ? LIMIT 1", (kind, model_key)) is not None

    def model_key_counts(self, kind: str) -> dict[str, int]:
        """Return the number of files of a kind by model key."""
        return dict(self._rows("SELECT maker, count(*) FROM files WHERE kind = ? GROUP BY maker", (kind,)))  # type: ignore[arg-type]

    def record_files(self, rows: Iterable[FileRow], *, made: bool = True) -> None:
        """Insert or replace rows of files. `made`: whether imagemill has just made them; if not, their time is unknown."""
        given = list(rows)
        with self.transaction():
            self._record_stamped(_RECORD, FILES.values(given), known=made)
            self._add_inputs((row.source, row.image_id) for row in given if row.source is not None)

    def forget_superseded(self, rows: Iterable[FileRow]) -> None:
        """Delete the rows of files that these have replaced on disk. Call it after the rename."""
        by_kind: dict[str, list[tuple[str, FileSignature]]] = {}
        for row in rows:
            by_kind.setdefault(row.kind, []).append((row.image_id, row.stat))
        for kind, current in by_kind.items():
            # Compared as pairs: two images may be links to one file, which has one signature.
            pairs = "SELECT json_extract(value, '$[0]'), json_extract(value, '$[1]') FROM json_each(?)"
            where, given = f"kind = ? AND (image_id, signature) NOT IN ({pairs})", (kind, json_of(current))
            self._delete("files", (image_id for image_id, _ in current), where, given)

    def forget_files(self, kind: str) -> None:
        """Delete every row of a kind."""
        self._change("DELETE FROM files WHERE kind = ?", (kind,))
