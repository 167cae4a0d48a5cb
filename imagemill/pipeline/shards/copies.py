"""Copies of npy files inside shards, from which a damaged file is restored.

Damaged files are detected in pipeline/stage2/damage.py; members are read in formats/tar.py.
"""

import dataclasses
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from imagemill.domain.buckets import BUCKETS
from imagemill.errors import ImagemillError
from imagemill.formats.tar import StoredSample
from imagemill.pipeline.shards.shard_sets import INDEX, bucket_folder, read_index
from imagemill.pipeline.stage2.plan import Job


def find_copies(output: Path, ids: Collection[str]) -> Mapping[str, Sequence[StoredSample]]:
    """Find the samples of these images in all tars below `output`.

    Tombstoned samples are included. Sets with a damaged index are skipped.
    """
    found: dict[str, list[StoredSample]] = defaultdict(list)
    for bucket in BUCKETS if ids else ():
        folder = bucket_folder(output, bucket)
        with suppress(ImagemillError):
            for line in read_index(folder) if (folder / INDEX).is_file() else ():
                if line.image_id in ids:
                    found[line.image_id].append(StoredSample(folder / line.shard, line.entry))
    return found


def with_copies(jobs: Iterable[Job], output: Path) -> list[Job]:
    """Return the jobs; jobs of suspect files carry the samples from which these files may be restored."""
    jobs = list(jobs)
    copies = find_copies(output, {job.image_id for job in jobs if job.suspect})
    if not copies:
        return jobs
    return [dataclasses.replace(job, copies=tuple(copies.get(job.image_id, ()))) for job in jobs]
