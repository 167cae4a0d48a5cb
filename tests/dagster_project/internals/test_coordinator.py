"""dagster_project/internals/coordinator.py: runs launched in the UI report each image themselves, like our own runs."""

import sys
import uuid
from pathlib import Path
from types import SimpleNamespace

import dagster as dg
import pytest
from dagster._core.errors import DagsterUserCodeUnreachableError
from dagster._core.events import DagsterEvent, DagsterEventType, RunFailureReason
from dagster._core.execution.api import execute_run
from dagster._core.execution.retries import auto_reexecution_should_retry_run
from dagster._core.run_coordinator import SubmitRunContext
from dagster._core.storage.tags import (
    ASSET_PARTITION_RANGE_END_TAG,
    ASSET_PARTITION_RANGE_START_TAG,
    GRPC_INFO_TAG,
    MAX_RETRIES_TAG,
    PARTITION_NAME_TAG,
)

sys.path.append(str(Path(__file__).parent))  # toy_defs

from toy_defs import defs, toy_instance

from dagster_project.command_line import COMMAND_TAG
from dagster_project.internals import runs
from dagster_project.internals.coordinator import _bucket_tags, _embeds
from dagster_project.internals.instance import open_instance
from imagemill.domain.buckets import BUCKETS
from resources.dagster_internals.events import DEFER, OWNER_TAG, PLANNED_TAG, UI_TAG, owner_of_run
from resources.dagster_internals.tags import DEFER_TAG, range_tags

KEYS = [f"k{n}" for n in range(6)]
STREAMED = dg.AssetKey("dinov3_npy")
WORKSPACE = SimpleNamespace(asset_graph=defs().resolve_asset_graph())


@pytest.fixture
def instance(data_root):
    with toy_instance(data_root, KEYS) as opened:
        yield opened


def created(instance, asset="dinov3_npy", tags=None, partition_range=(KEYS[0], KEYS[-1])):
    """Create a run as the UI's launchpad does, and return it with its job."""
    job = runs._job("toy_defs", "defs", runs.IMPLICIT_ASSET_JOB_NAME, [asset])
    given = {**(range_tags(*partition_range) if partition_range else {}), **(tags or {})}
    run = runs._create(instance, job, "toy", given, runs._QUIET, str(uuid.uuid4()))
    # The launchpad's process is not the one that executes.
    instance.add_run_tags(run.run_id, {OWNER_TAG: ""})
    return job, instance.get_run_by_id(run.run_id)


def submitted(instance, run):
    return instance.run_coordinator.submit_run(SubmitRunContext(run, WORKSPACE))  # type: ignore[arg-type]


def executed(instance, job, run):
    """Execute a queued run as the daemon and the code server do."""
    starting = DagsterEvent(event_type_value=DagsterEventType.PIPELINE_STARTING.value, job_name=run.job_name)
    instance.report_dagster_event(starting, run_id=run.run_id)
    return execute_run(job, instance.get_run_by_id(run.run_id), instance)


def statuses(instance):
    found = instance.get_status_by_partition(STREAMED, KEYS, dg.DynamicPartitionsDefinition(name="images"))
    return {key: status.name for key, status in found.items() if status}


def test_run_with_a_streamed_asset_is_queued_with_the_defer_tag(instance):
    """Definitions cannot set the tag."""
    _, run = created(instance)
    assert DEFER_TAG not in run.tags

    queued = submitted(instance, run)

    assert queued.status is dg.DagsterRunStatus.QUEUED
    assert queued.tags[DEFER_TAG] == "true"
    assert queued.tags[PLANNED_TAG] == run.run_id


def test_run_without_a_streamed_asset_is_left_alone(instance):
    """In a deferred run an asset that does not report itself would have no event."""
    _, run = created(instance, "plain")

    queued = submitted(instance, run)

    assert queued.status is dg.DagsterRunStatus.QUEUED
    assert not {DEFER_TAG, PLANNED_TAG} & queued.tags.keys()


def test_run_that_carries_the_tag_from_the_start_has_nothing_planned(instance):
    """Such runs are those of jobs and sensors, and re-executions of deferred runs."""
    _, run = created(instance, tags={**DEFER, PLANNED_TAG: "the run it was copied from"})

    queued = submitted(instance, run)

    assert queued.tags[PLANNED_TAG] == "the run it was copied from"
    assert not instance.all_logs(run.run_id, of_type=DagsterEventType.ASSET_MATERIALIZATION_PLANNED)


def test_run_of_the_ui_is_never_retried_by_dagster(data_root, monkeypatch):
    """A retry would skip the refused images and succeed. The tag is set even if the launchpad sets another value."""
    with toy_instance(data_root, KEYS), open(data_root.dagster_home / "dagster.yaml", "a") as file:
        file.write("\nrun_retries: {enabled: true, max_retries: 2}\n")
    monkeypatch.setenv("TOY_MISSING", "k2")
    with open_instance(data_root) as instance:
        job, run = created(instance, tags={MAX_RETRIES_TAG: "3"})
        executed(instance, job, submitted(instance, run))
        run = instance.get_run_by_id(run.run_id)

        assert (run.status, run.tags[MAX_RETRIES_TAG]) == (dg.DagsterRunStatus.FAILURE, "0")
        assert not auto_reexecution_should_retry_run(instance, run, RunFailureReason.STEP_FAILURE)
        retried = run.with_tags({key: value for key, value in run.tags.items() if key != MAX_RETRIES_TAG})
        assert auto_reexecution_should_retry_run(instance, retried, RunFailureReason.STEP_FAILURE)


