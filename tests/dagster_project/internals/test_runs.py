"""dagster_project/internals/runs.py: runs of our command line are shown, stopped, re-executed and swept like any other."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import dagster as dg
import pytest
from dagster._core.events import DagsterEventType
from dagster._core.origin import JobPythonOrigin
from dagster_shared.error import SerializableErrorInfo

sys.path.append(str(Path(__file__).parent))  # toy_defs

from toy_defs import defs as toy_definitions
from toy_defs import run_toy as run
from toy_defs import toy_instance

from dagster_project.internals.instance import environment_of
from dagster_project.internals.runs import KILLED, StepFailure, _explained, sweep
from imagemill.fs.owners import owner_name
from resources.dagster_internals.events import OWNER_TAG, owner_of_run
from resources.dagster_internals.tags import DEFER_TAG
from tests.helpers.product import PROJECT, SEARCH_PATH

KEYS = [f"k{n:03d}" for n in range(400)]
STREAMED = dg.AssetKey("dinov3_npy")
FEW = (KEYS[0], KEYS[4])


@pytest.fixture
def instance(data_root):
    with toy_instance(data_root, KEYS) as opened:
        yield opened


# ---- runs


def test_range_of_images_is_one_visible_run(instance):
    """Location, selection and range are in the history, as the UI needs them."""
    outcome = run(instance, "dinov3_npy", partition_range=FEW, deferred=True, tags={"who": "me"})

    (seen,) = instance.get_runs()
    assert outcome.success
    assert (outcome.error, outcome.failures, outcome.signal) == (None, (), None)
    assert seen.run_id == outcome.run_id
    assert seen.remote_job_origin.location_name == "toy"
    assert seen.remote_job_origin.repository_origin.repository_name == "__repository__"
    assert isinstance(seen.job_code_origin, JobPythonOrigin)
    assert seen.asset_selection == {STREAMED}
    assert seen.tags[DEFER_TAG] == "true"
    assert seen.tags["who"] == "me"
    assert (seen.tags["dagster/asset_partition_range_start"], seen.tags["dagster/asset_partition_range_end"]) == FEW
    assert seen.tags[OWNER_TAG] == owner_of_run(seen.run_id)
    assert instance.get_materialized_partitions(STREAMED) == set(KEYS[:5])


def test_run_counts_the_keys_of_a_set_of_partitions_once(instance, monkeypatch):
    """Dagster asks for them several times per step, and to count a million takes 0.1 s."""
    log, counted = instance.event_log_storage, []
    real = type(log)._stamp_columns
    monkeypatch.setattr(type(log), "_stamp_columns", lambda self, table: counted.append(table) or real(self, table))

    assert run(instance, "dinov3_npy", "plain", partition_range=FEW, deferred=True).success

    assert len(counted) == 1


def test_one_run_makes_the_records_and_a_range_of_buckets(instance):
    """Without the defer tag Dagster reports both assets; metadata belongs to its bucket."""
    outcome = run(instance, "totals", "shards", partition_range=("square", "tall"))

    records = instance.fetch_materializations(dg.AssetKey("shards"), limit=9).records
    assert outcome.success
    assert DEFER_TAG not in outcome.run.tags
    assert instance.get_latest_materialization_event(dg.AssetKey("totals")).run_id == outcome.run_id
    assert {r.partition_key: r.asset_materialization.metadata["samples"].value for r in records} == {
        "square": 3,
        "tall": 3,
    }


def test_checks_of_the_selected_assets_are_part_of_the_run(instance, monkeypatch):
    """Each has its result; checks of other assets are not evaluated."""
    monkeypatch.setenv("TOY_MISSING", KEYS[1])
    outcome = run(instance, "dinov3_npy", "totals", partition_range=FEW, deferred=True)

    assert outcome.success
    assert outcome.checks == {"dinov3_npy:files_valid": False, "totals:adds_up": True}
    (said,) = outcome.findings.values()
    assert said.startswith("check dinov3_npy:files_valid failed: ")
    assert run(instance, "totals").checks == {"totals:adds_up": True}


def test_check_that_warns_passes_and_is_named(instance, monkeypatch):
    """A refused input does not fail the run. Spec: docs/spec/conventions.md#refused-and-failed"""
    monkeypatch.setenv("TOY_MISSING", KEYS[1])
    monkeypatch.setenv("TOY_SEVERITY", "WARN")
    outcome = run(instance, "dinov3_npy", partition_range=FEW, deferred=True)

    assert outcome.checks == {"dinov3_npy:files_valid": True}
    assert outcome.warnings == {"dinov3_npy:files_valid"}
    assert outcome.findings == {}


def test_job_of_the_definitions_runs_as_a_whole(instance):
    outcome = run(instance, job="count_up")

    assert outcome.success
    assert outcome.run.job_name == "count_up"
    assert outcome.run.remote_job_origin.job_name == "count_up", "the UI can execute it again"


