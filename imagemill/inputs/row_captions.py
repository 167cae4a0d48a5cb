"""Captions of the rows of metadata files: which image a row belongs to, and what the ledger records of it.

A file is read when its signature, a setting, or the set of images that lack a row has changed; otherwise not a byte of it is.
Rows are streamed. The texts of changed rows are written to the ledger in parts.

Spec: docs/spec/stage2.md#metadata-files
"""

import os
import posixpath
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from imagemill.domain.ids import stem_of
from imagemill.domain.inputs import InputSettings
from imagemill.fs.fingerprints import FileSignature, RunningFingerprint
from imagemill.inputs.matching import PathIndex
from imagemill.inputs.metadata.rows import BadRow, Columns, Row, Unreadable, format_of
from imagemill.inputs.scan import MetadataFile, Scan
from imagemill.inputs.sidecars import caption_row
from imagemill.store.ledger import FROM_METADATA, CaptionKey, CaptionRow, Ledger, Problem

# Asset of the problems of metadata files.
METADATA: Final = "metadata"

# Rows per ledger transaction.
_CHUNK: Final = 4096

# Rows that a message names.
_SHOWN: Final = 3

_ABSOLUTE: Final = re.compile(r"/|[A-Za-z]:/").match


def read_metadata(folder: Path, scan: Scan, ledger: Ledger, inputs: InputSettings) -> None:
    """Record the captions of all metadata files that have to be read, and the problems of these files.

    A caption whose row is gone stays, as one of an earlier record.
    """
    if not scan.metadata and not ledger.metadata_in_use():
        return
    keys = ledger.caption_keys()
    unusable = {problem.item for problem in ledger.problems() if problem.asset == "captions"}
    below = _images_of(scan)
    problems: list[Problem] = []
    read: set[str] = set()
    for file in scan.metadata:
        images = [i for i in below.get(file.path, ()) if file.first or not _has_text(i, scan, keys, unusable)]
        state = _state(file, inputs, (i for i in images if keys.get(i) is None or keys[i].stat != file.path))
        if ledger.verified(Path(METADATA, file.path)) == state:
            continue
        read.add(file.path)
        reading = _Reading(file, folder, scan, ledger, inputs, keys, frozenset(images))
        if problem := reading.run():
            problems.append(problem)
        keys |= ledger.caption_keys()
        lacking = (i for i in images if keys.get(i) is None or keys[i].stat != file.path)
        ledger.record_verified(Path(METADATA, file.path), _state(file, inputs, lacking))
    place = {image_id: path for path, ids in below.items() for image_id in ids}
    ledger.forget_rows(
        i for i, key in keys.items() if key.origin == FROM_METADATA and i in scan.sources and key.stat != place.get(i)
    )
    left = {file.path for file in scan.metadata} - read
    ledger.replace_problems(METADATA, problems, lambda problem: problem.item not in left)


def _images_of(scan: Scan) -> dict[str, list[str]]:
    """Return the images that each metadata file may have rows for: those for which no other is nearer."""
    by_folder = {file.folder: file.path for file in scan.metadata}
    nearest: dict[str, str | None] = {}

    def find(folder: str) -> str | None:
        if folder not in nearest:
            nearest[folder] = by_folder.get(folder) or (find(folder.rpartition("/")[0]) if folder else None)
        return nearest[folder]

    found: dict[str, list[str]] = {}
    for image_id, source in scan.sources.items():
        if path := find(source.file_name.rpartition("/")[0]):
            found.setdefault(path, []).append(image_id)
    return found


def _has_text(image_id: str, scan: Scan, keys: Mapping[str, CaptionKey], unusable: Collection[str]) -> bool:
    """Return whether a caption file precedes a row: it has text, or cannot be read."""
    source, key = scan.sources[image_id], keys.get(image_id)
    return source.caption is not None and (image_id in unusable or (key is not None and key.stat == source.caption))


def _state(file: MetadataFile, inputs: InputSettings, lacking: Iterable[str]) -> str:
    """Return a fingerprint of what the captions of a file depend on."""
    digest = RunningFingerprint()
    settings = (inputs.file_column, inputs.text_column, inputs.strip_prefix, inputs.encoding)
    for part in (file.stat, str(file.first), *settings, *sorted(lacking)):
        digest.update(f"{part}\n".encode("utf-8", "surrogateescape"))
    return str(digest)


class _Place(NamedTuple):
    """Where a row's path leads: paths below the folder of images to try, or why it leads nowhere."""

    paths: tuple[str, ...]
    bad: bool = False


@dataclass(slots=True)
class _Faults:
    """Rows of one file that are not used: their number, and the first of them."""

    count: int = 0
    first: list[str] = field(default_factory=list)

    def add(self, what: str) -> None:
        self.count += 1
        if len(self.first) < _SHOWN:
            self.first.append(what)


