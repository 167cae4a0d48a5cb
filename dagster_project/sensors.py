"""Sensors: new approved images become partitions and runs; presets and missions become partitions.

`new_images` also requests the records and shards of finished embedding runs. It is off by default: switch it on in the UI
(Automation → new_images) or with `dagster sensor start new_images`. `configured_presets` reads `presets.yaml`, and
`found_missions` lists the missions of Stage-A.
"""

import hashlib
import time
from collections.abc import Container, Iterator, Mapping
from itertools import islice
from pathlib import Path

import dagster as dg
import msgspec

from assets.partitions import IMAGES_PER_RUN, buckets, images
from assets.presets import derived_preset, public_data, raw_dataset, rescale_preset
from assets.stage_a_groups import stage_a_groups, stage_a_ranks
from dagster_project.internals.coordinator import EMBED_JOB, EMBED_RANGE_JOB, RESUME_JOB
from dagster_project.internals.runs import runs_of_this_root, sweep
from dagster_project.jobs import embed_images, publish_shards, published
from dagster_project.partitions import register, register_missions, register_presets
from imagemill.config import Config
from imagemill.domain.embedding_specs import EmbeddingSpec, embedding_specs
from imagemill.fs.fingerprints import fingerprint
from imagemill.fs.owners import use
from imagemill.inputs.row_captions import images_below
from imagemill.inputs.scan import Scan
from imagemill.pipeline.presets.preset_config import read_presets
from imagemill.pipeline.session import Session
from imagemill.pipeline.stage2.inventory import Inventory
from imagemill.pipeline.stage2.plan import EmbeddingPlan, ids_of, plans_for
from imagemill.pipeline.stage2.ranges import KeyRange, plan_ranges
from imagemill.pipeline.stage_a.missions import missions, name_problem
from imagemill.store.ledger import ACCEPTED, FROM_METADATA, Ledger
from imagemill.store.ledger.schema import state_of_files
from resources.captioner import CaptionerResource
from resources.dagster_internals.events import is_command_line_run
from resources.dagster_internals.tags import range_tags
from resources.data_root import DataRootResource
from resources.keys import asset_key

# A file is used once neither its content nor its name has changed for this long, because it may still be being written.
STILL_SECONDS = 10.0
# Maximum number of images per tick; the rest is left to the next one.
IMAGES_PER_TICK = 20_000
# A tick plans no more images after this time; Dagster ends it after 60 seconds.
TICK_SECONDS = 40.0
# Images planned together.
PLANNED_AT_ONCE = 10_000
# Names of files in the log of a tick.
SHOWN_FILES = 10

# Number of the latest ended runs that are searched for one that embedded images.
LATEST_RUNS = 200

SENSOR_TAG = "imagemill/sensor"
_ENDED = [dg.DagsterRunStatus.SUCCESS, dg.DagsterRunStatus.FAILURE, dg.DagsterRunStatus.CANCELED]
_UNDER_WAY = [status for status in dg.DagsterRunStatus if status not in _ENDED]


@dg.sensor(
    jobs=[embed_images, publish_shards],
    minimum_interval_seconds=30,
    default_status=dg.DefaultSensorStatus.STOPPED,
    description="New or changed images and captions, still for ten seconds, become runs; records and shards follow.",
)
def new_images(
    context: dg.SensorEvaluationContext, data_root: DataRootResource
) -> Iterator[dg.RunRequest | dg.SkipReason]:
    """Publish the results of the last embedding run, including one launched in the UI; otherwise embed new images.

    The cursor names the latest embedding run whose records and shards were requested, and the state of `approved/`, ledger and
    configuration in which a tick had nothing left to request: in that state, a tick lists `approved/` and ends. New images come
    before all others; of a large folder, a tick plans a part and the next one continues.
    """
    _sweep(context.instance, data_root)
    working, newest = _embedding_runs(context.instance)
    cursor = _Cursor.read(context.cursor)
    if working:
        yield dg.SkipReason(f"run {working.run_id} is embedding images")
    elif newest and newest.run_id != cursor.published:
        context.update_cursor(msgspec.structs.replace(cursor, published=newest.run_id, idle=None).text)
        yield _publish(newest.run_id, data_root.session.config)
    else:
        yield from _embed(context, data_root, cursor)


def _sweep(instance: dg.DagsterInstance, data_root: DataRootResource) -> None:
    """Report the runs of dead processes as ended. A root without lock files has had none."""
    if (owners := data_root.root().owners).is_dir():
        use(owners)
        sweep(instance)


class _Cursor(msgspec.Struct, frozen=True):
    """The memory of earlier ticks.

    Attributes:
        published: the run whose results were published.
        idle: the state with nothing left to request.
        images: the number of images in that state.
        after: the last image that the last tick planned, if it did not plan all.
        state: the state in which all images up to that one were planned, if none of them waits.
        looked: when object storage was last listed, in seconds since 1970.
    """

    published: str | None = None
    idle: str | None = None
    images: int = 0
    after: str | None = None
    state: str | None = None
    looked: float = 0.0

    @classmethod
    def read(cls, text: str | None) -> "_Cursor":
        """Return a cursor from its text. That of earlier releases is the id of the run."""
        try:
            return msgspec.json.decode(text or "{}", type=cls)
        except msgspec.DecodeError:
            return cls(text)

    @property
    def text(self) -> str:
        """The cursor as Dagster keeps it."""
        return msgspec.json.encode(self).decode()