def test_console_stays_free_for_our_own_progress(instance, capfd, monkeypatch):
    """Neither Dagster's lines nor its traceback of a failing step is printed. Spec: docs/spec/conventions.md#messages"""
    run(instance, "dinov3_npy", partition_range=FEW, deferred=True)
    monkeypatch.setenv("TOY_BREAK", "ours")
    run(instance, "dinov3_npy", partition_range=FEW, deferred=True)

    assert capfd.readouterr() == ("", "")


# ---- failures


def test_our_error_is_reported_in_its_own_words(instance, monkeypatch):
    """The message has what, where, why and do, without Dagster's frames; other steps are done.

    Spec: docs/spec/conventions.md#completion-and-identity
    """
    monkeypatch.setenv("TOY_BREAK", "ours")
    outcome = run(instance, "dinov3_npy", "plain", partition_range=FEW)

    message = "two models\n  where: here\n  why:   never mixed\n  do:    choose one"
    assert not outcome.success
    assert outcome.failures == (StepFailure("dinov3_npy", "ModelMismatch", message),)
    assert outcome.error == message
    assert not outcome.only_images_failed
    assert instance.get_materialized_partitions(dg.AssetKey("plain")) == set(KEYS[:5])


def test_foreign_error_keeps_its_frames(instance, monkeypatch):
    """An unexpected error keeps its traceback for debugging."""
    monkeypatch.setenv("TOY_BREAK", "foreign")
    outcome = run(instance, "dinov3_npy", partition_range=FEW, deferred=True)

    assert outcome.error == "ZeroDivisionError: unexpected"
    assert "toy_defs.py" in outcome.failures[0].trace


@pytest.mark.parametrize(
    "message", ["OSError: [Errno 28] No space left on device\n", "sqlite3.OperationalError: database or disk is full\n"]
)
def test_full_disk_in_a_step_is_reported_with_its_remedy(message):
    """Dagster keeps only the text of an exception. Spec: docs/spec/conventions.md#atomic-names"""
    failure = _explained("dinov3_npy", SerializableErrorInfo(message, ["frames"], message.partition(":")[0]))

    assert failure.text.startswith(message.strip())
    assert "do:    " in failure.text
    assert "free space" in failure.text


def test_broken_resource_is_reported_though_no_step_ran(instance, monkeypatch):
    monkeypatch.setenv("TOY_BREAK", "resource")
    outcome = run(instance, "totals")

    assert outcome.run.status is dg.DagsterRunStatus.FAILURE
    assert outcome.error == "the resource is broken\n  where: resource\n  do:    mend it"


def test_failure_over_single_images_is_known_as_such(instance, monkeypatch):
    """After it the next range can continue; any other error would occur again."""
    monkeypatch.setenv("TOY_MISSING", f"{KEYS[0]},{KEYS[3]}")
    outcome = run(instance, "dinov3_npy", partition_range=FEW)

    assert outcome.only_images_failed
    assert outcome.error == f"2 images did not arrive: {KEYS[0]}, {KEYS[3]}"


# ---- stopping


