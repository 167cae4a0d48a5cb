"""The job `publish_shards` as the UI launches it."""

import uuid
from types import SimpleNamespace

import dagster as dg
import pytest
from dagster._core.definitions.reconstruct import ReconstructableRepository
from dagster._core.execution.api import execute_run
from dagster._core.run_coordinator import SubmitRunContext

from dagster_project.internals import runs
from dagster_project.internals.instance import open_instance
from imagemill.domain.buckets import BUCKETS
from tests.helpers.product import imagemill, photos


@pytest.fixture
def published(data_root):
    """Runs the job without partitions; returns its status and the buckets that were materialized."""
    photos(data_root.approved, 2)
    assert imagemill("stage2", "--data-root", data_root.path, stub=True).returncode == 0
    with open_instance(data_root) as instance:
        repository = ReconstructableRepository.for_module(runs.MODULE, runs.ATTRIBUTE)
        job = repository.get_reconstructable_job("publish_shards")
        run = runs._create(instance, job, runs.LOCATION, {}, runs._QUIET, str(uuid.uuid4()))
        queued = instance.run_coordinator.submit_run(
            SubmitRunContext(run, workspace=SimpleNamespace(asset_graph=dg.Definitions().resolve_asset_graph()))
        )
        starting = dg.DagsterEvent("PIPELINE_STARTING", run.job_name)
        instance.report_dagster_event(starting, run_id=run.run_id)
        execute_run(job, instance.get_run_by_id(queued.run_id), instance)
        found = instance.get_materialized_partitions(dg.AssetKey("bucket_shards"))
        return instance.get_run_by_id(run.run_id).status, found


def test_without_partitions_it_means_all_buckets(published, data_root):
    status, buckets = published
    assert status is dg.DagsterRunStatus.SUCCESS
    assert buckets == set(BUCKETS)
    assert list(data_root.shards.glob("bucket_*/*.tar"))