def _embedding_runs(instance: dg.DagsterInstance) -> tuple[dg.DagsterRun | None, dg.DagsterRun | None]:
    """Return an active embedding run, and the newest one that has ended, of this sensor or launched in the UI.

    Runs of the command line are left out, because a command writes records and shards itself if requested. So does
    `resume_missing`, unless it is stopped.
    """
    working = filter(_is_awaited, runs_of_this_root(instance, _UNDER_WAY))
    ended = filter(_is_awaited, islice(runs_of_this_root(instance, _ENDED), LATEST_RUNS))
    unpublished = (run for run in ended if not (run.job_name == RESUME_JOB and run.is_success))
    return next(working, None), next(unpublished, None)


def _is_awaited(run: dg.DagsterRun) -> bool:
    kinds = {asset_key(spec.kind) for spec in embedding_specs()}
    embeds = run.job_name in (EMBED_JOB, EMBED_RANGE_JOB) or not kinds.isdisjoint(run.asset_selection or ())
    return run.job_name == RESUME_JOB or (embeds and not is_command_line_run(run))


def _publish(run_id: str, config: Config) -> dg.RunRequest:
    """Return a request for the assets that follow new embeddings."""
    keys = buckets.get_partition_keys()
    assets = [asset_key(name) for name in published(config)]
    return dg.RunRequest(
        job_name=publish_shards.name,
        run_key=f"publish {run_id}",
        tags=range_tags(keys[0], keys[-1]),
        asset_selection=assets,
    )


def _embed(
    context: dg.SensorEvaluationContext, data_root: DataRootResource, cursor: _Cursor
) -> Iterator[dg.RunRequest | dg.SkipReason]:
    """Request runs for images without a partition, or, if every image has one, for those with work."""
    end = time.monotonic() + TICK_SECONDS
    session = data_root.session
    if not isinstance(session.root.approved, Path):
        minutes = session.config.object_storage.sensor_minutes
        if cursor.after is None and time.time() < cursor.looked + 60 * minutes:
            yield dg.SkipReason(
                f"{session.root.approved} is listed every {minutes:g} minutes (object_storage.sensor_minutes)"
            )
            return
        cursor = msgspec.structs.replace(cursor, looked=time.time())
        context.update_cursor(cursor.text)
    looked = session.look()
    state = idle_state(session, looked)
    if state == cursor.idle:
        yield dg.SkipReason(f"nothing new among {cursor.images} images")
        return
    assert images.name
    scan, registered = looked.scan, set(context.instance.get_dynamic_partitions(images.name))
    new = still_images([i for i in scan.sources if i not in registered], scan, time.time_ns())[:IMAGES_PER_TICK]
    if new:
        context.update_cursor(msgspec.structs.replace(cursor, idle=None).text)
        yield from _requests(context, session.ledger, scan, new)
        return
    # In the state of the last tick, it has recorded all captions.
    is_surveyed = cursor.after is not None and cursor.state == state and not session.reading.renames(ACCEPTED)
    inventory = looked if is_surveyed else session.inventory()
    yield from _embed_registered(context, data_root, inventory, cursor, state, end)


def idle_state(session: Session, looked: Inventory) -> str:
    """Return the state of `approved/`, ledger and configuration."""
    settings = fingerprint(repr(session.config).encode())
    return f"{looked.approved.digest} {state_of_files(session.root.ledger)} {settings}"


def _embed_registered(
    context: dg.SensorEvaluationContext,
    data_root: DataRootResource,
    inventory: Inventory,
    cursor: _Cursor,
    state: str,
    end: float,
) -> Iterator[dg.RunRequest | dg.SkipReason]:
    """Plan images in order of their ids, from the one at which the last tick stopped, until `end`; request runs.

    Images of which only files under regeneration are left come last.
    """
    session = data_root.session
    ledger, scan = session.ledger, inventory.scan
    if cursor.after is None and (vanished := len(ledger.source_ids() - scan.sources.keys())):
        approved = session.root.approved
        context.log.warning(f"{vanished} images are no longer in {approved}; the files made from them are kept")
    awaited = {job.image_id for job in CaptionerResource(data_root=data_root).jobs(scan.sources, scan, ledger)}
    urgent: list[str] = []
    regenerated: list[str] = []
    ids = sorted(i for i in scan.sources if cursor.after is None or i > cursor.after)
    planned = 0
    while planned < len(ids) and len(urgent) < IMAGES_PER_TICK and (not planned or time.monotonic() < end):
        part = ids[planned : planned + PLANNED_AT_ONCE]
        plans = plans_for(embedding_specs(), part, inventory, ledger, awaited)
        found = urgent_images(plans, ledger.regenerating())
        urgent += found
        regenerated += sorted(set(ids_of({spec: plan.jobs for spec, plan in plans.items()})) - set(found))
        planned += len(part)
    wanted = still_images([*urgent, *regenerated], scan, time.time_ns())[:IMAGES_PER_TICK]
    # The state is idle if all images have been planned in it, in this tick or in several, and none waits for another tick.
    is_clean = len(wanted) == len(urgent) + len(regenerated) and (cursor.after is None or cursor.state == state)
    after = ids[planned - 1] if planned < len(ids) else None
    settled = state if is_clean else None
    context.update_cursor(
        msgspec.structs.replace(
            cursor, idle=None if after else settled, images=scan.seen, after=after, state=settled if after else None
        ).text
    )
    if wanted:
        yield from _requests(context, ledger, scan, wanted)
    elif after is not None:
        yield dg.SkipReason(f"nothing new among the images up to {after}; the next tick continues there")
    else:
        yield dg.SkipReason(f"nothing new among {scan.seen} images")


