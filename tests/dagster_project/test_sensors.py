"""Sensors: new and changed images."""

import json
import os
import re
import time
import uuid
from dataclasses import replace

import dagster as dg
import pytest
from dagster._core.storage.tags import (
    ASSET_PARTITION_RANGE_END_TAG,
    ASSET_PARTITION_RANGE_START_TAG,
    GRPC_INFO_TAG,
)
from msgspec import structs

from assets.partitions import images
from dagster_project import sensors
from dagster_project.internals import runs
from dagster_project.internals.instance import open_instance
from dagster_project.resume import resume_missing
from imagemill.domain.embedding_specs import embedding_specs
from imagemill.domain.shares import ImageShare
from imagemill.fs.owners import owner_name, use
from imagemill.inputs.scan import scan_approved
from imagemill.pipeline.session import Session, open_session
from imagemill.pipeline.stage2.plan import ids_of, plans_for
from imagemill.pipeline.stage2.regenerate import regenerate
from imagemill.store.provenance import ModelIdentity
from resources.dagster_internals.events import OWNER_TAG
from resources.data_root import DataRootResource
from resources.keys import ROOT_TAG
from tests.helpers.product import imagemill, photos
from tests.helpers.stage2 import picture


@pytest.fixture
def instance(data_root):
    with open_instance(data_root) as instance:
        yield instance


@pytest.fixture
def still(monkeypatch):
    """Make files old enough to be used at once."""
    monkeypatch.setattr(sensors, "STILL_SECONDS", 0.0)


def tick(root, instance, cursor=None):
    with dg.build_sensor_context(
        instance=instance,
        cursor=cursor,
        resources={"data_root": DataRootResource(path=str(root.path), config_file=None)},
    ) as context:
        data = sensors.new_images.evaluate_tick(context)
    return data.run_requests or [], data.skip_message, data.cursor


def test_two_new_files_make_one_run_over_both(data_root, instance, still):
    photos(data_root.approved, 2)

    requests, _, _ = tick(data_root, instance)

    assert [request.job_name for request in requests] == ["embed_images"]
    tags = requests[0].tags
    assert (tags[ASSET_PARTITION_RANGE_START_TAG], tags[ASSET_PARTITION_RANGE_END_TAG]) == ("photo0000", "photo0001")
    assert set(instance.get_dynamic_partitions(images.name)) == {"photo0000", "photo0001"}


def test_images_of_other_shares_are_not_asked_for(data_root, instance, still):
    """Spec: docs/spec/stage2.md#shares"""
    photos(data_root.approved, 12)
    own = [name for name in (f"photo{n:04d}" for n in range(12)) if ImageShare(1, 3).has(name)]
    data_root.config_file.write_text("share: 1/3\n")

    requests, _, _ = tick(data_root, instance)

    assert 0 < len(own) < 12
    assert set(instance.get_dynamic_partitions(images.name)) == set(own)
    ends = {
        request.tags[tag]
        for request in requests
        for tag in (ASSET_PARTITION_RANGE_START_TAG, ASSET_PARTITION_RANGE_END_TAG)
    }
    assert ends <= set(own)
    assert imagemill("run", "--data-root", data_root.path, stub=True).returncode == 0
    requests, skipped, _ = tick(data_root, instance)
    assert (requests, skipped) == ([], f"nothing new among {len(own)} images")


def test_file_that_changed_within_ten_seconds_waits(data_root, instance):
    photos(data_root.approved, 1)

    requests, skipped, _ = tick(data_root, instance)

    assert requests == []
    assert "nothing new" in skipped
    scan = scan_approved(data_root.approved)
    now = time.time_ns()
    assert sensors.still_images(["photo0000"], scan, now) == []
    assert sensors.still_images(["photo0000"], scan, now + int(11e9)) == ["photo0000"]


def test_change_of_the_caption_counts_as_a_change(data_root):
    """A caption that is still being written delays its image."""
    photos(data_root.approved, 1)
    before = scan_approved(data_root.approved).sources["photo0000"].changed_ns
    time.sleep(0.02)
    (data_root.approved / "photo0000.txt").write_text("more")

    assert scan_approved(data_root.approved).sources["photo0000"].changed_ns > before


def test_nothing_is_asked_for_where_everything_is_done_and_an_edited_caption_asks_again(data_root, instance, still):
    photos(data_root.approved, 3)
    assert imagemill("run", "--data-root", data_root.path, stub=True).returncode == 0
    assert tick(data_root, instance)[0] == []

    (data_root.approved / "photo0001.txt").write_text("another caption")
    requests, _, _ = tick(data_root, instance)

    assert [request.tags[ASSET_PARTITION_RANGE_START_TAG] for request in requests] == ["photo0001"]


