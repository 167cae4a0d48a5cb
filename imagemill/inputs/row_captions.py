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

from imagemill.domain.ids import image_id_of, stem_of
from imagemill.domain.inputs import InputSettings
from imagemill.domain.shares import ImageShare
from imagemill.fs.fingerprints import FileSignature, RunningFingerprint
from imagemill.fs.folders import Folder, on_disk
from imagemill.inputs.matching import PathIndex
from imagemill.inputs.metadata.rows import BadRow, Columns, MetadataRow, Unreadable, format_of
from imagemill.inputs.scan import MetadataFile, Scan
from imagemill.inputs.sidecars import BLANK, SIDECARS, caption_row, read_source, unusable_sidecars, with_known_mask
from imagemill.inputs.sources import SourceFile
from imagemill.store.ledger import FROM_METADATA, CaptionKey, CaptionRow, Ledger, Problem, fingerprint_texts
from imagemill.text.units import counted

# Asset of the problems of metadata files.
METADATA: Final = "metadata"

# Rows per ledger transaction.
_CHUNK: Final = 4096

# Rows that a message names.
_SHOWN: Final = 3

_ABSOLUTE: Final = re.compile(r"/|[A-Za-z]:/").match


def read_metadata(folder: Folder, scan: Scan, ledger: Ledger, inputs: InputSettings) -> None:
    """Record the captions of all metadata files that have to be read, and the problems of these files.

    A caption whose row is gone stays, as one of an earlier record.
    """
    if not scan.metadata and not ledger.metadata_in_use():
        return
    keys = ledger.caption_keys()
    unusable = unusable_sidecars(ledger)
    below = images_below(scan)
    problems: list[Problem] = []
    read: set[str] = set()
    seen: set[str] = set()
    elsewhere = _Elsewhere(share, scan.others) if (share := inputs.own_share) else None
    for file in scan.metadata:
        images = [i for i in below.get(file.path, ()) if file.first or not _has_text(i, scan, keys, unusable)]
        has_row = {i for i in images if (key := keys.get(i)) and key.stat == file.path}
        if ledger.verified(Path(METADATA, file.path)) == _state(file, inputs, (i for i in images if i not in has_row)):
            continue
        read.add(file.path)
        sources = {i: scan.sources[i] for i in below.get(file.path, ())}
        reading = _Reading(file, folder, sources, images, keys, elsewhere)
        problem = reading.run(ledger, inputs, _refused_stems(scan))
        if problem:
            problems.append(problem)
        seen |= reading.seen
        has_row = reading.seen if reading.whole else has_row | reading.seen
        ledger.record_verified(Path(METADATA, file.path), _state(file, inputs, (i for i in images if i not in has_row)))
    place = {image_id: path for path, ids in below.items() for image_id in ids}
    rows = ((i, key) for i, key in keys.items() if key.origin == FROM_METADATA and i in scan.sources and i not in seen)
    ledger.forget_source(FROM_METADATA, (i for i, key in rows if key.stat != place.get(i)))
    left = {file.path for file in scan.metadata} - read
    ledger.replace_problems(METADATA, problems, lambda problem: problem.item not in left)
    ledger.clear_problems(SIDECARS, (p.item for p in ledger.problems() if p.reason == BLANK and p.item in seen))


def _refused_stems(scan: Scan) -> frozenset[str]:
    """Return the paths without extension of what is not used: a row of such an image is no row without an image."""
    return frozenset(stem_of(problem.item) for problem in scan.problems)


def images_below(scan: Scan) -> dict[str, list[str]]:
    """Return the images by the metadata file that may have rows for them: the one that a setting names, else the nearest."""
    if named := next((file.path for file in scan.metadata if file.first), None):
        return {named: list(scan.sources)}
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
    """Paths below the folder of images that the path of a row may mean; `bad`: it leads outside."""

    paths: tuple[str, ...]
    bad: bool = False


