"""What a record needs of an image besides its embeddings: that it opens, its size, its caption's mask.

The first pass that opens an image records its facts on the way. Whatever is still unknown when records are written (a T5-only
run, a caption that came later) is completed here, so that the order of passes never shows in the result.

Source: CONTRACTS section 1, row "record".
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol, TypeVar

import numpy as np

from imagemill.errors import Refused
from imagemill.files import StatTriple, fingerprint
from imagemill.ledger import FROM_PREVIEW_RECORD, FROM_RECORD, CaptionRow, Ledger, Problem, SourceRow
from imagemill.pipeline.stage2.merge import ASSET
from imagemill.pipeline.stage2.plan import IMAGE_REASONS, Known, missing_caption
from imagemill.pipeline.stage2.recorded import Recorded, Span
from imagemill.pipeline.stage2.scan import Scan, SourceFile, caption_row
from imagemill.pixels import decode_rgb
from imagemill.provenance import read_identity
from imagemill.summarizer import CAPTIONER

_CHUNK = 512
T = TypeVar("T")

# Captions in, (mask of 77 ints, whether the caption was cut) out: the tokenizer alone.
Masks = Callable[[Sequence[str]], Sequence[tuple[list[int], bool]]]


class ImageFile(Protocol):
    """An image of `approved/`, as it was listed."""

    @property
    def image_id(self) -> str: ...
    @property
    def file_name(self) -> str: ...
    @property
    def stat(self) -> StatTriple | None: ...


def inspect_image(approved: Path, source: ImageFile) -> tuple[SourceRow, np.ndarray]:
    """Read an image once.

    Returns:
        its fingerprint and oriented size, and its pixels, uint8 (H, W, 3).

    Raises:
        Refused: it does not open, or is too small or too large. OSError: the disk's fault.
    """
    data = (approved / source.file_name).read_bytes()
    pixels = decode_rgb(data, source.file_name)
    height, width = pixels.shape[:2]
    assert source.stat  # an image that is gone is not asked for
    return SourceRow(source.image_id, source.file_name, source.stat, fingerprint(data), height, width), pixels


def complete_facts(approved: Path, scan: Scan, ledger: Ledger, *, threads: int = 2, up_to: str | None = None) -> None:
    """Open the images no pass has opened yet, those up to an id; record their facts, or why they do not open."""
    known = Known.read(ledger)
    refused = {
        image_id for image_id, problems in known.refusals.items()
        for p in problems if p.reason in IMAGE_REASONS and image_id in scan.sources and p.stat == scan.sources[image_id].stat
    }  # fmt: skip
    asked = [s for s in scan.sources.values() if up_to is None or s.image_id <= up_to]
    todo = [s for s in asked if known.facts(s) is None and s.image_id not in refused]
    with ThreadPoolExecutor(threads, "inspect") as pool:
        for chunk in _chunks(todo):
            results = list(pool.map(lambda source: _facts_or_problem(approved, source), chunk))
            with ledger.transaction():
                ledger.record_sources(r for r in results if isinstance(r, SourceRow))
                ledger.record_problems(r for r in results if isinstance(r, Problem))
    _forget_overcome(scan, ledger)


def _forget_overcome(scan: Scan, ledger: Ledger) -> None:
    """Drop what was noted of images that have opened since, here or in an embedding pass."""
    opened = ledger.sources()
    noted = [p.item for p in ledger.problems() if p.asset == ASSET]
    ledger.clear_problems(
        ASSET, [i for i in noted if i in opened and i in scan.sources and opened[i].stat == scan.sources[i].stat]
    )


def _facts_or_problem(approved: Path, source: SourceFile) -> SourceRow | Problem:
    try:
        return inspect_image(approved, source)[0]
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
        return Problem(source.image_id, ASSET, "failed", "read_error", str(error), "run imagemill again", source.stat)


def adopt_captions(recorded: Recorded, ledger: Ledger, provenance: Path) -> None:
    """Images without a sidecar take the caption of the record they already have, byte for byte; images that are gone too."""
    known = ledger.ids("captions")
    origin = FROM_RECORD if known else _origin_unknown(provenance)
    rows = (
        _recorded_caption(image_id, span, origin) for image_id, span in recorded.lines.items() if image_id not in known
    )
    ledger.record_captions(row for row in rows if row)


def _origin_unknown(provenance: Path) -> str:
    """Without its ledger nobody knows which captions a preview model made: where one did, none counts as real."""
    captioner = read_identity(provenance, CAPTIONER)
    return FROM_PREVIEW_RECORD if captioner and captioner.preview else FROM_RECORD


def _recorded_caption(image_id: str, span: Span, origin: str) -> CaptionRow | None:
    caption = span.record().get("caption")
    return caption_row(image_id, caption, origin) if isinstance(caption, str) and caption.strip() else None


def complete_masks(ledger: Ledger, masks: Callable[[], Masks]) -> None:
    """Tokenise captions that have no mask yet. `masks` loads the tokenizer: it is called only if there are any."""
    todo = [row for row in ledger.captions().values() if row.mask is None]
    if not todo:
        return
    tokenise = masks()
    for chunk in _chunks(todo):
        made = tokenise([row.text for row in chunk])
        ledger.record_masks((row.image_id, row.fingerprint, *mask) for row, mask in zip(chunk, made, strict=True))


def note_missing_captions(scan: Scan, ledger: Ledger) -> None:
    """One row per image that opens and has no caption, so that nothing disappears silently whichever passes ran."""
    captions, opened, outdated = ledger.captions(), ledger.sources(), ledger.outdated_captions()
    absent = [s for s in scan.sources.values() if s.image_id in opened and s.image_id not in captions]
    with ledger.transaction():
        ledger.clear_problems(
            ASSET, (p.item for p in ledger.problems() if p.asset == ASSET and p.reason == "missing_caption")
        )
        ledger.record_problems(missing_caption(ASSET, s, outdated=s.image_id in outdated) for s in absent)


def _chunks(items: Sequence[T]) -> Iterator[Sequence[T]]:
    return (items[i : i + _CHUNK] for i in range(0, len(items), _CHUNK))