class _Reading:
    """One pass over a metadata file."""

    def __init__(
        self,
        file: MetadataFile,
        folder: Path,
        scan: Scan,
        ledger: Ledger,
        inputs: InputSettings,
        keys: Mapping[str, CaptionKey],
        images: Collection[str],
    ) -> None:
        self._file, self._folder, self._ledger, self._inputs, self._keys = file, folder, ledger, inputs, keys
        self._images, self._sources = images, scan.sources
        self._ids = {source.file_name: image_id for image_id, source in scan.sources.items()}
        self._refused = frozenset(stem_of(problem.item) for problem in scan.problems)
        self._index = PathIndex(self._ids)
        self._prefix = inputs.strip_prefix.replace("\\", "/")
        self._roots = tuple(dict.fromkeys((str(folder), os.path.realpath(folder))))
        self._rows: dict[str, CaptionRow] = {}
        self._seen: set[str] = set()
        self._bad, self._outside, self._without = _Faults(), _Faults(), _Faults()

    def run(self) -> Problem | None:
        """Record the captions of all rows; return the problem of the file, if it has one."""
        try:
            for row in self._read():
                if isinstance(row, BadRow):
                    self._bad.add(f"{row.number}: {row.why}")
                else:
                    self._take(row)
                if len(self._rows) >= _CHUNK:
                    self._flush()
        except Unreadable as error:
            return self._problem("bad_metadata", error.what, error.do or "repair it")
        except OSError as error:
            return self._problem("read_error", f"it cannot be read: {error.strerror}", "make it readable", failed=True)
        finally:
            self._flush()
        path = self._file.path
        self._ledger.forget_rows(i for i, k in self._keys.items() if k.stat == path and i not in self._seen)
        return self._faults()

    def _read(self) -> Iterator[Row | BadRow]:
        chosen = format_of(self._file.path)
        if chosen is None:
            raise Unreadable("its format is not known", do="name a file .jsonl, .csv, .parquet or .json")
        columns = Columns(self._inputs.file_column, self._inputs.text_column)
        return chosen.read_rows(self._folder / self._file.path, columns, self._inputs.encoding)

    def _take(self, row: Row) -> None:
        place = self._place(row.path.replace("\\", "/"))
        if place.bad:
            self._outside.add(f"{row.number}: {row.path[:80]}")
            return
        found = next((ids for path in place.paths if (ids := self._index.find(path))), [])
        if len(found) != 1:
            if found or not any(stem_of(path) in self._refused for path in place.paths):
                several = f", which may be {' or '.join(sorted(found)[:_SHOWN])}" if found else ""
                self._without.add(f"{row.number}: {row.path[:80]}{several}")
            return
        image_id = self._ids[found[0]]
        if not row.captions:
            return
        if image_id not in self._images:
            self._compare(image_id, row)
            return
        earlier = self._rows.get(image_id)
        if earlier is None and image_id in self._seen:
            self._flush()
            earlier = self._ledger.captions([image_id], outdated=True)[image_id]
        self._seen.add(image_id)
        texts = tuple(dict.fromkeys((*(earlier.all_texts if earlier else ()), *row.captions)))
        made = caption_row(image_id, texts[0], FROM_METADATA, FileSignature(self._file.path))
        made = msgspec.structs.replace(made, texts=texts if len(texts) > 1 else ())
        if earlier is None and self._is_recorded(made):
            return
        self._rows[image_id] = made

    def _is_recorded(self, row: CaptionRow) -> bool:
        key = self._keys.get(row.image_id)
        return key is not None and (key.stat, key.fingerprint, key.texts) == (row.stat, row.fingerprint, row.texts)

    def _compare(self, image_id: str, row: Row) -> None:
        """Note whether the text of a caption file differs from the row's, which it precedes."""
        key = self._keys.get(image_id)
        if key and key.origin != FROM_METADATA:
            differs = caption_row(image_id, row.captions[0], FROM_METADATA).fingerprint != key.fingerprint
            self._ledger.note_conflict(image_id, differs)

    def _flush(self) -> None:
        known = self._ledger.captions(list(self._rows), outdated=True) if self._rows else {}
        with self._ledger.transaction():
            self._ledger.record_captions(_with_mask(row, known.get(row.image_id)) for row in self._rows.values())
        self._rows.clear()

    def _place(self, path: str) -> _Place:
        """Return where a path leads: relative to the file's folder, then to the folder of images."""
        if self._prefix and path.startswith(self._prefix):
            path, folder = path[len(self._prefix) :].lstrip("/"), ""
        elif _ABSOLUTE(path):
            inside = next((root for root in self._roots if path.startswith(f"{root}/")), None)
            if inside is None:
                return _Place((), bad=True)
            path, folder = path[len(inside) + 1 :], ""
        else:
            folder = self._file.folder
        tried = [posixpath.normpath(posixpath.join(base, path)) for base in dict.fromkeys((folder, ""))]
        paths = tuple(each for each in tried if not each.startswith("../") and each != "..")
        return _Place(paths, bad=not paths)

    def _faults(self) -> Problem | None:
        """Return one problem for all rows that are not used."""
        told = {
            "bad_row": (self._bad, "rows that cannot be read", "repair them"),
            "bad_path": (
                self._outside,
                "paths outside the folder of images",
                "set captions.strip_prefix in imagemill.yaml to what they begin with",
            ),
            "row_without_image": (self._without, "rows without an image", "add the images, or remove the rows"),
        }
        found = {reason: each for reason, each in told.items() if each[0].count}
        if not found:
            return None
        parts = [f"{faults.count:,} {what} ({'; '.join(faults.first)})" for faults, what, _ in found.values()]
        return self._problem(next(iter(found)), ", ".join(parts), "; ".join(do for *_, do in found.values()))

    def _problem(self, reason: str, detail: str, remedy: str, *, failed: bool = False) -> Problem:
        outcome = "failed" if failed else "refused"
        return Problem(self._file.path, METADATA, outcome, reason, detail, remedy, self._file.stat)


def _with_mask(row: CaptionRow, known: CaptionRow | None) -> CaptionRow:
    """Return a row with the mask of an equal text."""
    if known is None or known.fingerprint != row.fingerprint:
        return row
    return msgspec.structs.replace(row, mask=known.mask, truncated=known.truncated)