def urgent_images(plans: Mapping[EmbeddingSpec, EmbeddingPlan], regenerating: Container[str]) -> list[str]:
    """Return the images that lack a file, or whose file is stale; not those whose files are only made by another model."""
    jobs = {
        spec: [job for job in plan.jobs if job.present is None or spec.kind not in regenerating]
        for spec, plan in plans.items()
    }
    return ids_of(jobs)


def _requests(
    context: dg.SensorEvaluationContext, ledger: Ledger, scan: Scan, ids: list[str]
) -> Iterator[dg.RunRequest]:
    """Register the images, and yield a request per range of partitions."""
    first = ", ".join(scan.sources[image_id].file_name for image_id in ids[:SHOWN_FILES])
    context.log.info(f"{len(ids)} images with work: {first}{', …' if len(ids) > SHOWN_FILES else ''}")
    register(context.instance, images, ids)
    for part in plan_ranges(context.instance.get_dynamic_partitions(images.name or ""), ids, IMAGES_PER_RUN):
        yield dg.RunRequest(
            job_name=embed_images.name,
            run_key=_run_key(part, ids, scan, ledger),
            tags={**range_tags(part.first, part.last), SENSOR_TAG: new_images.name},
        )


def still_images(ids: list[str], scan: Scan, now_ns: int) -> list[str]:
    """Return the existing images whose file and caption have not changed for `STILL_SECONDS`.

    A metadata file is the caption of the images below it that have no caption file, or of all if it precedes caption files.
    """
    latest = now_ns - STILL_SECONDS * 1e9
    files = {file.path: file for file in scan.metadata if file.changed_ns > latest}
    moving = {
        image_id
        for path, below in (images_below(scan) if files else {}).items()
        if path in files
        for image_id in below
        if files[path].first or scan.sources[image_id].caption is None
    }
    return [i for i in ids if i in scan.sources and scan.sources[i].changed_ns <= latest and i not in moving]


def _run_key(part: KeyRange, ids: list[str], scan: Scan, ledger: Ledger) -> str:
    """Return a key of these images in this state: a failed run is not repeated at every tick, but after a change it is."""
    keys = ledger.caption_keys() if scan.metadata else {}
    rows = {i: key.fingerprint for i in ids if (key := keys.get(i)) and key.origin == FROM_METADATA}
    state = "\n".join(f"{i} {scan.sources[i].stat} {rows.get(i, scan.sources[i].caption)}" for i in ids)
    return f"{part.first} … {part.last} {hashlib.sha256(state.encode()).hexdigest()[:12]}"


@dg.sensor(
    asset_selection=[raw_dataset, rescale_preset, derived_preset],
    minimum_interval_seconds=60,
    default_status=dg.DefaultSensorStatus.RUNNING,
    description="Datasets and presets that presets.yaml names become partitions, to be materialised when you like.",
)
def configured_presets(context: dg.SensorEvaluationContext, data_root: DataRootResource) -> dg.SkipReason:
    """Register partitions for the datasets and presets in the file. No run is started: rescaling is requested by a person.

    This sensor is always on, so it also reports the runs of dead processes as ended.
    """
    _sweep(context.instance, data_root)
    place = public_data(data_root)
    new = register_presets(context.instance, read_presets(place.presets_yaml))
    return dg.SkipReason(f"{new} new partitions of {place.presets_yaml}")


@dg.sensor(
    asset_selection=[stage_a_ranks, stage_a_groups],
    minimum_interval_seconds=60,
    default_status=dg.DefaultSensorStatus.RUNNING,
    description="Folders of stage_a/input become partitions, with the number of ranks in imagemill.yaml.",
)
def found_missions(context: dg.SensorEvaluationContext, data_root: DataRootResource) -> dg.SkipReason:
    """Register partitions for the existing missions. No run is started: summaries are requested by a person."""
    place = data_root.root().stage_a_input
    names = [name for name in missions(place) if not name_problem(name)]
    new = register_missions(context.instance, names, data_root.session.config.stage_a_ranks)
    return dg.SkipReason(f"{new} new partitions of {place}")
