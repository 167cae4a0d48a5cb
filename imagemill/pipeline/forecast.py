"""Forecast of the disk space of a job, from the real sizes of its images, and comparison with the free space.

    jobs ──headers──> sizes ──shape rules──> bytes per kind, folder and image ──by device──> enough, or NotEnoughSpace

A disk that fills up nevertheless is reported by the code that writes.

Spec: docs/spec/stage2.md#disk-forecast
"""

import heapq
import itertools
import math
import os
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from imagemill.domain.buckets import assign_bucket
from imagemill.domain.embedding_specs import EmbeddingSpec, embedding_specs, mask_length
from imagemill.domain.ids import member_key
from imagemill.errors import NotEnoughSpace
from imagemill.formats.npy import npy_header
from imagemill.formats.tar import BLOCK
from imagemill.fs.fingerprints import signature_bytes
from imagemill.fs.folders import Folder
from imagemill.fs.listing import nearest_existing
from imagemill.pipeline.prefetch import map_on
from imagemill.pipeline.shards.shard_sets import JSON_MEMBER, MASK_MEMBER, bucket_folder
from imagemill.pipeline.stage2.image_metadata import size_or_none
from imagemill.pipeline.stage2.plan import Job
from imagemill.text.units import as_size

# Bytes per image: a record without its caption and names; ledger and Dagster history per image and kind (7,100 bytes measured);
# a line of a shard index. SET_BYTES: a set of shards besides its samples.
RECORD_BYTES = 360
HISTORY_BYTES = 7_500
INDEX_BYTES = 160
SET_BYTES = 64_000

# Replaced files coexist with their successors until their batch is published.
SIDE_BY_SIDE = 256

# Upright (height, width) in pixels by image id. An image that cannot be decoded is not included and needs no space.
Sizes = Mapping[str, tuple[int, int]]

# Height and width that are assumed for photographs in object storage until they are read.
TYPICAL_SIZE = (1024, 1024)
Jobs = Mapping[EmbeddingSpec, Sequence[Job]]


@dataclass(frozen=True, slots=True)
class Need:
    """Additional bytes of one kind of output on the disk of `folder`: `items`, by image id; `besides`, independent of images."""

    kind: str
    folder: Path
    items: Mapping[str, int]
    besides: int = 0

    @property
    def bytes(self) -> int:
        """Total bytes."""
        return sum(self.items.values()) + self.besides


def check_space(
    jobs: Jobs,
    approved: Folder,
    derived: Path,
    *,
    state: Path,
    shards: Path | None = None,
    sizes: Sizes | None = None,
) -> list[Need]:
    """Compare the bytes these jobs will write with the free space. Opens headers of images never read before; writes nothing.

    Args:
        jobs: jobs of each kind.
        approved: folder of images.
        derived: folder of embeddings and records.
        state: folder of ledger and history.
        shards: folder of shards, if this command also packs.
        sizes: of these images, if they have been measured.

    Returns:
        the forecast, largest need first.

    Raises:
        NotEnoughSpace: with the forecast, and how many images would fit.
    """
    sizes = measure_sizes(jobs, approved) if sizes is None else sizes
    needs = forecast(jobs, sizes, derived, state=state, shards=shards)
    require_space(needs)
    return needs


# ---- space needed


