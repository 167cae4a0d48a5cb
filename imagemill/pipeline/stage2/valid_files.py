"""Files of one kind that curation uses: valid and made from the current image.

A file whose signature is in the ledger is trusted; any other is read completely once and adopted, as in packing.

Computations are in pipeline/curation/latent_statistics.py and pipeline/curation/near_duplicates.py.

Spec: docs/spec/conventions.md#completion, docs/spec/conventions.md#adoption, docs/spec/conventions.md#staleness
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import numpy as np

from imagemill.domain.embedding_specs import EmbeddingSpec
from imagemill.errors import InvalidNpy
from imagemill.formats.npy import NpyStore, read_npy
from imagemill.fs.fingerprints import FileSignature
from imagemill.pipeline.stage2.plan import adopted_row
from imagemill.store.inputs import PixelRule
from imagemill.store.ledger import SUPERSEDED, FileRow, Ledger, SourceRow
from imagemill.store.provenance import spec_in_force

# Most files in memory at once.
_AHEAD = 256
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class CurrentFile:
    """One file and its image. `content`: fingerprint of the file's bytes."""

    source: SourceRow
    content: str

    @property
    def image_id(self) -> str:
        """Id of the image."""
        return self.source.image_id


@dataclass(slots=True)
class CurrentFiles:
    """All usable files of a kind, in order of image id; `left_out`: image id → reason code of an image without one."""

    store: NpyStore
    files: list[CurrentFile] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)
    sources: dict[str, SourceRow] = field(default_factory=dict)


def current_files(spec: EmbeddingSpec, derived: Path, ledger: Ledger) -> CurrentFiles:
    """Match the folder of a kind with the ledger; check files without a row and record them."""
    found = CurrentFiles(NpyStore(derived / spec.folder, spec_in_force(spec, ledger)), sources=ledger.sources())
    pixels = PixelRule.read(ledger)
    listing, rows = found.store.listing(), ledger.files(spec.kind)
    known: dict[str, list[FileRow]] = defaultdict(list)
    for row in rows.values():
        known[row.image_id].append(row)
    adopted: list[FileRow] = []
    for image_id in sorted(listing.keys() | found.sources.keys()):
        source, present = found.sources.get(image_id), listing.get(image_id)
        if source is None or present is None:
            found.left_out[image_id] = "missing_file" if source else "unknown_image"
            continue
        row = rows.get((image_id, present))
        if row is None:
            row = _adopt(found.store, source, present, known[image_id], pixels)
            if isinstance(row, str):
                found.left_out[image_id] = row
                continue
            adopted.append(row)
        if row.model_key == SUPERSEDED or not pixels.is_current(row.source, source):
            found.left_out[image_id] = "superseded" if row.model_key == SUPERSEDED else "stale"
            continue
        found.files.append(CurrentFile(source, row.content))
    ledger.record_files(adopted, made=False)
    return found


def _adopt(
    store: NpyStore, source: SourceRow, present: FileSignature, known: Iterable[FileRow], pixels: PixelRule
) -> FileRow | str:
    """Return a row for a file that is not in the ledger, or the reason why it is not valid."""
    try:
        content = store.check(source.image_id, source.height, source.width)
    except InvalidNpy as invalid:
        return invalid.reason
    except OSError:
        return "read_error"
    return adopted_row(store, source.image_id, known, content, present, source.pixel_input(pixels.color))


def measured(
    found: CurrentFiles, files: Sequence[CurrentFile], measure: Callable[[np.ndarray, Path], T], *, threads: int
) -> Iterator[tuple[CurrentFile, T]]:
    """Read files in the given order on threads, at most `_AHEAD` in memory.

    Args:
        found: the files of the kind; receives the reasons for files that are not valid.
        files: the files to read.
        measure: maps the array, of the kind's shape and dtype, and its path to the result to keep. It may raise InvalidNpy.
            Called on several threads.
        threads: number of threads.

    Yields:
        each file with its result; an invalid file is added to `found.left_out` instead.

    Raises:
        OSError: if the disk fails.
    """

    def read(file: CurrentFile) -> T | InvalidNpy:
        path = found.store.path(file.image_id)
        try:
            return measure(_array(found.store, file, path), path)
        except InvalidNpy as invalid:
            return invalid

    with ThreadPoolExecutor(threads, "measure") as pool:
        for i in range(0, len(files), _AHEAD):
            part = files[i : i + _AHEAD]
            for file, result in zip(part, pool.map(read, part), strict=True):
                if isinstance(result, InvalidNpy):
                    found.left_out[file.image_id] = result.reason
                else:
                    yield file, result


def _array(store: NpyStore, file: CurrentFile, path: Path) -> np.ndarray:
    # The content is compared although the file is recorded: a disk error must not lead to a wrong statistic.
    array = read_npy(path, content=file.content)
    if (array.shape, array.dtype) != (layout := store.spec.layout(file.source.height, file.source.width)):
        raise InvalidNpy("wrong_shape", path, f"{array.dtype} {array.shape}, expected {layout[1]} {layout[0]}")
    return array
