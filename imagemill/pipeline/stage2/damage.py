"""Files whose bytes are not those that the ledger recorded, although size, time and inode are: bit rot.

    found by packing, or by `imagemill stage2 --verify` ──> problem `damaged` in the ledger ──> the next plan takes the file
    for suspect ──> the worker keeps it (right after all), restores it from a shard, or makes it anew

Belongs here: the ledger's row about such a file.
Belongs elsewhere: finding them (validation/contents.py, formats/tar.py), copies in shards (pipeline/shards/copies.py), the
repair (embed.py).
"""

from collections.abc import Iterable, Sequence

from imagemill.embedding_specs import embedding_specs
from imagemill.store.ledger import Ledger, Problem

DAMAGED = "damaged"


def damaged_file(kind: str, image_id: str, run_id: str = "") -> Problem:
    """The problem of one npy file: it holds until the file is kept, restored or replaced."""
    return Problem(
        image_id,
        kind,
        "failed",
        DAMAGED,
        f"{file_name(kind, image_id)} does not hold the bytes that were recorded",
        "run `imagemill run`: it restores the file from the shards, or makes it again",
        run_id=run_id,
    )


def note_damage(ledger: Ledger, damaged: Sequence[tuple[str, str]]) -> str | None:
    """Record damaged files, (kind, image id), for the next run; what to print about it, None if there are none.

    Without the record no plan could tell such a file from a good one: its size and time are the recorded ones.
    """
    if not damaged:
        return None
    ledger.record_problems(damaged_file(kind, image_id) for kind, image_id in damaged)
    files = "1 damaged file" if len(damaged) == 1 else f"{len(damaged)} damaged files"
    return f"noted {files}: `imagemill run` restores from the shards, or makes again, what they held"


def file_name(kind: str, image_id: str) -> str:
    """The file's path below `derived/`."""
    folder = next((spec.folder for spec in embedding_specs() if spec.kind == kind), kind)
    return f"{folder}/{image_id}.npy"


def damaged_files(problems: Iterable[Problem]) -> frozenset[tuple[str, str]]:
    """(kind, image id) of every file that is known to be damaged."""
    kinds = {spec.kind for spec in embedding_specs()}
    return frozenset((p.asset, p.item) for p in problems if p.reason == DAMAGED and p.asset in kinds)