class CommandLine:
    """A run in another process, some tens of rows into its stream."""

    def __init__(self, data_root, tmp_path, **environment):
        self.mark = tmp_path / "mark"
        environment = {
            **os.environ, **environment_of(data_root), "TOY_SLEEP": "0.02", "TOY_MARK": str(self.mark),
            "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), SEARCH_PATH]), "PYTHONWARNINGS": "ignore", **environment,
        }  # fmt: skip
        program = "import toy_defs; toy_defs.run_from_command_line()"
        self.process = subprocess.Popen(
            [sys.executable, "-c", program, KEYS[0], KEYS[-1]],
            cwd=PROJECT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip

    def rows(self) -> int:
        return len(self.mark.read_text().splitlines()) if self.mark.exists() else 0

    def wait_for_rows(self, count: int) -> None:
        deadline = time.monotonic() + 40
        while self.rows() < count:
            assert self.process.poll() is None, self.process.communicate()[0]
            assert time.monotonic() < deadline, "the run does not get on"
            time.sleep(0.05)


@pytest.fixture
def command_line(instance, data_root, tmp_path):
    """A run that has streamed for over a second: at least one batch of events is stored, and many rows remain."""
    started = CommandLine(data_root, tmp_path)
    try:
        started.wait_for_rows(90)
        yield started
    finally:
        started.process.kill()
        started.process.communicate()


def events_of(instance) -> list[str]:
    records = instance.fetch_materializations(STREAMED, limit=1000).records
    return sorted(record.partition_key for record in records)


def assert_all_rows_are_told(instance, command_line):
    """Each row is reported once, and no other; the row during which the signal arrived may be marked or not."""
    reported = events_of(instance)
    assert reported == KEYS[: len(reported)]
    assert len(reported) - command_line.rows() in {0, 1}
    assert len(reported) < len(KEYS)


def test_run_terminated_in_the_ui_stops_within_seconds_with_its_work_kept(instance, command_line):
    """The UI can only write CANCELING into the history."""
    (live,) = instance.get_runs()
    asked = time.monotonic()
    instance.report_run_canceling(live)

    output, _ = command_line.process.communicate(timeout=20)

    assert time.monotonic() - asked < 8
    assert command_line.process.returncode == 128 + signal.SIGINT, output
    assert output.split() == ["CANCELED", str(int(signal.SIGINT))]
    assert_all_rows_are_told(instance, command_line)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_stops_the_run_with_its_work_kept(instance, command_line, number):
    """The exit codes 130 and 143 show which signal it was. Spec: docs/spec/conventions.md#exit-codes"""
    command_line.process.send_signal(number)

    output, _ = command_line.process.communicate(timeout=20)

    assert command_line.process.returncode == 128 + number, output
    assert output.split() == ["FAILURE", str(int(number))]
    assert_all_rows_are_told(instance, command_line)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_that_python_forgets_stops_the_run_too(instance, data_root, tmp_path, number):
    """It arrives during a callback of the garbage collector, from which no error propagates.

    Spec: docs/spec/conventions.md#exit-codes
    """
    process = CommandLine(data_root, tmp_path, TOY_SIGNAL=str(int(number))).process

    output, _ = process.communicate(timeout=60)

    assert process.returncode == 128 + number, output
    assert output.split() == ["FAILURE", str(int(number))]
    assert len(events_of(instance)) < len(KEYS)


def test_killed_run_keeps_its_flushed_events_and_is_swept(instance, command_line):
    """kill -9 loses at most the last batch, and the next command reports the run as failed."""
    command_line.process.kill()
    command_line.process.wait()
    (live,) = instance.get_runs()
    assert live.status is dg.DagsterRunStatus.STARTED

    assert sweep(instance) == [live.run_id]

    (over,) = instance.get_runs()
    (failure,) = instance.all_logs(over.run_id, of_type=DagsterEventType.RUN_FAILURE)
    assert over.status is dg.DagsterRunStatus.FAILURE
    assert failure.dagster_event.message == KILLED
    kept = events_of(instance)
    assert kept
    assert kept == KEYS[: len(kept)]
    assert sweep(instance) == []


def test_next_run_sweeps_what_a_dead_process_left(instance):
    """Dagster's queue would wait for such a run for ever. Spec: docs/spec/conventions.md#runs-of-dead-processes"""
    dead = owner_name().partition("-")[0] + "-0123456789ab"
    ids = {}
    for name, owner in {"dead": dead, "living": owner_name(), "elsewhere": "abc-0123456789ab", "unnamed": None}.items():
        left = instance.create_run_for_job(_toy_job(), status=dg.DagsterRunStatus.STARTED)
        ids[name] = left.run_id
        if owner:
            instance.add_run_tags(left.run_id, {OWNER_TAG: f"{owner}/{left.run_id}"})
    copied = instance.create_run_for_job(_toy_job(), status=dg.DagsterRunStatus.STARTED)
    instance.add_run_tags(copied.run_id, {OWNER_TAG: f"{dead}/{ids['dead']}"})

    assert run(instance, "totals").success

    failed = instance.get_runs(dg.RunsFilter(statuses=[dg.DagsterRunStatus.FAILURE]))
    assert [swept.run_id for swept in failed] == [ids["dead"]]


def _toy_job():
    return toy_definitions().resolve_implicit_global_asset_job_def()


def test_signal_handlers_are_as_before_after_a_run(instance):
    """A command continues after its first run, so Ctrl-C must have its usual effect."""
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    threads = threading.active_count()
    run(instance, "totals")

    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
    assert signal.set_wakeup_fd(-1) == -1
    assert threading.active_count() == threads


def test_run_that_does_not_fit_the_definitions_leaves_nothing_live(instance):
    """An unknown asset is an error of the caller: it is raised instead of being reported in an outcome."""
    with pytest.raises(Exception, match="no_such_asset"):
        run(instance, "no_such_asset")

    assert [r for r in instance.get_runs() if not r.is_finished] == []


def test_run_that_fails_while_it_is_created_leaves_nothing_live(instance, monkeypatch):
    """Dagster stores the run before the planned events of its assets, and the history may be locked or full in between."""

    report = instance.report_dagster_event

    def locked(event, *arguments, **options):
        if event.event_type is DagsterEventType.ASSET_MATERIALIZATION_PLANNED:
            raise RuntimeError("database is locked")
        return report(event, *arguments, **options)

    monkeypatch.setattr(instance, "report_dagster_event", locked)

    with pytest.raises(RuntimeError, match="locked"):
        run(instance, "totals")

    assert [r.status for r in instance.get_runs()] == [dg.DagsterRunStatus.FAILURE]
