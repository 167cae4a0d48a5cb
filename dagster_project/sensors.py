"""Noticing approved images: new and changed files become partitions and runs, and what depends on them follows.

Off by default. Switch it on in the UI (Automation → new_images) or with `dagster sensor start new_images`.
"""

import hashlib
import time
from collections.abc import Iterator
from contextlib import closing

import dagster as dg

from assets.partitions import IMAGES_PER_RUN, buckets, images
from dagster_project.jobs import embed_images, publish_shards
from dagster_project.partitions import range_tags, register_images
from imagemill.embedding_specs import embedding_specs
from imagemill.formats.npy import NpyStore
from imagemill.layout import DataRoot
from imagemill.ledger import Ledger
from imagemill.pipeline.plan import plan_for
from imagemill.pipeline.ranges import plan_ranges
from imagemill.pipeline.scan import Scan, survey
from resources.data_root import DataRootResource

# A file is taken once neither its content nor its name has changed for this long: it may still be being written.
STILL_SECONDS = 10.0
# A tick that names more images than this leaves the rest to the next one.
IMAGES_PER_TICK = 20_000

SENSOR_TAG = "imagemill/sensor"
_UNDER_WAY = [
    dg.DagsterRunStatus.QUEUED, dg.DagsterRunStatus.NOT_STARTED, dg.DagsterRunStatus.STARTING,
    dg.DagsterRunStatus.STARTED, dg.DagsterRunStatus.CANCELING,
]  # fmt: skip


@dg.sensor(
    jobs=[embed_images, publish_shards],
    minimum_interval_seconds=30,
    default_status=dg.DefaultSensorStatus.STOPPED,
    description="New or changed images and captions, still for ten seconds, become runs; records and shards follow.",
)
def new_images(
    context: dg.SensorEvaluationContext, data_root: DataRootResource
) -> Iterator[dg.RunRequest | dg.SkipReason]:
    """One tick: finish what the last embedding run began, else embed what is new.

    The cursor holds the embedding run whose records and shards were requested last.
    """
    embedding = _latest_run(context.instance)
    if embedding and embedding.status in _UNDER_WAY:
        yield dg.SkipReason(f"run {embedding.run_id} is embedding images")
    elif embedding and embedding.run_id != context.cursor:
        context.update_cursor(embedding.run_id)
        yield _publish(embedding.run_id)
    else:
        yield from _embed(context, data_root.root(), data_root)


def _latest_run(instance: dg.DagsterInstance) -> dg.DagsterRun | None:
    """The newest embedding run that this sensor asked for."""
    runs = instance.get_runs(dg.RunsFilter(job_name=embed_images.name, tags={SENSOR_TAG: new_images.name}), limit=1)
    return runs[0] if runs else None


def _publish(run_id: str) -> dg.RunRequest:
    keys = buckets.get_partition_keys()
    return dg.RunRequest(job_name=publish_shards.name, run_key=f"publish {run_id}", tags=range_tags(keys[0], keys[-1]))


def _embed(
    context: dg.SensorEvaluationContext, root: DataRoot, data_root: DataRootResource
) -> Iterator[dg.RunRequest | dg.SkipReason]:
    with closing(data_root.ledger()) as ledger:
        scan = survey(root.approved, ledger)
        wanted = still_images(images_with_work(root, scan, ledger), scan, time.time_ns())[:IMAGES_PER_TICK]
        vanished = len(ledger.sources().keys() - scan.sources.keys())
    if vanished:
        context.log.warning(f"{vanished} images are no longer in {root.approved}; what was made from them is kept")
    if not wanted:
        yield dg.SkipReason(f"nothing new among {scan.seen} images")
        return
    register_images(context.instance, wanted, scan)
    for part in plan_ranges(context.instance.get_dynamic_partitions(images.name or ""), wanted, IMAGES_PER_RUN):
        yield dg.RunRequest(
            job_name=embed_images.name,
            run_key=_run_key(part.first, part.last, wanted, scan),
            tags={**range_tags(part.first, part.last), SENSOR_TAG: new_images.name},
        )


def images_with_work(root: DataRoot, scan: Scan, ledger: Ledger) -> list[str]:
    """Images that lack a file of any kind, or have an invalid or stale one, in name order."""
    wanted: set[str] = set()
    for spec in embedding_specs():
        listing = NpyStore(root.derived / spec.folder, spec).listing()
        wanted.update(job.image_id for job in plan_for(spec, list(scan.sources), scan, ledger, listing).jobs)
    return [image_id for image_id in scan.sources if image_id in wanted]


def still_images(ids: list[str], scan: Scan, now_ns: int) -> list[str]:
    """Those whose image and caption have not changed for `STILL_SECONDS`."""
    return [i for i in ids if now_ns - scan.sources[i].changed_ns >= STILL_SECONDS * 1e9]


def _run_key(first: str, last: str, wanted: list[str], scan: Scan) -> str:
    """Names these images in this state: the same failure is not tried at every tick, a new change is."""
    state = "\n".join(f"{i} {scan.sources[i].stat} {scan.sources[i].caption}" for i in wanted if first <= i <= last)
    return f"{first} … {last} {hashlib.sha256(state.encode()).hexdigest()[:12]}"