def on_disk(size: int, block: int) -> int:
    """Return the bytes that a file of this size occupies on a file system with this block size."""
    return -(-size // block) * block


def npy_bytes(spec: EmbeddingSpec, height: int, width: int) -> int:
    """Return the length of the npy file of one image; height and width in pixels, after orientation."""
    shape, dtype = spec.layout(height, width)
    return len(npy_header(shape, dtype)) + math.prod(shape) * dtype.itemsize


def measure_sizes(jobs: Jobs, approved: Folder, *, threads: int = 4) -> Sizes:
    """Return upright sizes: as last read if unchanged, else from the image's header. (0, 0) if the image is gone.

    Photographs in object storage that were not read yet count as `TYPICAL_SIZE`.
    """
    by_id = {job.image_id: job for planned in jobs.values() for job in planned}
    sizes = {i: (job.facts.height, job.facts.width) if job.facts else (0, 0) for i, job in by_id.items()}
    unread = {job.image_id: (job.file_name, job.stat) for job in by_id.values() if not job.facts and job.stat}
    if not isinstance(approved, Path):
        # A header would be a request of its own, as dear as the photograph.
        return sizes | dict.fromkeys(unread, TYPICAL_SIZE)
    with ThreadPoolExecutor(threads, "header") as pool:
        found = map_on(pool, lambda file: size_or_none(approved, *file), unread.values())
        read = dict(zip(unread, found, strict=True))
    return {image_id: size for image_id, size in (sizes | read).items() if size}


def work_of(spec: EmbeddingSpec, jobs: Sequence[Job], sizes: Sizes) -> dict[str, int]:
    """Return the amount of work of each job: pixels the model computes, or the estimated length of its caption in tokens.

    Progress is measured in it. An image that cannot be decoded counts as one pixel.
    """
    if spec.source == "caption":
        # A token of English text is four characters; a caption is computed at the next multiple of 8 tokens.
        most = mask_length([spec])
        return {job.image_id: min(most, on_disk(len(job.caption or "") // 4 + 1, 8)) for job in jobs}
    return {job.image_id: max(1, spec.pixels_computed(*sizes.get(job.image_id, (1, 1)))) for job in jobs}


def forecast(jobs: Jobs, sizes: Sizes, derived: Path, *, state: Path, shards: Path | None = None) -> list[Need]:
    """Return the additional space of each kind of output, largest first; with `shards`, include the tars of these images."""
    records = {
        job.image_id: RECORD_BYTES + len((job.caption or "").encode()) + 2 * len(job.file_name.encode())
        for planned in jobs.values() for job in planned if job.image_id in sizes
    }  # fmt: skip
    needs = [_npy_need(spec, planned, sizes, derived / spec.folder) for spec, planned in jobs.items()]
    # The merged file is written next to the old one, without the vectors that move to their own files.
    vectors = {job.image_id: job.inline.length for planned in jobs.values() for job in planned if job.inline}
    kept = max(0, _bytes_of(derived.glob("*.jsonl")) - sum(vectors.values()))
    needs.append(Need("records", derived, records, kept))
    looked_at = Counter(job.image_id for planned in jobs.values() for job in planned)
    needs.append(Need("history entries", state, {i: count * HISTORY_BYTES for i, count in looked_at.items()}))
    if shards is not None:
        in_force = {spec: spec for spec in jobs}
        needs.append(_shard_need(records, sizes, [in_force.get(spec, spec) for spec in embedding_specs()], shards))
    return sorted((need for need in needs if need.items), key=lambda need: -need.bytes)


def _npy_need(spec: EmbeddingSpec, jobs: Sequence[Job], sizes: Sizes, folder: Path) -> Need:
    """Return the need of one kind. A replaced file counts by the increase in size; some old files coexist with new ones."""
    block, items, replaced = block_size(folder), {}, []
    for job in jobs:
        if job.image_id in sizes:
            # A link takes no space. On a file system without hard links, it is a copy.
            new = 0 if job.linkable else on_disk(npy_bytes(spec, *sizes[job.image_id]), block)
            old = on_disk(signature_bytes(job.present), block) if job.present else 0
            items[job.image_id] = max(0, new - old)
            replaced.append(min(new, old))
    return Need(spec.kind, folder, items, sum(heapq.nlargest(SIDE_BY_SIDE, replaced)))


def _shard_need(records: Mapping[str, int], sizes: Sizes, specs: Sequence[EmbeddingSpec], output: Path) -> Need:
    """Return the need of these images' samples. A new set coexists with the one it replaces, one bucket at a time."""
    touched = {assign_bucket(width, height) for height, width in sizes.values() if height}
    besides = [_bytes_of(bucket_folder(output, bucket).glob("*.tar")) + SET_BYTES for bucket in touched]
    items = {i: _sample_bytes(i, records[i], specs, *size) for i, size in sizes.items() if size[0]}
    return Need("shards", output, items, max(besides, default=0))


def _sample_bytes(image_id: str, record: int, specs: Sequence[EmbeddingSpec], height: int, width: int) -> int:
    """Return the bytes of one sample in a tar and in the index: every member has a header and is padded to whole blocks."""
    members = {JSON_MEMBER: record, MASK_MEMBER: mask_length(specs) + 2 * BLOCK}
    # The header of each part of a file is counted once; the others are less than a block.
    members |= {spec.member: npy_bytes(spec, height, width) for spec in specs}
    members |= {member: BLOCK for spec in specs for member in spec.members[1:]}
    key = member_key(image_id)
    long = not key.isascii() or max(len(f"{key}.{member}") for member in members) > 100
    headers = len(members) * (3 if long else 1) * BLOCK  # a long name takes a header and a block of its own
    return headers + sum(on_disk(size, BLOCK) for size in members.values()) + INDEX_BYTES + 2 * len(key)


def _bytes_of(paths: Iterable[Path]) -> int:
    return sum(path.stat().st_size for path in paths)


# ---- free space


def require_space(needs: Iterable[Need]) -> None:
    """Raise NotEnoughSpace if the needs on one disk add up to more than its free space."""
    disks: dict[int, list[Need]] = {}
    for need in needs:
        disks.setdefault(nearest_existing(need.folder).stat().st_dev, []).append(need)
    for together in disks.values():
        needed, free = sum(need.bytes for need in together), free_bytes(together[0].folder)
        if needed > free:
            raise NotEnoughSpace(
                f"this job needs about {as_size(needed)}, {as_size(free)} are free",
                needed=needed,
                free=free,
                where=together[0].folder,
                why=", ".join(f"{as_size(need.bytes)} for {len(need.items):,} {need.kind}" for need in together),
                do=_remedy(together, free),
            )


def free_bytes(folder: Path) -> int:
    """Return the bytes an ordinary user may still write there; for a missing folder, those of its nearest existing parent."""
    disk = os.statvfs(nearest_existing(folder))
    # Some file systems have no limit and report a size of 0.
    return disk.f_bavail * disk.f_frsize if disk.f_blocks else sys.maxsize


def block_size(folder: Path) -> int:
    """Return the allocation unit of files there, in bytes."""
    return os.statvfs(nearest_existing(folder)).f_frsize


def _remedy(needs: Sequence[Need], free: int) -> str:
    only_shards = all(need.kind == "shards" for need in needs)
    elsewhere = "write shards elsewhere with --output-dir" if only_shards else "write elsewhere with --output-base-dir"
    count = _fitting(needs, free)
    fewer = f", or take fewer images: `imagemill stage2 --limit {count}` fits" if count and not only_shards else ""
    return f"free space there, {elsewhere}{fewer}"


def _fitting(needs: Sequence[Need], free: int) -> int:
    """Return the number of images that fit, taken in name order; rounded down to three significant digits."""
    left = free - sum(need.besides for need in needs)
    ids = sorted({image_id for need in needs for image_id in need.items})
    totals = itertools.accumulate(sum(need.items.get(i, 0) for need in needs) for i in ids)
    count = sum(1 for _ in itertools.takewhile(lambda total: total <= left, totals))
    unit = 10 ** max(0, len(str(count)) - 3)
    return count // unit * unit
