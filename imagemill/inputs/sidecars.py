"""The text of caption files beside images: encoding, lines, and texts that are not captions.

Spec: docs/spec/stage2.md#caption-sources, docs/spec/stage2.md#caption-text
"""

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final, NamedTuple

import msgspec

from imagemill.domain.inputs import FIRST, JOIN, NEW_INPUTS, InputSettings, Lines, distinct_captions
from imagemill.fs.fingerprints import FileSignature, fingerprint, signature_bytes
from imagemill.fs.folders import READS_AHEAD, Folder, ObjectFolder
from imagemill.inputs.sources import SourceFile
from imagemill.store.ledger import FROM_METADATA, FROM_SIDECAR, CaptionRow, Ledger, Problem
from imagemill.text.encodings import BadEncoding, decode_text

# A longer caption file is refused; not more than this is read.
MAX_CAPTION_BYTES = 1 << 20

# Asset of the problems of caption files.
SIDECARS = "captions"

# Reason of a caption file without text, which does not keep lower sources from being used.
BLANK: Final = "blank_caption"

_NUMBER: Final = r"(?:0(?:\.[0-9]*)?|1(?:\.0*)?|\.[0-9]+|[0-9](?:\.[0-9]+)?[eE]-[0-9]+)"
# A line of YOLO labels: the class, then a box or a polygon in units of the picture's size.
_LABELS: Final = re.compile(rf"[0-9]+(?:[ \t]+{_NUMBER}){{4,}}").fullmatch


class CaptionText(NamedTuple):
    """The captions of a file, none if it is blank, and the number of lines with text."""

    captions: tuple[str, ...]
    lines: int


def read_lines(text: str, setting: Lines = JOIN) -> CaptionText:
    """Return the captions of a text: all lines as one, the first line with text, or each one."""
    lines = [line for line in text.splitlines() if line.strip()]
    chosen = [text] if setting == JOIN else lines[:1] if setting == FIRST else lines
    return CaptionText(distinct_captions(chosen), len(lines))


def is_annotation(text: str) -> bool:
    """Return whether every line with text is an integer and four or more numbers from 0 to 1, as YOLO's labels are."""
    if not text[:1000].lstrip()[:1].isdigit():
        return False
    lines = [stripped for line in text.splitlines() if (stripped := line.strip())]
    return all(map(_LABELS, lines))


def caption_row(
    image_id: str, captions: str | Sequence[str], origin: str, stat: FileSignature | None = None
) -> CaptionRow:
    """Return the ledger's row of one caption or several, with the fingerprint of the first."""
    texts = (captions,) if isinstance(captions, str) else tuple(captions)
    of_first = fingerprint(texts[0].encode("utf-8"))
    return CaptionRow(image_id, stat, texts[0], origin, of_first, texts=texts if len(texts) > 1 else ())


def with_known_mask(row: CaptionRow, known: CaptionRow | None) -> CaptionRow:
    """Return a row with the mask of a known one if their texts are equal."""
    if known is None or known.fingerprint != row.fingerprint:
        return row
    return msgspec.structs.replace(row, mask=known.mask, truncated=known.truncated)


def read_captions(
    folder: Folder,
    sources: Iterable[SourceFile],
    known: Mapping[str, CaptionRow],
    inputs: InputSettings = NEW_INPUTS,
    *,
    after_metadata: bool = False,
) -> tuple[list[CaptionRow], list[Problem]]:
    """Read the caption files that are new or changed. Of several of one image, the first with text is its caption.

    Returns:
        rows to record (a mask survives only if the text did not change), and a problem per image whose caption file cannot
        be read, is too long, is not text, or contains labels. No other file takes the place of such a one.
    """
    rows: list[CaptionRow] = []
    problems: list[Problem] = []
    unread = (
        source
        for source in sources
        if source.caption is not None
        and not (
            (old := known.get(source.image_id)) and (old.stat == source.caption or (after_metadata and _of_row(old)))
        )
    )
    for source, found in _read_sources(folder, unread, inputs):
        old = known.get(source.image_id)
        of_row = _of_row(old)
        if isinstance(found, Problem):
            problems.append(found)
        elif found is not None:
            rows.append(with_known_mask(found, old))
        elif old and not of_row:
            detail = f"{source.captions[0]} is blank; the caption it had, or the record's, is still used"
            problems.append(_refused(source, BLANK, detail, "write one line of text"))
    return rows, problems


