"""Image metadata that records need besides embeddings: decodability, size, and the mask of the caption.

The first pass that opens an image records its metadata. Metadata still missing when records are written (a T5-only run, a
caption added later) is completed here, so that the result does not depend on the order of passes.

Spec: docs/spec/stage2.md#record-fields
"""

from collections.abc import Callable, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import numpy as np

from imagemill.domain.embedding_specs import T5_TOKENS
from imagemill.domain.inputs import SRGB, ColorSetting
from imagemill.domain.layout import DataRoot
from imagemill.domain.stage2_records import CAPTIONS, captions_of
from imagemill.errors import Refused
from imagemill.formats.images import decode, header_size
from imagemill.formats.jsonl import Span, encode_line
from imagemill.fs.fingerprints import FileSignature, fingerprint
from imagemill.fs.folders import Folder, SourceFolder, file_bytes, reads_ahead
from imagemill.inputs.scan import Scan
from imagemill.inputs.sidecars import SIDECARS, caption_row
from imagemill.inputs.sources import SourceFile
from imagemill.models import CAPTIONER
from imagemill.parts import in_parts
from imagemill.pipeline.prefetch import map_on
from imagemill.pipeline.stage2.inventory import Inventory
from imagemill.pipeline.stage2.merge import ASSET, UNMIGRATED
from imagemill.pipeline.stage2.plan import LedgerSnapshot, missing_caption, refused_image, unusable_sidecar
from imagemill.pipeline.stage2.quarantine import CAPTION, QuarantinedLine, quarantine
from imagemill.pipeline.stage2.record_index import Recorded, record_at
from imagemill.store.inputs import PixelRule
from imagemill.store.ledger import (
    FROM_METADATA,
    FROM_PREVIEW_RECORD,
    FROM_RECORD,
    FROM_SIDECAR,
    CaptionKey,
    CaptionRow,
    Ledger,
    Problem,
    SourceRow,
)
from imagemill.store.provenance import read_identity

_CHUNK = 512

# Reasons about the records of images, which opening an image does not resolve.
_OF_RECORDS = UNMIGRATED | {"missing_caption"}

# Maps captions to (mask, one int per position, whether the caption was truncated); needs the tokenizer only.
Masks = Callable[[Sequence[str]], Sequence[tuple[list[int], bool]]]


class ImageFile(Protocol):
    """An image of `approved/`, as listed."""

    @property
    def image_id(self) -> str:
        """Id of the image."""
        ...

    @property
    def file_name(self) -> str:
        """Name of the file in `approved/`."""
        ...

    @property
    def stat(self) -> FileSignature | None:
        """Signature of the file; None if it is gone."""
        ...


def inspect_image(
    approved: SourceFolder, source: ImageFile, color: ColorSetting = SRGB
) -> tuple[SourceRow, np.ndarray]:
    """Read an image once.

    Args:
        approved: folder of the images.
        source: the image.
        color: `ignore` leaves its colours as they are stored.

    Returns:
        its source row with fingerprint, oriented size and colours, and its pixels, uint8 (H, W, 3).

    Raises:
        Refused: as `formats.images.decode`.
        OSError: if the disk fails.
    """
    data = file_bytes(approved / source.file_name, source.stat)
    pixels, facts = decode(data, source.file_name, color)
    height, width = pixels.shape[:2]
    assert source.stat  # callers pass existing images only
    row = SourceRow(source.image_id, source.file_name, source.stat, fingerprint(data), height, width, *facts.columns)
    return row, pixels


def size_or_none(folder: SourceFolder, name: str) -> tuple[int, int] | None:
    """Return an image's upright (height, width) in pixels; None if its header cannot be read, which `inspect_image` reports."""
    try:
        return header_size(folder / name)
    except (Refused, OSError):
        return None


