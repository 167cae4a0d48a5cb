"""Replacement of every file of one kind, by another model or because the old files are no longer trusted.

    begin ──> all files superseded, recorded model forgotten ──> passes replace file by file, in any number of runs ──> end

In between, a folder contains files of both models: the kind is marked, passes distinguish old from new by the ledger, and the
kind is not packed.

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
    """Mark a kind for regeneration, or continue one that is already marked. Return whether it begins now.

    Waits until no other run works on this kind, because files written later would count as new. The caller checks beforehand
    that the model can be loaded and that there is enough space.

    Args:
        ledger: receives the mark.
        kind: the kind.
        run_id: the run that claims the kind.
        identity: of the model to use. If another model has begun the regeneration, it starts over: every file is replaced.
    """
    if _continues(ledger, kind, identity):
        return False
    with claimed(ledger, kind, [EVERY], run_id), ledger.transaction():
        if _continues(ledger, kind, identity):  # another process began while this one waited
            return False
        ledger.supersede_files(kind, _BEGUN)
        resume(ledger, kind)
    return True


def _continues(ledger: Ledger, kind: str, identity: ModelIdentity | None) -> bool:
    """Return True if the kind is marked, and its recorded model, if any, is this one."""
    recorded = read_identity(ledger, kind)
    other = identity is not None and recorded is not None and bool(differing_facts(recorded, identity))
    return kind in ledger.regenerating() and not other


def cancel(ledger: Ledger, kind: str, run_id: str) -> int:
    """Remove the mark from a kind if none of its files has been replaced yet; return how many files are valid again.

    Raises:
        WrongUsage: if the kind is not being regenerated.
        ImagemillError: if a file has been replaced.
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
    """Return True if this kind is being regenerated; complete a start that was killed first."""
    state = ledger.regenerating().get(kind)
    if state == _BEGUN:
        forget_identity(ledger, kind)
        ledger.note_regeneration(kind, _UNDER_WAY)
    return state is not None


def finish(ledger: Ledger, store: NpyStore, present: Iterable[str]) -> list[str]:
    """End the regeneration if no old file is left.

    Args:
        ledger: contains the mark, and receives problems.
        store: folder of the kind.
        present: ids of existing images.

    Returns:
        ids of old files that cannot be replaced because their image is gone; the kind stays marked until the user resolves it.
    """
    kind = store.spec.kind
    if kind not in ledger.regenerating():
        return []
    rows = ledger.files(kind)
    old = {i for i, stat in store.listing().pairs() if (i, stat) not in rows or rows[i, stat].model_key == SUPERSEDED}
    if not old:
        ledger.note_regeneration(kind, None)
    stuck = sorted(old.difference(present))
    problems = []
    for image_id in stuck:
        file = f"{store.folder.name}/{image_id}.npy"
        detail, remedy = (
            f"{file} was made by the earlier model, and its image no longer exists",
            f"restore the image, or delete {file}",
        )
        problems.append(Problem(image_id, kind, "failed", _REASON, detail, remedy))
    ledger.replace_problems(kind, problems, lambda problem: problem.reason == _REASON)
    return stuck


def refuse_regenerating(ledger: Ledger) -> None:
    """Raise ImagemillError if a kind is being regenerated: its folder contains files of two models."""
    if kinds := sorted(ledger.regenerating()):
        raise ImagemillError(
            f"{', '.join(kinds)}: being regenerated, and not every file is replaced yet",
            why="one set of shards never mixes the arrays of two models",
            do="run `imagemill stage2` again: this continues the regeneration; `imagemill status` lists what blocks it",
        )
