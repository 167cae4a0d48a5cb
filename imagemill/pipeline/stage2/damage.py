"""Bit rot: npy files with other bytes than the ledger recorded, but the recorded size, time and inode.

    packing, or `imagemill stage2 --verify`, finds the file
      └──> problem `damaged` in the ledger
             └──> the next plan marks the job as suspect
                    └──> the worker keeps the file if its bytes are right, restores it from a shard, or makes it again

Detection is in validation/contents.py and formats/tar.py, shard copies in pipeline/shards/copies.py, the repair in embed.py.
"""

from collections.abc import Iterable, Sequence

from imagemill.domain.embedding_specs import embedding_specs
from imagemill.store.ledger import Ledger, Problem

DAMAGED = "damaged"


def damaged_file(kind: str, image_id: str, run_id: str = "") -> Problem:
    """Return the problem of one npy file; it holds until the file is kept, restored or replaced."""
    return Problem(
        image_id,
        kind,
        "failed",
        DAMAGED,
        f"{file_name(kind, image_id)} does not contain the recorded bytes",
        "run `imagemill run`: it restores the file from the shards or recomputes it",
        run_id=run_id,
    )


def note_damage(ledger: Ledger, damaged: Sequence[tuple[str, str]]) -> str | None:
    """Record damaged files, given as (kind, image id), for the next run.

    Without the record a plan cannot distinguish such a file from a good one, because its size and time are the recorded ones.

    Returns:
        the message for the user; None if `damaged` is empty.
    """
    if not damaged:
        return None
    ledger.record_problems(damaged_file(kind, image_id) for kind, image_id in damaged)
    files = "1 damaged file" if len(damaged) == 1 else f"{len(damaged)} damaged files"
    return f"noted {files}: `imagemill run` restores from the shards, or makes again, what they held"


def file_name(kind: str, image_id: str) -> str:
    """Return the file's path below `derived/`."""
    folder = next((spec.folder for spec in embedding_specs() if spec.kind == kind), kind)
    return f"{folder}/{image_id}.npy"


def damaged_files(problems: Iterable[Problem]) -> frozenset[tuple[str, str]]:
    """Return (kind, image id) of every file that is known to be damaged."""
    kinds = {spec.kind for spec in embedding_specs()}
    return frozenset((p.asset, p.item) for p in problems if p.reason == DAMAGED and p.asset in kinds)
