"""dagster_project/internals/instance.py: one history per data root, with our dagster.yaml unless it has its own."""

import os
import subprocess
import sys

import dagster as dg
import pytest
import yaml
from dagster._core.instance.config import PoolGranularity
from dagster._core.storage.event_log.sqlite.sqlite_event_log import SqliteEventLogStorage
from sqlalchemy.exc import IntegrityError, OperationalError

from assets.partitions import GPU_POOL
from dagster_project.internals.coordinator import DeferCoordinator
from dagster_project.internals.instance import TEMPLATE, environment_of, open_instance, prepare_home
from dagster_project.internals.storage import BatchSqliteEventLogStorage
from imagemill.domain.layout import DataRoot, home_of
from tests.helpers.earlier_roots import DAGSTER_YAML
from tests.helpers.product import PROJECT


def test_history_lives_in_the_data_root(data_root):
    """Spec: docs/spec/conventions.md#dagster-history, docs/spec/conventions.md#command-line"""
    assert home_of(data_root) == data_root.path / ".dagster"


def test_history_lives_where_dagster_home_says(data_root, tmp_path, monkeypatch):
    """The path is absolute, because Dagster refuses others. Spec: docs/spec/conventions.md#command-line"""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DAGSTER_HOME", "elsewhere")

    assert home_of(data_root) == tmp_path / "elsewhere"
    assert environment_of(data_root) == {
        "DAGSTER_HOME": str(tmp_path / "elsewhere"),
        "IMAGEMILL_DATA_ROOT": str(data_root.path),
    }


def test_home_without_settings_gets_ours(data_root):
    """Spec: docs/spec/conventions.md#dagster-history, docs/spec/conventions.md#command-line"""
    home = prepare_home(data_root)

    written = yaml.safe_load((home / "dagster.yaml").read_text())
    assert (home / "dagster.yaml").read_bytes() == TEMPLATE.read_bytes()
    assert [written[key]["enabled"] for key in ("telemetry", "nux", "run_monitoring")] == [False, False, True]
    assert written["run_coordinator"]["config"] == {"max_concurrent_runs": 1}
    assert [path.name for path in home.iterdir()] == ["dagster.yaml"]


def test_settings_that_are_there_are_never_overwritten(data_root):
    """The user's settings are kept, even another storage."""
    data_root.dagster_home.mkdir()
    theirs = "telemetry: {enabled: false}\n"
    (data_root.dagster_home / "dagster.yaml").write_text(theirs)

    with open_instance(data_root) as instance:
        assert type(instance.event_log_storage) is SqliteEventLogStorage
    assert (data_root.dagster_home / "dagster.yaml").read_text() == theirs


def test_open_instance_is_ours_and_leaves_the_environment_as_it_was(data_root, monkeypatch):
    """Assets, storage and child processes find root and history by the environment."""
    monkeypatch.setenv("IMAGEMILL_DATA_ROOT", "another")
    with open_instance(data_root) as instance:
        assert isinstance(instance.event_log_storage, BatchSqliteEventLogStorage)
        assert isinstance(instance.run_coordinator, DeferCoordinator)
        assert instance.get_concurrency_config().run_queue_config.max_concurrent_runs == 1
        assert instance.python_log_level == "INFO"
        assert not instance.telemetry_enabled
        assert not instance.nux_enabled
        assert os.environ["DAGSTER_HOME"] == str(data_root.dagster_home)
        assert os.environ["IMAGEMILL_DATA_ROOT"] == str(data_root.path)

    assert "DAGSTER_HOME" not in os.environ
    assert os.environ["IMAGEMILL_DATA_ROOT"] == "another"
    assert os.environ["DAGSTER_EVENT_BATCH_SIZE"] == "1000"


