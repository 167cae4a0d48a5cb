"""How much disk a job will take, from the real sizes of its images, and whether that much is free.

    jobs ──headers──> sizes ──shape rules──> bytes per kind, folder and image ──by device──> enough, or NotEnoughSpace

Belongs here: what every output of a run takes on disk, and the comparison before anything is made.
Belongs elsewhere: a disk that fills all the same (whoever writes meets the disk's own error).
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

import numpy as np

from imagemill.domain.buckets import assign_bucket
from imagemill.domain.embedding_specs import T5_TOKENS, EmbeddingSpec, embedding_specs
from imagemill.domain.ids import member_key
from imagemill.errors import NotEnoughSpace
from imagemill.formats.npy import npy_header
from imagemill.formats.tar import BLOCK
from imagemill.fs.fingerprints import signature_bytes
from imagemill.pipeline.shards.shard_sets import JSON_MEMBER, MASK_MEMBER, bucket_folder
from imagemill.pipeline.stage2.image_metadata import size_or_none
from imagemill.pipeline.stage2.plan import Job
from imagemill.text.units import as_size

# A record without its caption and names; what ledger and Dagster history keep of one image and kind (7,100 bytes measured);
# a line of a shard index; what a set of shards has besides its samples.
RECORD_BYTES = 360
HISTORY_BYTES = 7_500
INDEX_BYTES = 160
SET_BYTES = 64_000

# Replaced files stand beside their successors until their batch is published.
SIDE_BY_SIDE = 256

# Upright (height, width) in pixels by image id. An image that does not open is not in it, and takes nothing.
Sizes = Mapping[str, tuple[int, int]]
Jobs = Mapping[EmbeddingSpec, Sequence[Job]]


@dataclass(frozen=True, slots=True)
class Need:
    """What one kind of output adds to the disk that holds `folder`: `items`, bytes by image id; `besides`, in any case."""

    kind: str
    folder: Path
    items: Mapping[str, int]
    besides: int = 0

    @property
    def bytes(self) -> int:
        return sum(self.items.values()) + self.besides


def check_space(
    jobs: Jobs,
    approved: Path,
    derived: Path,
    *,
    state: Path,
    shards: Path | None = None,
    sizes: Sizes | None = None,
    threads: int = 4,
) -> list[Need]:
    """Compare what these jobs will write with what is free. Opens headers of images that were never read; writes nothing.

    Args:
        jobs: what each kind has to look at. state: folder of ledger and history. shards: where this command packs too.
        sizes: of these images, if they have been measured.

    Returns:
        the forecast, largest need first.

    Raises:
        NotEnoughSpace: with the forecast, and how many images would fit.
    """
    sizes = measure_sizes(jobs, approved, threads=threads) if sizes is None else sizes
    needs = forecast(jobs, sizes, derived, state=state, shards=shards)
    require_space(needs)
    return needs


# ---- what it takes


def on_disk(size: int, block: int) -> int:
    """Bytes that a file of this size occupies on a file system of this block size."""
    return -(-size // block) * block


def npy_bytes(spec: EmbeddingSpec, height: int, width: int) -> int:
    """Length of the npy file of one image; height and width in pixels, after orientation."""
    shape = spec.shape(height, width)
    return len(npy_header(shape, spec.dtype)) + math.prod(shape) * np.dtype(spec.dtype).itemsize


def measure_sizes(jobs: Jobs, approved: Path, *, threads: int = 4) -> Sizes:
    """Upright sizes: as last read where that still holds, else by the image's header. (0, 0) where the image is gone."""
    by_id = {job.image_id: job for planned in jobs.values() for job in planned}
    sizes = {i: (job.facts.height, job.facts.width) if job.facts else (0, 0) for i, job in by_id.items()}
    unread = [job for job in by_id.values() if not job.facts and job.stat]
    with ThreadPoolExecutor(threads, "header") as pool:
        found = pool.map(lambda job: size_or_none(approved / job.file_name), unread)
        read = {job.image_id: size for job, size in zip(unread, found, strict=True)}
    return {image_id: size for image_id, size in (sizes | read).items() if size}


def work_of(spec: EmbeddingSpec, jobs: Sequence[Job], sizes: Sizes) -> dict[str, int]:
    """Return the amount of work of each job: pixels that the model computes, or the estimated length of its caption in tokens.

    Progress is measured by it. An image that does not open counts as one pixel.
    """
    if spec.source == "caption":
        return {job.image_id: _estimated_tokens(job.caption or "") for job in jobs}
    return {job.image_id: max(1, spec.pixels_computed(*sizes.get(job.image_id, (1, 1)))) for job in jobs}


