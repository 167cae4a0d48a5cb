"""Packing with the UI's configuration in the test's own process, and the resulting files."""

import json
from pathlib import Path

from assets.bucket_shards import bucket_shards
from imagemill.domain.buckets import BUCKETS
from imagemill.domain.embedding_specs import embedding_specs
from imagemill.domain.layout import DataRoot
from imagemill.formats.tar import read_shard
from imagemill.fs.fingerprints import posix_signature
from imagemill.pipeline.shards.readiness import ReadySample
from imagemill.pipeline.shards.shard_plan import plan_shards
from imagemill.pipeline.shards.shard_sets import ShardParameters
from imagemill.store.ledger import FileRow, Ledger
from imagemill.store.second_copy import NAME
from tests.helpers.wiring import history, materialize

SQUARE, TALL = "1024x1024", "832x1216"


def packed_here(root, *chosen, **config):
    """Run the asset over a range of buckets (by default all seven) with this run configuration."""
    chosen = chosen or BUCKETS
    with history() as instance:
        return materialize(
            root, instance, bucket_shards, keys=[chosen[0], chosen[-1]], deferred=True, bucket_shards=config
        )


def counted(root, result):
    """The counters of a run's scan."""
    with Ledger(root.ledger) as ledger:
        return ledger.counts([result.run_id])["bucket_shards"]


def tars(place, bucket):
    """The tars of a bucket below a data root or an output folder."""
    output = place.shards if isinstance(place, DataRoot) else place
    return sorted((output / f"bucket_{bucket}").glob("*.tar"))


def bucket_folders(output):
    """Return the names of the sets below a folder of shards, without the files about all sets."""
    return sorted(path.name for path in output.iterdir() if path.is_dir())


def ids_packed(place, bucket):
    """Ids tar by tar, from the json members."""
    return [[json.loads(members["json"])["image_id"] for _, members in read_shard(tar)] for tar in tars(place, bucket)]


def written(output):
    """Return every file below a folder of shards except the second copy of the settings: relative path → bytes."""
    files = (path for path in output.rglob("*") if path.is_file() and path.name != NAME)
    return {str(path.relative_to(output)): path.read_bytes() for path in files}


def planned_values(count, bucket=SQUARE, *, offset=0):
    """Ready samples as values, without files."""
    ids = [f"{bucket}-{offset + n:05d}" for n in range(count)]
    files = {
        i: tuple(FileRow(s.kind, i, posix_signature(1, 2, 3), "s", "c", "m") for s in embedding_specs()) for i in ids
    }
    return [ReadySample(i, bucket, i.encode(), (1,), files[i]) for i in ids]


def sizes_planned(samples, *buckets, **parameters):
    """Samples per tar, bucket after bucket."""
    shard_set = plan_shards(samples, buckets, Path("shards"), ShardParameters(**parameters))
    return [len(shard) for plan in shard_set.plans for shard in plan.shards]