def complete_facts(
    approved: Folder,
    scan: Scan,
    ledger: Ledger,
    *,
    threads: int = 2,
    up_to: str | None = None,
    among: Set[str] | None = None,
) -> None:
    """Open the images that no pass has opened yet; record their metadata, or why they cannot be decoded.

    Args:
        approved: folder of the images.
        scan: its contents.
        ledger: receives the rows.
        threads: threads that decode.
        up_to: id of the last image; None for all.
        among: see `Inventory.in_question`.
    """
    color = PixelRule.read(ledger).color
    chosen = scan.sources.keys() if among is None else scan.sources.keys() & among
    ids = sorted(image_id for image_id in chosen if up_to is None or image_id <= up_to)
    with ThreadPoolExecutor(reads_ahead(approved, threads), "inspect") as pool:
        for part in in_parts(ids):
            read = ledger.signatures_read(color, part[0], part[-1])
            unknown = [
                source for source in map(scan.sources.__getitem__, part) if read.get(source.image_id) != source.stat
            ]
            for chunk in in_parts(_unopened(unknown, ledger), _CHUNK):
                results = list(map_on(pool, lambda source: _facts_or_problem(approved, source, color), chunk))
                with ledger.transaction():
                    ledger.record_sources(r for r in results if isinstance(r, SourceRow))
                    ledger.record_problems(r for r in results if isinstance(r, Problem))
    _forget_overcome(scan, ledger)


def _unopened(sources: Sequence[SourceFile], ledger: Ledger) -> list[SourceFile]:
    """Return the images that have to be opened; record those that have only been moved."""
    if not sources:
        return []
    known = LedgerSnapshot.read(ledger, [source.image_id for source in sources], sources)
    moved = {source.image_id: row for source in sources if (row := known.facts(source))}
    ledger.record_sources(moved.values())
    return [source for source in sources if source.image_id not in moved and not refused_image(source, known)]


def _forget_overcome(scan: Scan, ledger: Ledger) -> None:
    """Remove problems of images that were opened successfully since, here or in an embedding pass."""
    noted = [p.item for p in ledger.problems() if p.asset == ASSET and p.reason not in _OF_RECORDS]
    opened = ledger.sources(noted)
    ledger.clear_problems(
        ASSET, [i for i in noted if i in opened and i in scan.sources and opened[i].stat == scan.sources[i].stat]
    )


def _facts_or_problem(approved: Folder, source: SourceFile, color: ColorSetting) -> SourceRow | Problem:
    try:
        return inspect_image(approved, source, color)[0]
    except Refused as refusal:
        return Problem(
            source.image_id,
            ASSET,
            "refused",
            refusal.reason,
            refusal.what,
            refusal.do or "replace the image",
            source.stat,
        )
    except Exception as error:
        remedy = "check that the file can be read, then run imagemill again"
        return Problem(source.image_id, ASSET, "failed", "read_error", str(error), remedy, source.stat)


def adopt_captions(inventory: Inventory, ledger: Ledger) -> None:
    """Record the captions of records, byte for byte, for images without another caption, including images that are gone.

    If a record was edited since the last merge, its caption replaces the ledger's, whose text goes to the quarantine file.
    """
    captioner = None if ledger.has_recorded_captions() else read_identity(ledger, CAPTIONER)
    # If the ledger was lost, nothing shows which captions a preview model wrote: if one was used, none counts as real.
    origin = FROM_PREVIEW_RECORD if captioner and captioner.preview else FROM_RECORD
    recorded, among = inventory.recorded, inventory.in_question(ledger)
    ids = recorded.captions if among is None else (image_id for image_id in among if image_id in recorded.captions)
    for part in in_parts(sorted(ids)):
        _adopt_captions(part, origin, recorded, inventory, ledger)