def test_same_state_has_the_same_run_key_and_a_new_state_another(data_root, instance, still):
    """A failed run is not repeated at every tick, but after a change it is."""
    photos(data_root.approved, 1)
    first, again = tick(data_root, instance)[0][0].run_key, tick(data_root, instance)[0][0].run_key
    (data_root.approved / "photo0000.txt").write_text("another caption")

    assert first == again
    assert tick(data_root, instance)[0][0].run_key != first


def test_metadata_file_that_changed_within_ten_seconds_delays_the_images_without_a_caption_file(data_root):
    """Spec: docs/spec/stage2.md#metadata-files"""
    (data_root.approved / "dog").mkdir(parents=True)
    for name in ("a.png", "b.png", "dog/c.png"):
        picture(data_root.approved / name, size=(24, 24))
    (data_root.approved / "b.txt").write_text("b")
    old = time.time() - 60
    for path in data_root.approved.rglob("*"):
        os.utime(path, (old, old))
    (data_root.approved / "metadata.csv").write_text("file_name,text\na.png,a\n")
    scan = scan_approved(data_root.approved)
    # The change times of these files cannot be set.
    scan = replace(scan, sources={i: structs.replace(s, changed_ns=int(old * 1e9)) for i, s in scan.sources.items()})
    ids, now = ["a", "b", "dog%2Fc"], scan.metadata[0].changed_ns

    assert sensors.still_images(ids, scan, now) == ["b"]
    assert sensors.still_images(ids, scan, now + int(11e9)) == ids
    named = replace(scan, metadata=(structs.replace(scan.metadata[0], first=True),))
    assert sensors.still_images(ids, named, now) == []


def test_edited_row_of_a_metadata_file_starts_exactly_its_image(data_root, instance, still):
    photos(data_root.approved, 3)
    for path in data_root.approved.glob("*.txt"):
        path.unlink()
    rows = {f"photo000{n}.jpg": f"photograph {n}" for n in range(3)}
    (data_root.approved / "captions.json").write_text(json.dumps(rows))
    assert imagemill("run", "--data-root", data_root.path, stub=True).returncode == 0
    assert tick(data_root, instance)[0] == []

    keys = set()
    for text in ("another caption", "a third one"):
        (data_root.approved / "captions.json").write_text(json.dumps(rows | {"photo0001.jpg": text}))
        (request,) = tick(data_root, instance)[0]
        ends = ASSET_PARTITION_RANGE_START_TAG, ASSET_PARTITION_RANGE_END_TAG
        assert [request.tags[end] for end in ends] == ["photo0001"] * 2
        keys.add(request.run_key)
    assert len(keys) == 2


def test_records_and_shards_follow_an_embedding_run_once(data_root, instance, still):
    photos(data_root.approved, 1)
    (request,) = tick(data_root, instance)[0]
    run = instance.create_run_for_job(job_def=_job(), tags=request.tags, status=dg.DagsterRunStatus.STARTED)
    assert tick(data_root, instance)[0] == []

    instance.report_run_failed(run)
    (follow,), _, cursor = tick(data_root, instance)
    assert follow.job_name == "publish_shards"
    assert tick(data_root, instance, cursor)[0][0].job_name == "embed_images", "not published twice"


def test_images_embedded_by_a_backfill_of_the_ui_are_published(data_root, instance, still):
    """Such a run has neither the sensor's tag nor the job's name. A run of the command line publishes by itself if requested."""
    photos(data_root.approved, 1)
    assert imagemill("stage2", "--data-root", data_root.path, stub=True).returncode == 0
    assert tick(data_root, instance)[0] == [], "a run of the command line is not published by the sensor"
    key = dg.AssetKey("dinov3_npy")
    tags = {"dagster/backfill": "b", GRPC_INFO_TAG: "{}"}
    run = instance.create_run_for_job(
        job_def=_job(), asset_selection=frozenset([key]), tags=tags, status=dg.DagsterRunStatus.STARTED
    )
    requests, skipped, _ = tick(data_root, instance)
    assert (requests, run.run_id in skipped) == ([], True)

    instance.report_run_failed(run)
    (follow,), _, cursor = tick(data_root, instance)

    assert (follow.job_name, json.loads(cursor)["published"]) == ("publish_shards", run.run_id)
    assert tick(data_root, instance, cursor)[0] == []
    assert tick(data_root, instance, run.run_id)[0] == [], "the cursor of earlier releases is the id of the run"


