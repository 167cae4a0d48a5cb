"""Replacing every file of one kind, by another model or because nobody trusts the old ones.

    begin ──> all files superseded, recorded model forgotten ──> passes replace file by file, in any number of runs ──> end

Between the two a folder holds files of both models: the kind is marked, passes know old from new by the ledger, nothing packs it.
Source: CONTRACTS section 0, "Provenance".
"""

from collections.abc import Iterable
from pathlib import Path

from imagemill.errors import ImagemillError
from imagemill.formats.npy import NpyStore
from imagemill.ledger import EVERY, SUPERSEDED, Ledger, Problem
from imagemill.pipeline.claims import claimed
from imagemill.provenance import forget_identity

_BEGUN, _UNDER_WAY = "begun", "under way"
_REASON = "cannot_regenerate"


def regenerate(ledger: Ledger, provenance: Path, kind: str, run_id: str) -> bool:
    """Mark a kind; one that is marked already goes on where it was. Returns whether it begins now.

    Waits until no other run works on this kind: what it is about to write would pass for new.
    """
    if kind in ledger.regenerating():
        return False
    with claimed(ledger, kind, [EVERY], run_id):
        if kind in ledger.regenerating():  # another began while this one waited
            return False
        ledger.supersede_files(kind, _BEGUN)
        resume(ledger, provenance, kind)
    return True


def resume(ledger: Ledger, provenance: Path, kind: str) -> bool:
    """Whether this kind is being regenerated; a beginning that was killed is completed first."""
    state = ledger.regenerating().get(kind)
    if state == _BEGUN:
        forget_identity(provenance, kind)
        ledger.note_regeneration(kind, _UNDER_WAY)
    return state is not None


def finish(ledger: Ledger, store: NpyStore, present: Iterable[str]) -> list[str]:
    """End the regeneration where no old file is left.

    Args:
        present: ids whose image is there.

    Returns:
        ids of old files that cannot be replaced, because their image is gone: the mark stays until someone decides.
    """
    kind = store.spec.kind
    if kind not in ledger.regenerating():
        return []
    told = [p.item for p in ledger.problems() if p.asset == kind and p.reason == _REASON]
    rows = ledger.files(kind)
    old = {i for i, stat in store.listing().items() if (i, stat) not in rows or rows[i, stat].maker == SUPERSEDED}
    if not old:
        ledger.note_regeneration(kind, None)
    stuck = sorted(old.difference(present))
    with ledger.transaction():
        ledger.clear_problems(kind, told)
        ledger.record_problems(_irreplaceable(image_id, store) for image_id in stuck)
    return stuck


def _irreplaceable(image_id: str, store: NpyStore) -> Problem:
    folder = store.folder.name
    return Problem(
        image_id,
        store.spec.kind,
        "failed",
        _REASON,
        f"{folder}/{image_id}.npy is of the earlier model, and its image is gone",
        f"put the image back, or delete {folder}/{image_id}.npy",
    )


def refuse_regenerating(ledger: Ledger) -> None:
    """Raises ImagemillError where a kind is being regenerated: its folder holds files of two models."""
    if kinds := sorted(ledger.regenerating()):
        raise ImagemillError(
            f"{', '.join(kinds)}: being regenerated, and not every file is replaced yet",
            why="one set of shards never mixes the arrays of two models",
            do="run `imagemill stage2` again: it goes on with it; `imagemill status` names what is in the way",
        )