def _adopt_captions(ids: Sequence[str], origin: str, recorded: Recorded, inventory: Inventory, ledger: Ledger) -> None:
    """Adopt the captions of these records, sorted by id. `origin`: of captions that the ledger lacks."""
    sources, texts = inventory.scan.sources, recorded.texts_of(ids)

    def has_another(image_id: str, origin: str, stat: FileSignature | None) -> bool:
        source = sources.get(image_id)
        if source is None:
            return False
        return origin == FROM_METADATA or (source.caption is not None and stat == source.caption)

    settled = {
        i for i, text, origin, stat in ledger.merged_captions(ids[0], ids[-1])
        if texts.get(i) == text and (stat is None or has_another(i, origin, stat))
    }  # fmt: skip
    ids = [i for i in ids if i not in settled]
    if not ids:
        return
    between, texts = (ids[0], ids[-1]), {i: texts[i] for i in ids if i in texts}
    known = {i: key for i, key in ledger.caption_keys(between).items() if i in texts}
    merged = ledger.recorded_captions(between)
    without = {i: row for i, row in known.items() if not has_another(i, row.origin, row.stat)}
    changed = (i for i, row in without.items() if texts[i] not in (row.of_texts, merged.get(i)))
    rows = {i: _recorded_caption(i, recorded.lines[i], FROM_RECORD, known[i]) for i in changed}
    edited = {i: row for i, row in rows.items() if row and row.of_texts != known[i].of_texts}
    _keep_replaced(inventory.root, recorded, ledger, edited.keys())
    new = (_recorded_caption(i, recorded.lines[i], origin) for i in ids if i not in known)
    with ledger.transaction():
        ledger.record_captions((*edited.values(), *(row for row in new if row)))
        # A kill may have separated the replacement of the file from these rows.
        agreed = {
            i: row.of_texts for i, row in known.items() if texts[i] == row.of_texts and merged.get(i) != row.of_texts
        }
        ledger.note_recorded_captions(agreed)
        gone = (i for i, row in without.items() if row.stat and texts[i] == row.of_texts)
        ledger.forget_source(FROM_SIDECAR, gone)


def _keep_replaced(root: DataRoot, recorded: Recorded, ledger: Ledger, edited: Set[str]) -> None:
    """Put the captions of the ledger that an edit of the records replaces into the quarantine file."""
    if edited:
        old = ledger.captions(sorted(edited), outdated=True)
        why = "caption replaced by an edit of the record"
        texts = {i: encode_line({"image_id": i, "caption": row.text}).rstrip(b"\n") for i, row in old.items()}
        lines = [QuarantinedLine(recorded.lines[i].number, CAPTION, why, text) for i, text in texts.items()]
        quarantine(root.quarantine, root.stage2_jsonl.name, lines)


def _recorded_caption(image_id: str, span: Span, origin: str, known: CaptionKey | None = None) -> CaptionRow | None:
    record = record_at(span)
    caption = record.get("caption")
    if not isinstance(caption, str) or not caption.strip():
        return None
    texts = captions_of(record)
    listed = record.get(CAPTIONS)
    if known and known.texts and isinstance(listed, list) and listed[1:] == list(known.texts[1:]):
        # At most the first of several captions was edited, in the field `caption`.
        texts = tuple(dict.fromkeys((caption, *known.texts[1:])))
    return caption_row(image_id, texts, origin)


def complete_masks(ledger: Ledger, masks: Callable[[], Masks], tokens: int = T5_TOKENS) -> None:
    """Tokenise captions without a mask of this length. `masks` loads the tokenizer: it is called only if there are any."""
    tokenise = None
    for chunk in ledger.unmasked(tokens, _CHUNK):
        tokenise = tokenise or masks()
        made = tokenise([row.text for row in chunk])
        ledger.record_masks((row.image_id, row.fingerprint, *mask) for row, mask in zip(chunk, made, strict=True))


def note_missing_captions(scan: Scan, ledger: Ledger, *, among: Set[str] | None = None) -> None:
    """Record one problem per readable image without a caption, so that no image is lost silently in any order of passes.

    `among`: see `Inventory.in_question`.
    """
    outdated, sidecars = ledger.outdated_captions(), {p.item: p for p in ledger.problems() if p.asset == SIDECARS}
    absent = (source for image_id in ledger.uncaptioned_ids(among) if (source := scan.sources.get(image_id)))
    absent = [source for source in absent if not unusable_sidecar(source, sidecars)]
    problems = (missing_caption(ASSET, s, outdated=s.image_id in outdated) for s in absent)
    ledger.replace_problems(ASSET, problems, lambda problem: problem.reason == "missing_caption")
