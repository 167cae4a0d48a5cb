"""The validator's front: a path in, a report out. Asset checks, the command line and training scripts all call this.

Belongs here: which rules apply to which path.
Belongs elsewhere: the rules (validation/rules.py), how a report looks (validation/findings.py).
"""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

from imagemill.errors import MissingInput, WrongUsage
from imagemill.files import fingerprint, stat_triple
from imagemill.ledger import Ledger
from imagemill.pipeline.shard_sets import read_manifest
from imagemill.validation import rules
from imagemill.validation.findings import Report, collect

KINDS: dict[str, Callable[..., rules.Findings]] = {"stage2": rules.stage2_records, "shards": rules.shard_set}


def kind_of(path: Path) -> str:
    """`shards` for a bucket folder or a tar, `stage2` for a JSONL file."""
    if path.is_dir() or path.suffix == ".tar":
        return "shards"
    if path.suffix == ".jsonl":
        return "stage2"
    raise WrongUsage(f"cannot tell what to validate {path.name} as", where=path, do=f"give --kind {'|'.join(KINDS)}")


def validate(path: Path, *, kind: str | None = None, derived: Path | None = None) -> Report:
    """Check one file or bucket folder by every rule of its kind.

    Args:
        derived: folder of the npy folders; given, files on disk are compared too.

    Raises:
        MissingInput: nothing at that path. WrongUsage: unknown kind.
    """
    if not path.exists():
        raise MissingInput("nothing to validate", where=path, do="check the path")
    kind = kind or kind_of(path)
    if kind not in KINDS:
        raise WrongUsage(f"unknown kind {kind!r}", do=f"choose from {', '.join(KINDS)}")
    if path.is_dir() != (kind == "shards") and path.suffix != ".tar":
        expected = "a bucket's folder, or a tar in it" if kind == "shards" else "a file of records"
        raise WrongUsage(f"{path.name} cannot be validated as {kind}", where=path, do=f"give {expected}")
    if kind == "shards" and path.is_file():
        path = path.parent
    return collect(str(path), kind, KINDS[kind](path, derived=derived))


def validate_shards(output: Path, derived: Path, ledger: Ledger) -> Iterator[Report]:
    """Every bucket below a shards folder. A set that is as it was at its last full check is not read again."""
    for folder in sorted(p for p in output.glob("bucket_*") if p.is_dir()):
        signature = _signature(folder)
        if ledger.verified(folder) == signature:
            manifest = read_manifest(folder) or {}
            yield Report(str(folder), "shards", checked=manifest.get("samples", 0))
            continue
        report = validate(folder, kind="shards", derived=derived)
        if report.passed:
            ledger.record_verified(folder, signature)
        yield report


def _signature(folder: Path) -> str:
    """What the file system says of every file in a folder."""
    return fingerprint(
        "\n".join(
            f"{e.name} {stat_triple(e.stat())}" for e in sorted(os.scandir(folder), key=lambda e: e.name)
        ).encode()
    )


def verify_stage2(jsonl: Path, derived: Path) -> Report:
    """Every record by every rule, and every npy it names read whole: header, shape, dtype, length, finite."""
    if not jsonl.is_file():
        raise MissingInput("no Stage 2 records", where=jsonl, do="run `imagemill stage2` first")
    return collect(str(jsonl), "stage2, files read whole", rules.stage2_records(jsonl, derived=derived))
