"""Forecast of the disk space and the files of a job, from the real sizes of its images, and comparison with what is free.

    jobs ──headers──> sizes ──shape rules──> bytes per kind, folder and image ──by device──> enough, or NotEnoughSpace

A disk that fills up nevertheless is reported by the code that writes.

Spec: docs/spec/stage2.md#disk-forecast
"""

import heapq
import itertools
import math
import os
import sys
from array import array
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
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
from imagemill.pipeline.header_sizes import HeaderSizes
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
    """Space on the disk of `folder` that one kind of output takes for `count` images.

    Attributes:
        size: bytes of the images.
        besides: bytes for all images together.
        files: files, which a file system may have no room for while bytes are free.
    """

    kind: str
    folder: Path
    count: int
    size: int
    besides: int = 0
    files: int = 0

    @property
    def bytes(self) -> int:
        """Total bytes."""
        return self.size + self.besides


def check_space(
    jobs: Jobs,
    approved: Folder,
    derived: Path,
    *,
    state: Path,
    shards: Path | None = None,
    sizes: Sizes | None = None,
) -> list[Need]:
    """Compare the bytes and files that these jobs will make with what is free; write nothing.

    Opens headers of images that were never read before.

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
    expected = Forecast(derived, state=state, shards=shards)
    expected.add(jobs, measure_sizes(jobs, approved) if sizes is None else sizes)
    expected.require_space()
    return expected.needs()


# ---- space needed


def on_disk(size: int, block: int) -> int:
    """Return the bytes that a file of this size occupies on a file system with this block size."""
    return -(-size // block) * block


def npy_bytes(spec: EmbeddingSpec, height: int, width: int) -> int:
    """Return the length of the npy file of one image; height and width in pixels, after orientation."""
    shape, dtype = spec.layout(height, width)
    return len(npy_header(shape, dtype)) + math.prod(shape) * dtype.itemsize


def measure_sizes(jobs: Jobs, approved: Folder, *, known: HeaderSizes | None = None, threads: int = 4) -> Sizes:
    """Return upright sizes: as last read if unchanged, else from the image's header. (0, 0) if the image is gone.

    Photographs in object storage that were not read yet count as `TYPICAL_SIZE`.

    `known`: sizes of the listing that the jobs are of, which are not read again; those that are read here are added.
    """
    known = HeaderSizes() if known is None else known
    by_id = {job.image_id: job for planned in jobs.values() for job in planned}
    sizes = {i: (job.facts.height, job.facts.width) if job.facts else (0, 0) for i, job in by_id.items()}
    unread = {job.image_id: job.file_name for job in by_id.values() if not job.facts and job.stat}
    if not isinstance(approved, Path):
        # A header would be a request of its own, as dear as the photograph.
        return sizes | dict.fromkeys(unread, TYPICAL_SIZE)
    found = dict(known.of(unread))
    left = [image_id for image_id in unread if image_id not in found]
    with ThreadPoolExecutor(threads, "header") as pool:
        read = map_on(pool, lambda image_id: size_or_none(approved, unread[image_id]), left)
        found.update(new := dict(zip(left, read, strict=True)))
    known.add(new)
    return {image_id: size for image_id, size in (sizes | found).items() if size}


def with_sizes(jobs: Iterable[Job], sizes: Sizes) -> list[Job]:
    """Return the jobs, with the sizes of images without facts, so that their headers are not read again."""
    return [job if job.facts or not job.stat else replace(job, size=sizes.get(job.image_id)) for job in jobs]


def work_of(spec: EmbeddingSpec, jobs: Sequence[Job], sizes: Sizes) -> dict[str, int]:
    """Return the amount of work of each job: pixels the model computes, or the estimated length of its caption in tokens.

    Progress is measured in it. An image that cannot be decoded counts as one pixel.
    """
    if spec.source == "caption":
        # A token of English text is four characters; a caption is computed at the next multiple of 8 tokens.
        most = mask_length([spec])
        return {job.image_id: min(most, on_disk(len(job.caption or "") // 4 + 1, 8)) for job in jobs}
    return {job.image_id: max(1, spec.pixels_computed(*sizes.get(job.image_id, (1, 1)))) for job in jobs}


class Forecast:
    """The additional space that jobs take. They are added in parts, none of which is kept.

    Args:
        derived: folder of embeddings and records.
        state: folder of ledger and history.
        shards: folder of shards, if the tars of these images count too.
    """

    def __init__(self, derived: Path, *, state: Path, shards: Path | None = None) -> None:
        self._derived, self._state, self._shards = derived, state, shards
        self._needs: dict[str, Need] = {}
        # By device, the bytes of each image, in the order in which the images were added.
        self._of_images: dict[int, array[int]] = {}
        # By kind, sizes in bytes of the largest files that are replaced.
        self._replaced: dict[str, list[int]] = {}
        self._vectors, self._touched = 0, set[str]()

    def add(self, jobs: Jobs, sizes: Sizes) -> None:
        """Add the jobs of some images, whose ids sort after those of earlier calls."""
        records = {
            job.image_id: RECORD_BYTES + len((job.caption or "").encode()) + 2 * len(job.file_name.encode())
            for planned in jobs.values() for job in planned if job.image_id in sizes
        }  # fmt: skip
        parts = [(spec.kind, self._derived / spec.folder, self._npy(spec, of, sizes)) for spec, of in jobs.items()]
        vectors = {job.image_id: job.inline.length for planned in jobs.values() for job in planned if job.inline}
        self._vectors += sum(vectors.values())
        parts.append(("records", self._derived, records))
        looked_at = Counter(job.image_id for planned in jobs.values() for job in planned)
        history = {image_id: count * HISTORY_BYTES for image_id, count in looked_at.items()}
        parts.append(("history entries", self._state, history))
        if self._shards is not None:
            parts.append(("shards", self._shards, self._samples(list(jobs), records, sizes)))
        files = {
            spec.kind: sum(job.image_id in sizes and not job.present and not job.linkable for job in of)
            for spec, of in jobs.items()
        }
        devices: dict[int, list[Mapping[str, int]]] = {}
        for kind, folder, items in parts:
            before = self._needs.get(kind, Need(kind, folder, 0, 0))
            self._needs[kind] = replace(
                before,
                count=before.count + len(items),
                size=before.size + sum(items.values()),
                files=before.files + files.get(kind, 0),
            )
            devices.setdefault(_device(folder), []).append(items)
        for device, together in devices.items():
            ids = sorted(set[str]().union(*together))
            totals = (sum(items.get(image_id, 0) for items in together) for image_id in ids)
            self._of_images.setdefault(device, array("q")).extend(totals)

    def _npy(self, spec: EmbeddingSpec, jobs: Sequence[Job], sizes: Sizes) -> dict[str, int]:
        """Return the bytes of each image's file. A replaced file counts by the increase in size."""
        block, items, replaced = block_size(self._derived / spec.folder), {}, self._replaced.get(spec.kind, [])
        for job in jobs:
            if job.image_id in sizes:
                # A link takes no space. On a file system without hard links, it is a copy.
                new = 0 if job.linkable else on_disk(npy_bytes(spec, *sizes[job.image_id]), block)
                old = on_disk(signature_bytes(job.present), block) if job.present else 0
                items[job.image_id] = max(0, new - old)
                replaced.append(min(new, old))
        self._replaced[spec.kind] = heapq.nlargest(SIDE_BY_SIDE, replaced)
        return items

    def _samples(self, specs: Sequence[EmbeddingSpec], records: Mapping[str, int], sizes: Sizes) -> dict[str, int]:
        """Return the bytes of each image's sample."""
        self._touched |= {assign_bucket(width, height) for height, width in sizes.values() if height}
        in_force = {spec: spec for spec in specs}
        packed = [in_force.get(spec, spec) for spec in embedding_specs()]
        return {i: _sample_bytes(i, records[i], packed, *size) for i, size in sizes.items() if size[0]}

    def needs(self) -> list[Need]:
        """Return the need of each kind of output, largest first."""
        with_besides = (replace(need, besides=self._besides(need.kind)) for need in self._needs.values() if need.count)
        return sorted(with_besides, key=lambda need: -need.bytes)

    def _besides(self, kind: str) -> int:
        if kind == "records":
            # The merged file is written next to the old one, without the vectors that move to their own files.
            return max(0, _bytes_of(self._derived.glob("*.jsonl")) - self._vectors)
        if kind == "shards" and self._shards:
            # A new set coexists with the one it replaces, one bucket at a time.
            folders = [bucket_folder(self._shards, bucket) for bucket in self._touched]
            return max((_bytes_of(folder.glob("*.tar")) + SET_BYTES for folder in folders), default=0)
        # Some old files coexist with new ones.
        return sum(self._replaced.get(kind, ()))

    def require_space(self) -> None:
        """Raise NotEnoughSpace, with the needs, if those on one disk add up to more bytes or files than are free."""
        disks: dict[int, list[Need]] = {}
        for need in self.needs():
            disks.setdefault(_device(need.folder), []).append(need)
        for device, together in disks.items():
            needed, free = sum(need.bytes for need in together), free_bytes(together[0].folder)
            if needed > free:
                left = free - sum(need.besides for need in together)
                raise NotEnoughSpace(
                    f"this job needs about {as_size(needed)}, {as_size(free)} are free",
                    needed=needed,
                    free=free,
                    where=together[0].folder,
                    why=", ".join(f"{as_size(need.bytes)} for {need.count:,} {need.kind}" for need in together),
                    do=_remedy(together, _fitting(self._of_images.get(device, ()), left)),
                )
            files, left = sum(need.files for need in together), free_files(together[0].folder)
            if files > left:
                raise NotEnoughSpace(
                    f"this job makes {files:,} files, and the file system has room for {left:,} more",
                    needed=needed,
                    free=free,
                    where=max(together, key=lambda need: need.files).folder,
                    why=", ".join(f"{need.files:,} for {need.kind}" for need in together if need.files),
                    do="delete files there, whose number `df -i` shows, or write elsewhere with --output-base-dir",
                )


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


