"""Comparison of records with shards: every ready record is live exactly once, in its own bucket.

A kill between the exchanges of two buckets' folders leaves each set complete, but an image in both or in neither.

What is ready is decided in pipeline/shards/readiness.py; single sets are checked in shards.py.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from imagemill.domain.buckets import BUCKETS
from imagemill.errors import ImagemillError
from imagemill.pipeline.shards.readiness import ReadySample, find_ready
from imagemill.pipeline.shards.shard_sets import MANIFEST, bucket_folder, live_lines, load_manifest
from imagemill.store.ledger import Ledger
from imagemill.validation.catalogue import finding
from imagemill.validation.findings import Finding
from imagemill.validation.lines import Findings


@dataclass(slots=True)
class _Sets:
    """The sets below a shards folder.

    Attributes:
        buckets: image id → buckets in which it is live.
        present: buckets that have a set.
        limited: buckets whose set was packed with a limit.
        damaged: buckets whose set cannot be read, which the check of the set itself reports.
    """

    buckets: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    present: set[str] = field(default_factory=set)
    limited: set[str] = field(default_factory=set)
    damaged: set[str] = field(default_factory=set)


def shard_coverage(
    jsonl: Path, derived: Path, output: Path, ledger: Ledger, *, excluded: Mapping[str, str] | None = None
) -> Findings:
    """Compare the ready records with all sets below `output`; yield nothing if there are no sets.

    Args:
        jsonl: the Stage 2 record file.
        derived: parent of the npy folders.
        output: parent of the bucket folders.
        ledger: the ledger.
        excluded: ids that shards leave out as near duplicates.
    """
    sets = _read_sets(output)
    if not sets.present or not jsonl.is_file():
        return
    for image_id, buckets in sets.buckets.items():
        if len(buckets) > 1:
            yield finding(
                "live_twice", f"live in {' and '.join(map(_folder, buckets))}", file=output.name, item=image_id
            )
    growing = not ledger.regenerating()  # nothing is packed while a kind is regenerated
    for sample in find_ready(jsonl, derived, ledger, buckets=BUCKETS, excluded=excluded).ready:
        yield 1
        yield from _placed(sample, sets, output.name, growing=growing)


def _placed(sample: ReadySample, sets: _Sets, file: str, *, growing: bool) -> Iterator[Finding]:
    found = sets.buckets.get(sample.image_id, [])
    # It may be absent because of a limit, or be in a set that cannot be read.
    limited = sample.bucket in sets.limited or (sample.bucket not in sets.present and bool(sets.limited))
    if not found and growing and not (limited or sets.damaged):
        yield finding(
            "unpacked", f"ready for {_folder(sample.bucket)} but in no shard", file=file, item=sample.image_id
        )
    for bucket in found:
        if bucket != sample.bucket:
            message = f"live in {_folder(bucket)} but its record has {sample.bucket}"
            yield finding("other_bucket", message, file=file, item=sample.image_id)


def _read_sets(output: Path) -> _Sets:
    sets = _Sets()
    for bucket in BUCKETS:
        folder = bucket_folder(output, bucket)
        if not (folder / MANIFEST).exists() and not any(folder.glob("*.tar")):
            continue
        sets.present.add(bucket)
        try:
            manifest, lines = load_manifest(folder), live_lines(folder)
        except ImagemillError:
            sets.damaged.add(bucket)
            continue
        if manifest.parameters.limit is not None:
            sets.limited.add(bucket)
        for line in lines:
            sets.buckets[line.image_id].append(bucket)
    return sets


def _folder(bucket: str) -> str:
    return bucket_folder(Path(), bucket).name