def _estimated_tokens(caption: str) -> int:
    # A token of English text is four characters; a caption is computed at the next multiple of 8 tokens.
    return min(T5_TOKENS, on_disk(len(caption) // 4 + 1, 8))


def forecast(jobs: Jobs, sizes: Sizes, derived: Path, *, state: Path, shards: Path | None = None) -> list[Need]:
    """What each kind of output will add, largest first; with `shards`, the tars of these images too."""
    records = {
        job.image_id: RECORD_BYTES + len((job.caption or "").encode()) + 2 * len(job.file_name.encode())
        for planned in jobs.values() for job in planned if job.image_id in sizes
    }  # fmt: skip
    needs = [_npy_need(spec, planned, sizes, derived / spec.folder) for spec, planned in jobs.items()]
    # The merged file is written beside the old one, without the vectors that go into files of their own.
    vectors = {job.image_id: job.inline.length for planned in jobs.values() for job in planned if job.inline}
    kept = max(0, _bytes_of(derived.glob("*.jsonl")) - sum(vectors.values()))
    needs.append(Need("records", derived, records, kept))
    looked_at = Counter(job.image_id for planned in jobs.values() for job in planned)
    needs.append(Need("history entries", state, {i: count * HISTORY_BYTES for i, count in looked_at.items()}))
    if shards is not None:
        needs.append(_shard_need(records, sizes, shards))
    return sorted((need for need in needs if need.items), key=lambda need: -need.bytes)


def _npy_need(spec: EmbeddingSpec, jobs: Sequence[Job], sizes: Sizes, folder: Path) -> Need:
    """A file that is replaced counts by what its successor has more; some stand side by side."""
    block, items, replaced = block_size(folder), {}, []
    for job in jobs:
        if job.image_id in sizes:
            new = on_disk(npy_bytes(spec, *sizes[job.image_id]), block)
            old = on_disk(signature_bytes(job.present), block) if job.present else 0
            items[job.image_id] = max(0, new - old)
            replaced.append(min(new, old))
    return Need(spec.kind, folder, items, sum(heapq.nlargest(SIDE_BY_SIDE, replaced)))


def _shard_need(records: Mapping[str, int], sizes: Sizes, output: Path) -> Need:
    """Every sample of these images. A set is written beside the one it replaces, bucket after bucket."""
    touched = {assign_bucket(width, height) for height, width in sizes.values() if height}
    besides = [_bytes_of(bucket_folder(output, bucket).glob("*.tar")) + SET_BYTES for bucket in touched]
    items = {i: _sample_bytes(i, records[i], *size) for i, size in sizes.items() if size[0]}
    return Need("shards", output, items, max(besides, default=0))


def _sample_bytes(image_id: str, record: int, height: int, width: int) -> int:
    """One sample in a tar, with its line of the index: every member has a header and is padded to whole blocks."""
    members = {JSON_MEMBER: record, MASK_MEMBER: T5_TOKENS + 2 * BLOCK}
    members |= {spec.member: npy_bytes(spec, height, width) for spec in embedding_specs()}
    key = member_key(image_id)
    long = not key.isascii() or max(len(f"{key}.{member}") for member in members) > 100
    headers = len(members) * (3 if long else 1) * BLOCK  # a long name has a header of its own, and a block for itself
    return headers + sum(on_disk(size, BLOCK) for size in members.values()) + INDEX_BYTES + 2 * len(key)


def _bytes_of(paths: Iterable[Path]) -> int:
    return sum(path.stat().st_size for path in paths)


# ---- whether it is there


def require_space(needs: Iterable[Need]) -> None:
    """Raises NotEnoughSpace where the needs of one disk add up to more than it has free."""
    disks: dict[int, list[Need]] = {}
    for need in needs:
        disks.setdefault(_nearest(need.folder).stat().st_dev, []).append(need)
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
    """What an ordinary user may still write there; a folder that is not there counts by its nearest parent that is."""
    disk = os.statvfs(_nearest(folder))
    # Some file systems know no limit, and say so with a size of 0.
    return disk.f_bavail * disk.f_frsize if disk.f_blocks else sys.maxsize


def block_size(folder: Path) -> int:
    """Bytes by which files grow there."""
    return os.statvfs(_nearest(folder)).f_frsize


def _nearest(folder: Path) -> Path:
    """The folder, or its nearest parent that is there."""
    absolute = Path(os.path.abspath(folder))
    return next(path for path in (absolute, *absolute.parents) if path.exists())


def _remedy(needs: Sequence[Need], free: int) -> str:
    only_shards = all(need.kind == "shards" for need in needs)
    elsewhere = "write shards elsewhere with --output-dir" if only_shards else "write elsewhere with --output-base-dir"
    count = _fitting(needs, free)
    fewer = f", or take fewer images: `imagemill stage2 --limit {count}` fits" if count and not only_shards else ""
    return f"free space there, {elsewhere}{fewer}"


def _fitting(needs: Sequence[Need], free: int) -> int:
    """How many images fit, taken in name order; rounded down to three figures."""
    left = free - sum(need.besides for need in needs)
    ids = sorted({image_id for need in needs for image_id in need.items})
    totals = itertools.accumulate(sum(need.items.get(i, 0) for need in needs) for i in ids)
    count = sum(1 for _ in itertools.takewhile(lambda total: total <= left, totals))
    unit = 10 ** max(0, len(str(count)) - 3)
    return count // unit * unit