def _device(folder: Path) -> int:
    return nearest_existing(folder).stat().st_dev


def free_bytes(folder: Path) -> int:
    """Return the bytes an ordinary user may still write there; for a missing folder, those of its nearest existing parent."""
    disk = os.statvfs(nearest_existing(folder))
    # Some file systems have no limit and report a size of 0.
    return disk.f_bavail * disk.f_frsize if disk.f_blocks else sys.maxsize


def free_files(folder: Path) -> int:
    """Return the number of files that an ordinary user can still make there, as `free_bytes`."""
    disk = os.statvfs(nearest_existing(folder))
    # Some file systems have no limit and report a total of 0.
    return disk.f_favail if disk.f_files else sys.maxsize


def block_size(folder: Path) -> int:
    """Return the allocation unit of files there, in bytes."""
    return os.statvfs(nearest_existing(folder)).f_frsize


def _remedy(needs: Sequence[Need], count: int) -> str:
    """Return what can be done. `count`: number of images that fit."""
    only_shards = all(need.kind == "shards" for need in needs)
    elsewhere = "write shards elsewhere with --output-dir" if only_shards else "write elsewhere with --output-base-dir"
    fewer = f", or take fewer images: `imagemill stage2 --limit {count}` fits" if count and not only_shards else ""
    return f"free space there, {elsewhere}{fewer}"


def _fitting(sizes: Iterable[int], free: int) -> int:
    """Return the number of images that fit, taken in this order; rounded down to three significant digits."""
    count = sum(1 for _ in itertools.takewhile(lambda total: total <= free, itertools.accumulate(sizes)))
    unit = 10 ** max(0, len(str(count)) - 3)
    return count // unit * unit
