"""Samples in the shards as copies of npy files: a damaged file is restored from the tar that holds the recorded bytes.

Belongs here: where copies of an image's files are.
Belongs elsewhere: what a damaged file is (pipeline/stage2/damage.py), reading a member (formats/tar.py).
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
    """Every sample of these images in any tar below `output`, tombstoned ones too. Damaged indexes are skipped."""
    found: dict[str, list[StoredSample]] = defaultdict(list)
    for bucket in BUCKETS if ids else ():
        folder = bucket_folder(output, bucket)
        with suppress(ImagemillError):
            for line in read_index(folder) if (folder / INDEX).is_file() else ():
                if line.image_id in ids:
                    found[line.image_id].append(StoredSample(folder / line.shard, line.entry))
    return found


def with_copies(jobs: Iterable[Job], output: Path) -> list[Job]:
    """The jobs, those of suspect files with the samples from which these may be restored."""
    jobs = list(jobs)
    copies = find_copies(output, {job.image_id for job in jobs if job.suspect})
    if not copies:
        return jobs
    return [dataclasses.replace(job, copies=tuple(copies.get(job.image_id, ()))) for job in jobs]