def test_runs_of_other_roots_hide_no_run_that_is_to_be_published(data_root, instance, still, monkeypatch):
    """There may be any number of them after it. Spec: docs/spec/conventions.md#several-data-roots"""
    monkeypatch.setattr(sensors, "LATEST_RUNS", 2)
    monkeypatch.setattr(runs, "RUNS_AT_ONCE", 2, raising=False)
    photos(data_root.approved, 1)
    (request,) = tick(data_root, instance)[0]
    ended = dg.DagsterRunStatus.SUCCESS
    run = instance.create_run_for_job(job_def=_job(), tags=request.tags, status=ended)
    for _ in range(5):
        instance.create_run_for_job(job_def=_job(), tags={**request.tags, ROOT_TAG: "cars"}, status=ended)

    (follow,), _, _ = tick(data_root, instance)

    assert follow.run_key == f"publish {run.run_id}"


def test_tick_without_news_lists_only_the_images(data_root, instance, still, monkeypatch):
    photos(data_root.approved, 3)
    assert imagemill("run", "--data-root", data_root.path, stub=True).returncode == 0
    requests, _, cursor = tick(data_root, instance)
    assert requests == []

    def refuse(*_):
        raise AssertionError("planned without news")

    with monkeypatch.context() as without:
        without.setattr(sensors, "plans_for", refuse)
        requests, skipped, again = tick(data_root, instance, cursor)
    assert (requests, skipped, again) == ([], "nothing new among 3 images", cursor)

    (data_root.approved / "photo0001.txt").write_text("another caption")
    (request,), _, later = tick(data_root, instance, cursor)
    assert request.tags[ASSET_PARTITION_RANGE_START_TAG] == "photo0001"
    assert later != cursor


def test_image_that_is_not_still_yet_is_requested_by_a_later_tick(data_root, instance, monkeypatch):
    photos(data_root.approved, 1)
    monkeypatch.setattr(sensors, "STILL_SECONDS", 1000.0)
    requests, _, cursor = tick(data_root, instance)
    assert requests == []

    monkeypatch.setattr(sensors, "STILL_SECONDS", 0.0)

    assert len(tick(data_root, instance, cursor)[0]) == 1


def _job():
    from dagster_project.definitions import build_definitions
    from dagster_project.deployments import test_resources

    return build_definitions(test_resources("unused")).resolve_job_def("embed_images")


def test_vanished_image_is_reported_and_asks_for_nothing(data_root, instance, still):
    """A deleted source makes nothing stale. Spec: docs/spec/conventions.md#completion-and-identity"""
    photos(data_root.approved, 2)
    imagemill("run", "--data-root", data_root.path, stub=True)
    (data_root.approved / "photo0001.jpg").unlink()

    assert tick(data_root, instance)[0] == []
    assert re.search("source_missing +1 input", imagemill("status", "--data-root", data_root.path).stdout)


# ---- order and duration of ticks


def test_new_images_come_before_those_that_are_only_regenerated(data_root, instance, still):
    """A tick requests the new ones alone; the next requests what is left, those with a missing file first."""
    photos(data_root.approved, 4)
    assert imagemill("run", "--data-root", data_root.path, stub=True).returncode == 0
    with open_session(data_root.path) as session:
        regenerate(session.ledger, "dinov3_npy", "test", ModelIdentity(kind="dinov3_npy", model="another", facts={}))
    (data_root.derived / "vae_latents" / "photo0002.npy").unlink()
    picture(data_root.approved / "a_new.png")

    first, _, cursor = tick(data_root, instance)
    second, _, _ = tick(data_root, instance, cursor)

    ends = [(r.tags[ASSET_PARTITION_RANGE_START_TAG], r.tags[ASSET_PARTITION_RANGE_END_TAG]) for r in (*first, *second)]
    assert ends == [("a_new", "a_new"), ("photo0000", "a_new")]


def test_image_with_a_missing_file_is_urgent_and_one_under_regeneration_is_not(data_root):
    photos(data_root.approved, 3)
    assert imagemill("run", "--data-root", data_root.path, stub=True).returncode == 0
    (data_root.derived / "vae_latents" / "photo0002.npy").unlink()
    with open_session(data_root.path) as session:
        regenerate(session.ledger, "dinov3_npy", "test", ModelIdentity(kind="dinov3_npy", model="another", facts={}))
        inventory = session.inventory()
        plans = plans_for(embedding_specs(), list(inventory.scan.sources), inventory, session.ledger)

        assert len(ids_of({spec: plan.jobs for spec, plan in plans.items()})) == 3
        assert sensors.urgent_images(plans, session.ledger.regenerating()) == ["photo0002"]
        assert len(sensors.urgent_images(plans, {})) == 3


