"""Acceptance of renames: the new id of an image takes over what the earlier one had, and the earlier one ends.

    pairs (renames.py) ──one transaction──> captions, withdrawals ──next merge──> records (merge.py) ──packing──> samples

Arrays need not be taken over: those of the new id are links to those of the earlier one (reuse.py).

Spec: docs/spec/stage2.md#renames
"""

from collections.abc import Mapping

import msgspec

from imagemill.domain.layout import DataRoot
from imagemill.fs.fingerprints import signature_bytes
from imagemill.inputs.scan import Scan
from imagemill.pipeline.leases import claimed
from imagemill.pipeline.stage2.image_metadata import complete_facts
from imagemill.pipeline.stage2.merge import ASSET
from imagemill.pipeline.stage2.record_index import read_recorded
from imagemill.pipeline.stage2.renames import Renamed, find_renames, note_arrivals
from imagemill.store.ledger import (
    FROM_CAPTIONER,
    FROM_FOLDER,
    FROM_METADATA,
    FROM_PREVIEW,
    FROM_PREVIEW_RECORD,
    FROM_RECORD,
    FROM_SIDECAR,
    CaptionRow,
    Ledger,
    Takeover,
)

# Rank of a caption by its origin; that of a file is the highest.
_RANKS = {
    FROM_SIDECAR: 0, FROM_METADATA: 0, FROM_RECORD: 1, FROM_FOLDER: 2, FROM_CAPTIONER: 3, FROM_PREVIEW: 4, FROM_PREVIEW_RECORD: 4,
}  # fmt: skip


def accept_renames(root: DataRoot, scan: Scan, ledger: Ledger, run_id: str, *, threads: int = 2) -> list[Renamed]:
    """Let renamed images take over what their earlier names had; end the earlier names, in one transaction.

    The records follow at the next merge. An image whose record is still of Stage 1 waits until that is migrated.

    Args:
        root: the data root.
        scan: contents of `approved/`, whose captions have been read.
        ledger: the ledger.
        run_id: the run that claims the records meanwhile.
        threads: threads that open new images.

    Returns:
        the accepted renames.
    """
    with claimed(ledger, ASSET, ["all"], run_id):
        _open_candidates(root, scan, ledger, threads)
        note_arrivals(scan, ledger)
        recorded = read_recorded(root.stage2_jsonl)
        waiting = recorded.stage1 | recorded.vectors.keys()
        pairs = [pair for pair in find_renames(scan, ledger).pairs if pair.former.image_id not in waiting]
        if pairs:
            captions = ledger.captions([row.image_id for pair in pairs for row in pair], outdated=True)
            ledger.accept_renames([_takeover(pair, captions) for pair in pairs])
    return pairs


def _open_candidates(root: DataRoot, scan: Scan, ledger: Ledger, threads: int) -> None:
    """Read the new images that may be equal to one that is gone: those with the size of its file."""
    known = ledger.sources()
    sizes = {signature_bytes(row.stat) for image_id, row in known.items() if image_id not in scan.sources}
    new = {i: source for i, source in scan.sources.items() if i not in known and signature_bytes(source.stat) in sizes}
    if new:
        complete_facts(root.approved, Scan(new, []), ledger, threads=threads)


def _takeover(pair: Renamed, captions: Mapping[str, CaptionRow]) -> Takeover:
    former, image_id = pair.former.image_id, pair.image.image_id
    return Takeover(former, image_id, inherited_caption(captions.get(former), captions.get(image_id), image_id))


def inherited_caption(former: CaptionRow | None, own: CaptionRow | None, image_id: str) -> CaptionRow | None:
    """Return the caption that a renamed image takes over; None if it keeps its own.

    Its own caption is kept if it comes from a file or an edit of its record, or is by a real captioner instead of a preview
    model. The file of a caption that is taken over belongs to the earlier name, so the caption becomes that of the record.
    """
    if former is None:
        return None
    if _RANKS[former.origin] == 0:
        former = msgspec.structs.replace(former, origin=FROM_RECORD, stat=None, lines=0, conflict=False)
    if own is None or (_RANKS[own.origin] > 1 and _RANKS[own.origin] >= _RANKS[former.origin]):
        return msgspec.structs.replace(former, image_id=image_id)
    if own.mask is None and own.fingerprint == former.fingerprint:  # the tokenizer need not be loaded
        return msgspec.structs.replace(own, mask=former.mask, truncated=former.truncated)
    return None
