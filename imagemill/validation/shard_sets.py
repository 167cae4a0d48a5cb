"""All sets below a shards folder, each read again only when one of its files changed since its last full check.

Belongs here: which sets need a full check.
Belongs elsewhere: the check (shards.py), the memory of it (imagemill/ledger.py).
Source: CONTRACTS section 0, "not read again"; section 4.
"""

import os
from collections.abc import Iterator
from pathlib import Path

from imagemill.files import fingerprint, stat_triple
from imagemill.ledger import Ledger
from imagemill.pipeline.shards.shard_sets import read_manifest
from imagemill.validation.findings import Report
from imagemill.validation.validator import validate


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