def test_tick_that_takes_too_long_stops_and_the_next_continues_at_its_cursor(data_root, instance, still, monkeypatch):
    """The state is idle once all images have been planned in it."""
    photos(data_root.approved, 5)
    assert imagemill("run", "--data-root", data_root.path, stub=True).returncode == 0
    monkeypatch.setattr(sensors, "PLANNED_AT_ONCE", 2)
    monkeypatch.setattr(sensors, "TICK_SECONDS", 0.0)
    cursor, skipped = None, []
    for _ in range(3):
        requests, text, cursor = tick(data_root, instance, cursor)
        assert requests == []
        skipped.append(text)

    assert [re.findall(r"photo\d+", text) for text in skipped] == [["photo0001"], ["photo0003"], []]
    assert json.loads(cursor)["idle"], "the whole folder has been planned in one state"
    monkeypatch.setattr(sensors, "plans_for", None)
    assert tick(data_root, instance, cursor)[1] == "nothing new among 5 images"


def test_tick_that_continues_in_the_same_state_reads_no_captions_again(data_root, instance, still, monkeypatch):
    photos(data_root.approved, 5)
    assert imagemill("run", "--data-root", data_root.path, stub=True).returncode == 0
    monkeypatch.setattr(sensors, "PLANNED_AT_ONCE", 1)
    monkeypatch.setattr(sensors, "TICK_SECONDS", 0.0)
    cursor = None
    for _ in range(3):  # the first one may change the ledger
        _, _, cursor = tick(data_root, instance, cursor)
    monkeypatch.setattr(Session, "inventory", None)

    assert "up to photo0003" in tick(data_root, instance, cursor)[1]


def test_work_that_a_later_tick_finds_is_requested(data_root, instance, still, monkeypatch):
    photos(data_root.approved, 5)
    assert imagemill("run", "--data-root", data_root.path, stub=True).returncode == 0
    (data_root.derived / "dinov3" / "photo0003.npy").unlink()
    monkeypatch.setattr(sensors, "PLANNED_AT_ONCE", 2)
    monkeypatch.setattr(sensors, "TICK_SECONDS", 0.0)

    first, _, cursor = tick(data_root, instance)
    second, _, cursor = tick(data_root, instance, cursor)

    assert first == []
    assert [request.tags[ASSET_PARTITION_RANGE_START_TAG] for request in second] == ["photo0003"]
    assert not json.loads(cursor)["idle"]


def test_tick_logs_the_number_of_images_and_the_first_ten_files(data_root, instance, still, monkeypatch):
    photos(data_root.approved, 12)
    lines = []
    with dg.build_sensor_context(
        instance=instance, resources={"data_root": DataRootResource(path=str(data_root.path), config_file=None)}
    ) as context:
        monkeypatch.setattr(context.log, "info", lines.append)
        sensors.new_images.evaluate_tick(context)

    (line,) = lines
    assert line.startswith("12 images with work: photo0000.jpg, photo0001.jpg, ")
    assert line.endswith("photo0009.jpg, …")
    assert "photo0010" not in line


def test_images_of_a_job_that_was_stopped_are_published(data_root, instance, still):
    """`resume_missing` publishes itself if it comes to its end; a run of it that works is waited for."""

    def run(status):
        return instance.create_run_for_job(resume_missing, status=status, run_id=str(uuid.uuid4()), tags={})

    run(dg.DagsterRunStatus.SUCCESS)
    assert "nothing new" in tick(data_root, instance)[1]
    working = run(dg.DagsterRunStatus.STARTED)
    assert working.run_id in tick(data_root, instance)[1]
    instance.report_run_failed(working)

    (request,), _, _ = tick(data_root, instance)
    assert request.run_key == f"publish {working.run_id}"


def test_tick_reports_runs_of_dead_processes(data_root, instance, still):
    """Spec: docs/spec/conventions.md#runs-of-dead-processes"""
    use(data_root.owners)
    dead = instance.create_run_for_job(resume_missing, status=dg.DagsterRunStatus.STARTED)
    owner = owner_name().partition("-")[0] + "-0123456789ab"
    instance.add_run_tags(dead.run_id, {OWNER_TAG: f"{owner}/{dead.run_id}"})

    tick(data_root, instance)

    assert instance.get_run_by_id(dead.run_id).status is dg.DagsterRunStatus.FAILURE