def test_history_is_found_after_its_data_root_moved(data_root):
    """The settings contain no absolute path."""
    with open_instance(data_root) as instance:
        instance.report_runless_asset_event(dg.AssetMaterialization("a", partition="1"))
    moved = DataRoot(data_root.path.rename(data_root.path.with_name("moved")))

    with open_instance(moved) as instance:
        assert instance.get_materialized_partitions(dg.AssetKey("a")) == {"1"}
    assert not data_root.path.exists()


def test_dagsters_own_processes_open_the_same_history(data_root):
    """`dagster dev` reads dagster.yaml itself: storage class and folder come from the template and DAGSTER_HOME alone."""
    with open_instance(data_root) as instance:
        instance.report_runless_asset_event(dg.AssetMaterialization("a", partition="1"))
    program = (
        "import dagster as dg; i = dg.DagsterInstance.get(); "
        "print(type(i.event_log_storage).__name__, type(i.compute_log_manager).__name__, "
        "i.get_materialized_partitions(dg.AssetKey('a')))"
    )
    there = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        env={**os.environ, **environment_of(data_root)},
        cwd=PROJECT,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )

    assert there.stdout.split() == ["BatchSqliteEventLogStorage", "LocalComputeLogManager", "{'1'}"]


def test_data_root_of_an_earlier_release_is_opened(data_root):
    """Its dagster.yaml names modules that still exist as re-exports."""
    data_root.dagster_home.mkdir(parents=True)
    (data_root.dagster_home / "dagster.yaml").write_text(DAGSTER_YAML)

    with open_instance(data_root) as instance:
        assert type(instance.event_log_storage) is BatchSqliteEventLogStorage
        assert type(instance.run_coordinator) is DeferCoordinator


# ---- pool of the runs that load models


def pools(instance):
    return {pool.name: pool.limit for pool in instance.event_log_storage.get_pool_limits()}


def test_one_run_at_a_time_loads_models_unless_the_user_sets_another_limit(data_root):
    """The limit is set when the history is opened for the first time."""
    with open_instance(data_root) as instance:
        assert instance.get_concurrency_config().pool_config.pool_granularity is PoolGranularity.RUN
        assert pools(instance) == {GPU_POOL: 1}
        instance.event_log_storage.set_concurrency_slots(GPU_POOL, 3)

    with open_instance(data_root) as instance:
        assert pools(instance) == {GPU_POOL: 3}


@pytest.mark.parametrize("lost", [IntegrityError, OperationalError])
def test_another_command_may_set_the_limit_at_the_same_moment(data_root, monkeypatch, lost):
    """Dagster looks for the limit before it inserts it: the insert then fails, or SQLite refuses the transaction."""
    stock = BatchSqliteEventLogStorage.set_concurrency_slots

    def second(log, key, number):
        stock(log, key, number)
        raise lost("INSERT", None, Exception("UNIQUE constraint failed"))

    monkeypatch.setattr(BatchSqliteEventLogStorage, "set_concurrency_slots", second)
    with open_instance(data_root) as instance:
        assert pools(instance) == {GPU_POOL: 1}


def test_limit_that_cannot_be_set_for_another_reason_is_set_once_more(data_root, monkeypatch):
    stock, tried = BatchSqliteEventLogStorage.set_concurrency_slots, []

    def busy_once(log, key, number):
        tried.append(key)
        if len(tried) == 1:
            raise OperationalError("INSERT", None, Exception("database is locked"))
        stock(log, key, number)

    monkeypatch.setattr(BatchSqliteEventLogStorage, "set_concurrency_slots", busy_once)
    with open_instance(data_root) as instance:
        assert pools(instance) == {GPU_POOL: 1}


def test_home_that_limits_pools_by_step_gets_no_limit(data_root):
    """The steps of a run of the command line would wait for those of other runs."""
    data_root.dagster_home.mkdir(parents=True)
    (data_root.dagster_home / "dagster.yaml").write_text(DAGSTER_YAML)

    with open_instance(data_root) as instance:
        assert instance.get_concurrency_config().pool_config.pool_granularity is not PoolGranularity.RUN
        assert pools(instance) == {}