def _of_row(caption: CaptionRow | None) -> bool:
    return caption is not None and caption.origin == FROM_METADATA


def _read_sources(
    folder: Folder, sources: Iterable[SourceFile], inputs: InputSettings
) -> Iterator[tuple[SourceFile, CaptionRow | Problem | None]]:
    """Yield images with what `read_source` returns; objects are read many at a time."""
    if not isinstance(folder, ObjectFolder):
        yield from ((source, read_source(folder, source, inputs)) for source in sources)
        return
    with ThreadPoolExecutor(READS_AHEAD, "captions") as pool:
        yield from pool.map(lambda source: (source, read_source(folder, source, inputs)), sources)


def unusable_sidecars(ledger: Ledger) -> set[str]:
    """Return the images with a caption file that cannot be used, in whose place no lower source is used."""
    return {p.item for p in ledger.problems() if p.asset == SIDECARS and p.reason != BLANK}


def read_source(folder: Folder, source: SourceFile, inputs: InputSettings) -> CaptionRow | Problem | None:
    """Return the caption of an image from its files; None if all are blank or have just disappeared."""
    row: CaptionRow | None = None
    assert source.caption is not None  # callers pass images with caption files only
    for name, signature in zip(source.captions, source.caption.split(" "), strict=True):
        try:
            found = _read_file(folder, name, FileSignature(signature), source, inputs)
        except FileNotFoundError:
            continue
        if row is None and isinstance(found, Problem):
            return found
        if isinstance(found, Problem) or not found.captions:
            continue
        if row is None:
            row = caption_row(source.image_id, found.captions, FROM_SIDECAR, source.caption)
            row = msgspec.structs.replace(row, lines=found.lines)
        elif found.captions != row.all_texts:
            row = msgspec.structs.replace(row, conflict=True)
    return row


def _read_file(
    folder: Folder, path: str, signature: FileSignature, source: SourceFile, inputs: InputSettings
) -> CaptionText | Problem:
    """Read a caption of at most `MAX_CAPTION_BYTES`. Raises FileNotFoundError if the file has just disappeared."""
    name = path[path.rfind("/") + 1 :]
    try:
        data = _first_bytes(folder, path, signature)
        if len(data) > MAX_CAPTION_BYTES:
            limit = f"{name} is longer than {MAX_CAPTION_BYTES} bytes"
            return _refused(source, "caption_too_long", limit, "write one line of text")
        text = decode_text(data, inputs.encoding)
    except FileNotFoundError:
        raise
    except IsADirectoryError:
        remedy = f"rename or move the folder, then write the caption to a file {name}"
        return _refused(source, "bad_caption", f"{name} is a folder", remedy)
    except BadEncoding as error:
        remedy = "save the caption as UTF-8, or name its encoding as captions.encoding in imagemill.yaml"
        return _refused(source, "bad_caption", f"{name} {error}", remedy)
    except OSError as error:
        return _read_error(source, name, error.strerror)
    if is_annotation(text):
        detail = f"{name} contains numbers as in YOLO's labels, no caption"
        return _refused(source, "annotation_not_caption", detail, "write a caption to it, or move the labels elsewhere")
    return read_lines(text, inputs.lines)


def _first_bytes(folder: Folder, path: str, signature: FileSignature) -> bytes:
    """Return the bytes of a file, up to one more than the longest caption."""
    if isinstance(folder, ObjectFolder):
        file, short = folder / path, signature_bytes(signature) <= MAX_CAPTION_BYTES
        return file.read_bytes(signature) if short else file.read_head(MAX_CAPTION_BYTES + 1)
    with open(f"{folder}/{path}", "rb", buffering=0) as file:
        # A read of the largest size would allocate that much for every caption.
        return file.read(min(os.fstat(file.fileno()).st_size, MAX_CAPTION_BYTES) + 1)


def _read_error(source: SourceFile, name: str, why: str | None) -> Problem:
    remedy = "make the file readable, then run imagemill again"
    detail = f"{name} cannot be read: {why}"
    return Problem(source.image_id, SIDECARS, "failed", "read_error", detail, remedy, source.caption)


def _refused(source: SourceFile, reason: str, detail: str, remedy: str) -> Problem:
    return Problem(source.image_id, SIDECARS, "refused", reason, detail, remedy, source.caption)