class _Elsewhere(NamedTuple):
    """Recognises rows of images of other shares. `images`: paths of these images."""

    share: ImageShare
    images: frozenset[str]

    def has(self, place: _Place, found: list[str]) -> bool:
        """Return whether a row is that of an image of another share, or is for its data root to report.

        Args:
            place: where its path leads.
            found: the images, of all shares, that it may mean.
        """
        return found[0] in self.images if len(found) == 1 else not self.share.has(image_id_of(place.paths[0]))


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
    """One pass over a metadata file.

    Args:
        file: the file.
        folder: the folder of images.
        sources: the images that its rows may belong to, by id.
        images: those of them that have no caption file, or all if the file precedes caption files.
        keys: the ledger's captions before the pass.
        elsewhere: images of other shares, if the data root takes a share.

    Attributes:
        seen: images with a row that has text.
        whole: whether every row was read.
    """

    def __init__(
        self,
        file: MetadataFile,
        folder: Folder,
        sources: Mapping[str, SourceFile],
        images: Iterable[str],
        keys: Mapping[str, CaptionKey],
        elsewhere: _Elsewhere | None = None,
    ) -> None:
        self._elsewhere = elsewhere
        self._file, self._folder, self._sources, self._keys = file, folder, sources, keys
        self._images = frozenset(images)
        self._ids = {source.file_name: image_id for image_id, source in sources.items()}
        self._index = PathIndex((*self._ids, *(elsewhere.images if elsewhere else ())))
        real = os.path.realpath(folder) if isinstance(folder, Path) else str(folder)
        self._roots = tuple(dict.fromkeys((str(folder), real)))
        self._rows: dict[str, CaptionRow] = {}
        self._conflicts: dict[str, bool] = {}
        self.seen: set[str] = set()
        self.whole = False
        self._bad, self._outside, self._without = _Faults(), _Faults(), _Faults()

    def run(self, ledger: Ledger, inputs: InputSettings, refused: Collection[str]) -> Problem | None:
        """Record the captions of all rows; return the problem of the file, if it has one.

        `refused`: paths without extension of images that are not used.
        """
        prefix = inputs.strip_prefix.replace("\\", "/")
        try:
            for row in self._read(inputs):
                if isinstance(row, BadRow):
                    self._bad.add(f"{row.number}: {row.why}")
                else:
                    self._take(row, self._place(row.path.replace("\\", "/"), prefix), ledger, refused)
                if len(self._rows) >= _CHUNK:
                    self._flush(ledger)
        except Unreadable as error:
            return self._problem("bad_metadata", error.what, error.do or "repair it")
        except OSError as error:
            return self._problem("read_error", f"it cannot be read: {error.strerror}", "make it readable", failed=True)
        finally:
            self._flush(ledger)
        self.whole = True
        path = self._file.path
        gone = (i for i, key in self._keys.items() if key.stat == path and i not in self.seen)
        ledger.forget_source(FROM_METADATA, gone)
        if self._file.first:
            ledger.record_conflicts(dict(self._differing(ledger, inputs)))
        return self._faults()

    def _read(self, inputs: InputSettings) -> Iterator[MetadataRow | BadRow]:
        chosen = format_of(self._file.path)
        if chosen is None:
            raise Unreadable("its format is not known", do="name a file .jsonl, .csv, .parquet or .json")
        columns = Columns(inputs.file_column, inputs.text_column)
        with on_disk(self._folder / self._file.path) as path:
            yield from chosen.read_rows(path, columns, inputs.encoding)

    def _take(self, row: MetadataRow, place: _Place, ledger: Ledger, refused: Collection[str]) -> None:
        if place.bad:
            self._outside.add(f"{row.number}: {row.path[:80]}")
            return
        found = next((ids for path in place.paths if (ids := self._index.find(path))), [])
        if self._elsewhere and self._elsewhere.has(place, found):
            return
        if len(found) != 1:
            if found or not any(stem_of(path) in refused for path in place.paths):
                several = f", which may be {' or '.join(sorted(found)[:_SHOWN])}" if found else ""
                self._without.add(f"{row.number}: {row.path[:80]}{several}")
            return
        image_id = self._ids[found[0]]
        if not row.captions:
            return
        key = self._keys.get(image_id)
        if image_id not in self._images:
            # Its caption file precedes the row.
            if key and key.conflict != (differs := key.of_texts != fingerprint_texts(row.captions)):
                self._conflicts[image_id] = differs
            return
        earlier = self._rows.get(image_id)
        if earlier is None and image_id in self.seen:
            self._flush(ledger)
            earlier = ledger.captions([image_id], outdated=True)[image_id]
        self.seen.add(image_id)
        texts = tuple(dict.fromkeys((*(earlier.all_texts if earlier else ()), *row.captions)))
        made = caption_row(image_id, texts, FROM_METADATA, FileSignature(self._file.path))
        if earlier is None and key and (key.stat, key.of_texts) == (made.stat, made.of_texts):
            return
        self._rows[image_id] = made

    def _differing(self, ledger: Ledger, inputs: InputSettings) -> Iterator[tuple[str, bool]]:
        """Yield the images whose caption file has another text than their row, which precedes it, and those that had."""
        with_file = [i for i in self.seen if self._sources[i].caption is not None]
        for start in range(0, len(with_file), _CHUNK):
            for image_id, row in ledger.captions(with_file[start : start + _CHUNK], outdated=True).items():
                found = read_source(self._folder, self._sources[image_id], inputs)
                differs = isinstance(found, CaptionRow) and found.of_texts != row.of_texts
                if differs != row.conflict:
                    yield image_id, differs

    def _flush(self, ledger: Ledger) -> None:
        known = ledger.captions(list(self._rows), outdated=True) if self._rows else {}
        with ledger.transaction():
            ledger.record_captions(with_known_mask(row, known.get(row.image_id)) for row in self._rows.values())
            ledger.record_conflicts(self._conflicts)
        self._rows.clear()
        self._conflicts.clear()

    def _place(self, path: str, prefix: str) -> _Place:
        """Return where a path leads: relative to the file's folder, then to the folder of images."""
        if prefix and path.startswith(prefix):
            path, folder = path[len(prefix) :].lstrip("/"), ""
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
        by_reason = {
            "bad_row": (self._bad, "that cannot be read", "repair them"),
            "bad_path": (
                self._outside,
                "with a path outside the folder of images",
                "set captions.strip_prefix in imagemill.yaml to what they begin with",
            ),
            "row_without_image": (self._without, "without an image", "add the images, or remove the rows"),
        }
        found = {reason: each for reason, each in by_reason.items() if each[0].count}
        if not found:
            return None
        parts = [
            f"{counted(faults.count, 'row')} {what} ({'; '.join(faults.first)})" for faults, what, _ in found.values()
        ]
        return self._problem(next(iter(found)), ", ".join(parts), "; ".join(do for *_, do in found.values()))

    def _problem(self, reason: str, detail: str, remedy: str, *, failed: bool = False) -> Problem:
        outcome = "failed" if failed else "refused"
        return Problem(self._file.path, METADATA, outcome, reason, detail, remedy, self._file.stat)