@pytest.mark.parametrize("tag", ["dagster/sensor_name", "dagster/schedule_name"])
def test_run_of_a_sensor_may_be_retried_and_succeeds_without_the_refused_images(instance, monkeypatch, tag):
    monkeypatch.setenv("TOY_MISSING", "k2")
    job, run = created(instance, tags={**DEFER, tag: "mine"})

    queued = submitted(instance, run)

    assert not {MAX_RETRIES_TAG, UI_TAG} & queued.tags.keys()
    assert executed(instance, job, queued).success


def test_second_execution_of_a_run_of_the_ui_fails_for_the_missing_images_too(instance, monkeypatch):
    """It inherits the defer tag, like a run of a job that sets it."""
    monkeypatch.setenv("TOY_MISSING", "k2")
    inherited = {**DEFER, PLANNED_TAG: "its parent", UI_TAG: "its parent", MAX_RETRIES_TAG: "0"}
    job, run = created(instance, tags=inherited)

    queued = submitted(instance, run)

    assert queued.tags[UI_TAG] == run.run_id
    assert not executed(instance, job, queued).success


def test_publishing_without_partitions_means_all_buckets(instance):
    """Dagster cannot execute a partitioned asset without partitions."""
    _, run = created(instance, "plain", partition_range=None)
    named = run._replace(job_name="publish_shards")
    assert _bucket_tags(named) == {
        ASSET_PARTITION_RANGE_START_TAG: BUCKETS[0],
        ASSET_PARTITION_RANGE_END_TAG: BUCKETS[-1],
    }
    assert _bucket_tags(named.with_tags({PARTITION_NAME_TAG: BUCKETS[2]})) == {}
    assert _bucket_tags(run) == {}


def test_streamed_asset_is_known_by_its_tag(instance):
    """Another location may have kinds that this process does not know, and other names."""
    _, run = created(instance)
    untagged = SimpleNamespace(asset_graph=dg.Definitions([dg.AssetSpec(STREAMED)]).resolve_asset_graph())

    assert not _embeds(run, untagged)
    assert not _embeds(run, SimpleNamespace(asset_graph=dg.Definitions().resolve_asset_graph()))
    assert _embeds(run, WORKSPACE)


def test_run_of_the_ui_marks_exactly_the_missing_images_as_failed(instance, monkeypatch):
    """"""
    monkeypatch.setenv("TOY_MISSING", "k2,k4")
    job, run = created(instance)
    queued = submitted(instance, run)
    assert set(statuses(instance).values()) == {"IN_PROGRESS"}

    result = executed(instance, job, queued)

    assert not result.success
    assert statuses(instance) == {key: "FAILED" if key in {"k2", "k4"} else "MATERIALIZED" for key in KEYS}
    records = instance.fetch_materializations(STREAMED, limit=100).records
    assert sorted(record.partition_key for record in records) == ["k0", "k1", "k3", "k5"]


def test_run_of_the_ui_names_the_process_that_executes_it(instance):
    """A sweep uses it to find runs of dead code servers. Spec: docs/spec/conventions.md#runs-of-dead-processes"""
    job, run = created(instance)
    queued = submitted(instance, run)
    assert queued.tags[OWNER_TAG] == ""

    assert executed(instance, job, queued).success

    assert instance.get_run_by_id(run.run_id).tags[OWNER_TAG] == owner_of_run(run.run_id)


@pytest.mark.parametrize(("owner", "status"), [("living", "CANCELING"), ("dead", "CANCELED")])
def test_run_of_our_command_line_can_be_terminated_in_the_ui(instance, owner, status):
    """Its watcher reads CANCELING; if its process is dead, the run is reported as canceled."""
    _, run = created(instance)
    names = {"living": owner_of_run(run.run_id), "dead": owner_of_run(run.run_id).replace("-", "-1", 1)}
    instance.add_run_tags(run.run_id, {OWNER_TAG: names[owner]})

    assert instance.run_coordinator.cancel_run(run.run_id)

    assert instance.get_run_by_id(run.run_id).status.name == status


def test_run_that_a_code_server_executes_is_terminated_through_it(instance):
    """Such a run is terminated by Dagster's own means, even if its process is recorded."""
    _, run = created(instance)
    instance.add_run_tags(
        run.run_id, {OWNER_TAG: owner_of_run(run.run_id), GRPC_INFO_TAG: '{"host": "h", "socket": "/gone"}'}
    )

    with pytest.raises(DagsterUserCodeUnreachableError):
        instance.run_coordinator.cancel_run(run.run_id)


def test_queued_run_is_terminated_in_the_queue(instance):
    _, run = created(instance)
    submitted(instance, run)

    assert instance.run_coordinator.cancel_run(run.run_id)

    assert instance.get_run_by_id(run.run_id).status is dg.DagsterRunStatus.CANCELED


def test_run_of_a_command_that_is_executed_again_is_reported(instance):
    """Tags are inherited, but this run was not started by a command."""
    _, run = created(instance, tags={COMMAND_TAG: "imagemill run"})

    once = submitted(instance, run)
    assert once.tags[COMMAND_TAG] == "imagemill run (executed again in the UI)"
    _, again = created(instance, tags={COMMAND_TAG: once.tags[COMMAND_TAG]})
    assert submitted(instance, again).tags[COMMAND_TAG] == once.tags[COMMAND_TAG]
