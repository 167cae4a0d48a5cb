"""Replacing every file of one kind, by another model or because nobody trusts the old ones.

    begin ──> all files superseded, recorded model forgotten ──> passes replace file by file, in any number of runs ──> end

Between the two a folder holds files of both models: the kind is marked, passes know old from new by the ledger, nothing packs it.
Spec: docs/spec/conventions.md#provenance
"""

from collections.abc import Iterable

from imagemill.errors import ImagemillError, WrongUsage
from imagemill.formats.npy import NpyStore
from imagemill.pipeline.leases import claimed
from imagemill.store.ledger import EVERY, SUPERSEDED, Ledger, Problem
from imagemill.store.provenance import ModelIdentity, differing_facts, forget_identity, read_identity, recall_identity

_BEGUN, _UNDER_WAY = "begun", "under way"
_REASON = "cannot_regenerate"


def regenerate(ledger: Ledger, kind: str, run_id: str, identity: ModelIdentity | None = None) -> bool:
    """Mark a kind; one that is marked already continues where it was. Return whether it begins now.

    Waits until no other run works on this kind: what it is about to write would pass for new. Whether the work can begin (the
    model, the space) is checked before.

    Args:
        identity: of the model to use. A regeneration that another model has begun begins again: every file is replaced.
    """
    if _continues(ledger, kind, identity):
        return False
    with claimed(ledger, kind, [EVERY], run_id), ledger.transaction():
        if _continues(ledger, kind, identity):  # another began while this one waited
            return False
        ledger.supersede_files(kind, _BEGUN)
        resume(ledger, kind)
    return True


def _continues(ledger: Ledger, kind: str, identity: ModelIdentity | None) -> bool:
    """Whether the kind is marked, and for this model or for one that is not recorded yet."""
    recorded = read_identity(ledger, kind)
    other = identity is not None and recorded is not None and bool(differing_facts(recorded, identity))
    return kind in ledger.regenerating() and not other


def cancel(ledger: Ledger, kind: str, run_id: str) -> int:
    """Take the mark off a kind of which no file has been replaced yet; return how many files count again.

    Raises:
        WrongUsage: if the kind is not being regenerated. ImagemillError: if a file has been replaced.
    """
    with claimed(ledger, kind, [EVERY], run_id), ledger.transaction():
        if kind not in ledger.regenerating():
            raise WrongUsage(f"{kind} is not being regenerated", do="`imagemill status` lists the kinds that are")
        restored = ledger.restore_superseded(kind)
        if restored is None:
            raise ImagemillError(
                f"{kind}: files have been replaced already, or their earlier model is not recorded: it cannot be cancelled",
                why="the folder may contain files of two models",
                do="run `imagemill stage2` again, which completes it; to go back, configure the earlier model and "
                f"regenerate {kind} once more",
            )
        recall_identity(ledger, kind)
    return restored


def resume(ledger: Ledger, kind: str) -> bool:
    """Whether this kind is being regenerated; a beginning that was killed is completed first."""
    state = ledger.regenerating().get(kind)
    if state == _BEGUN:
        forget_identity(ledger, kind)
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
    rows = ledger.files(kind)
    old = {i for i, stat in store.listing().items() if (i, stat) not in rows or rows[i, stat].maker == SUPERSEDED}
    if not old:
        ledger.note_regeneration(kind, None)
    stuck = sorted(old.difference(present))
    files = {image_id: f"{store.folder.name}/{image_id}.npy" for image_id in stuck}
    problems = (
        Problem(
            image_id,
            kind,
            "failed",
            _REASON,
            f"{file} is of the earlier model, and its image is gone",
            f"put the image back, or delete {file}",
        )
        for image_id, file in files.items()
    )
    ledger.replace_problems(kind, problems, lambda problem: problem.reason == _REASON)
    return stuck


def refuse_regenerating(ledger: Ledger) -> None:
    """Raises ImagemillError where a kind is being regenerated: its folder holds files of two models."""
    if kinds := sorted(ledger.regenerating()):
        raise ImagemillError(
            f"{', '.join(kinds)}: being regenerated, and not every file is replaced yet",
            why="one set of shards never mixes the arrays of two models",
            do="run `imagemill stage2` again: it goes on with it; `imagemill status` names what is in the way",
        )
