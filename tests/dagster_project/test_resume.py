"""The job `resume_missing`: what `imagemill run` does, as nested runs of a run of the UI."""

import os
import random
import signal
import subprocess
import sys
import time

import dagster as dg
import pytest
import yaml
from dagster._core.op_concurrency_limits_counter import GlobalOpConcurrencyLimitsCounter

from dagster_project.definitions import build_definitions
from dagster_project.deployments import test_resources
from dagster_project.internals.coordinator import EMBED_JOB, PUBLISH_JOB, RESUME_JOB
from dagster_project.internals.instance import environment_of, open_instance
from dagster_project.internals.runs import sweep
from dagster_project.resume import make_missing
from imagemill.domain.embedding_specs import embedding_specs
from resources.dagster_internals.events import OWNER_TAG, PARENT_TAG
from resources.keys import ROOT_TAG
from tests.helpers.product import PROJECT, SEARCH_PATH, imagemill, photos
from tests.helpers.ui import STUBBED, wait_until
from tests.helpers.wiring import QUIET, failure_of, stub_every_kind

STEP = make_missing.name
CANCELED, FAILURE, SUCCESS = dg.DagsterRunStatus.CANCELED, dg.DagsterRunStatus.FAILURE, dg.DagsterRunStatus.SUCCESS


@pytest.fixture
def stubs(monkeypatch):
    stub_every_kind(monkeypatch)


def resume(root, **config):
    """Run the job as the UI's launchpad does, and return the result and all runs, oldest first."""
    job = build_definitions(test_resources(str(root.path))).resolve_job_def(RESUME_JOB)
    with open_instance(root) as instance:
        known = {run.run_id for run in instance.get_runs()}
        result = job.execute_in_process(
            instance=instance, run_config={**QUIET, "ops": {STEP: {"config": config}}}, raise_on_error=False
        )
        return result, [run for run in reversed(instance.get_runs()) if run.run_id not in known]


def files(root, kind="dinov3"):
    return {path.stem for path in (root.derived / kind).glob("*.npy")}


def remove(root, ids, kind="dinov3"):
    for image_id in ids:
        (root.derived / kind / f"{image_id}.npy").unlink()


# ---- what it makes


def test_new_root_is_complete_after_one_run_with_two_nested_ones(data_root, stubs):
    """The nested runs name their parent, and are those of `imagemill run`."""
    photos(data_root.approved, 6)

    result, (parent, embedding, publishing) = resume(data_root)

    assert result.success
    assert [len(files(data_root, spec.folder)) for spec in embedding_specs()] == [6, 6, 6]
    assert len(data_root.stage2_jsonl.read_text().splitlines()) == 6
    assert list(data_root.shards.rglob("*.tar"))
    assert parent.job_name == RESUME_JOB
    assert embedding.asset_selection == {dg.AssetKey(spec.kind) for spec in embedding_specs()}
    assert publishing.asset_selection == {dg.AssetKey("stage2_jsonl"), dg.AssetKey("bucket_shards")}
    assert [run.tags.get(PARENT_TAG) for run in (embedding, publishing)] == [parent.run_id] * 2
    assert [run.status for run in (parent, embedding, publishing)] == [SUCCESS] * 3


def test_scattered_missing_files_are_one_embedding_run(data_root, stubs):
    """They are found on the disk; files that exist keep their modification times."""
    photos(data_root.approved, 40)
    assert resume(data_root)[0].success
    gone = {f"photo{n:04d}" for n in random.Random(0).sample(range(40), 12)}
    remove(data_root, gone)
    kept = {path: path.stat().st_mtime_ns for path in data_root.derived.rglob("*.npy")}

    result, runs = resume(data_root)

    assert result.success
    assert len(runs) == 3
    assert len(files(data_root)) == 40
    assert {path: path.stat().st_mtime_ns for path in kept} == kept


def test_complete_root_starts_no_nested_run(data_root, stubs):
    photos(data_root.approved, 2)
    resume(data_root)

    result, runs = resume(data_root)

    assert result.success
    assert [run.job_name for run in runs] == [RESUME_JOB]


def test_refused_image_fails_only_the_outer_run_and_is_named(data_root, stubs):
    """All other work is done. Spec: docs/spec/conventions.md#refused-and-failed"""
    photos(data_root.approved, 3)
    (data_root.approved / "broken.jpg").write_bytes(b"no image")
    (data_root.approved / "broken.txt").write_text("no image")
    (data_root.approved / "notes.pdf").write_text("neither")

    result, runs = resume(data_root)

    message = failure_of(result, STEP)
    assert message.startswith(
        "1 image did not arrive, everything else of this data root is done\n  broken: undecodable: "
    )
    assert "notes" not in message
    assert [run.status for run in runs] == [FAILURE, SUCCESS, SUCCESS]
    assert files(data_root) == {"photo0000", "photo0001", "photo0002"}
    assert list(data_root.shards.rglob("*.tar"))


def test_failure_of_a_nested_run_is_the_failure_of_the_outer_one(data_root, stubs):
    photos(data_root.approved, 2)
    data_root.config_file.write_text("encoders: {dinov3_npy: {model: no such model}}")

    result, runs = resume(data_root)

    assert "no such model cannot be found" in failure_of(result, STEP)
    assert [run.status for run in runs] == [FAILURE]


def test_only_named_images_are_embedded(data_root, stubs):
    photos(data_root.approved, 5)

    result, runs = resume(data_root, only=["photo0001", "photo0003"])

    assert result.success
    assert files(data_root) == {"photo0001", "photo0003"}
    assert len(runs) == 3
    assert len(data_root.stage2_jsonl.read_text().splitlines()) == 2


def test_limit_is_the_number_of_images_with_work(data_root, stubs):
    photos(data_root.approved, 5)
    resume(data_root, only=["photo0000"])

    resume(data_root, limit=2)

    assert files(data_root) == {"photo0000", "photo0001", "photo0002"}


def test_unknown_image_is_refused_with_a_similar_name(data_root, stubs):
    photos(data_root.approved, 2)

    result, runs = resume(data_root, only=["photo000"])

    message = failure_of(result, STEP)
    assert "no image in approved/ has this id: photo000" in message
    assert "photo0000" in message
    assert len(runs) == 1


# ---- pools


def test_queue_starts_one_of_the_runs_that_load_models(data_root):
    """With several concurrent runs. The publishing run needs no model."""
    definitions = build_definitions(test_resources(str(data_root.path)))
    with open_instance(data_root) as instance:

        def created(job, status):
            return instance.create_run_for_job(definitions.resolve_job_def(job), status=status)

        running = created(RESUME_JOB, dg.DagsterRunStatus.STARTED)
        waiting = [created(job, dg.DagsterRunStatus.NOT_STARTED) for job in (EMBED_JOB, RESUME_JOB, PUBLISH_JOB)]
        log = instance.event_log_storage
        counter = GlobalOpConcurrencyLimitsCounter(
            instance,
            waiting,
            instance.get_run_records(dg.RunsFilter(run_ids=[running.run_id])),
            log.get_concurrency_keys(),
            log.get_pool_limits(),
            pool_granularity=instance.get_concurrency_config().pool_config.pool_granularity,
        )

        assert [counter.is_blocked(run) for run in waiting] == [True, True, False]


def test_nested_runs_do_not_wait_for_the_pool_of_a_home_that_limits_steps(data_root, stubs):
    """A `dagster.yaml` of an earlier release does not set the granularity: each step takes a place of its own."""
    photos(data_root.approved, 2)
    with open_instance(data_root):
        pass
    settings = data_root.dagster_home / "dagster.yaml"
    earlier = {name: of for name, of in yaml.safe_load(settings.read_text()).items() if name != "concurrency"}
    settings.write_text(yaml.safe_dump(earlier))
    with open_instance(data_root) as instance:
        instance.event_log_storage.set_concurrency_slots("gpu", 1)

    result, runs = resume(data_root)

    assert result.success
    assert len(runs) == 3


# ---- stopping


class Resuming:
    """The job in another process, as a code server executes it."""

    PROGRAM = (
        "from imagemill.domain.layout import DataRoot\n"
        "from dagster_project.definitions import defs\n"
        "from dagster_project.internals.instance import open_instance\n"
        "with open_instance(DataRoot.resolve()) as instance:\n"
        f"    job = defs().resolve_job_def({RESUME_JOB!r})\n"
        "    print(job.execute_in_process(instance=instance, raise_on_error=False).success)\n"
    )

    def __init__(self, root, sleep=0.3):
        path = os.pathsep.join([str(STUBBED), SEARCH_PATH])
        self.process = subprocess.Popen(
            [sys.executable, "-c", self.PROGRAM], cwd=PROJECT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env={**os.environ, **environment_of(root), "PYTHONPATH": path, "IMAGEMILL_STUB_SLEEP": str(sleep)},
        )  # fmt: skip

    def end(self):
        output, _ = self.process.communicate(timeout=60)
        return output


@pytest.fixture
def resuming(data_root):
    """The job in the middle of its embedding run: the first files exist, and many are left."""
    photos(data_root.approved, 200)
    with open_instance(data_root):
        pass
    started = Resuming(data_root)
    try:
        wait_until(lambda: started.process.poll() is not None or files(data_root), 60, "the first files exist")
        assert started.process.poll() is None, started.end()
        yield started
    finally:
        started.process.kill()
        started.process.communicate()


def runs_of(instance):
    """Return the outer run and the nested one."""
    parent, nested = sorted(instance.get_runs(), key=lambda run: PARENT_TAG in run.tags)
    assert (parent.job_name, nested.tags[PARENT_TAG]) == (RESUME_JOB, parent.run_id)
    return parent, nested


def test_nested_runs_of_a_root_with_a_name_are_those_of_that_root(data_root, monkeypatch, tmp_path):
    """Keys, tags and code location. Spec: docs/spec/conventions.md#several-data-roots"""
    photos(data_root.approved, 3)
    data_root.config_file.write_text("name: animals\n")
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path / "history"))
    assert "True" in Resuming(data_root, sleep=0).end()

    with dg.DagsterInstance.get() as instance:
        parent, embedding, publishing = reversed(instance.get_runs())
    assert {run.tags[ROOT_TAG] for run in (parent, embedding, publishing)} == {"animals"}
    assert embedding.asset_selection == {dg.AssetKey(["animals", spec.kind]) for spec in embedding_specs()}
    assert {run.remote_job_origin.location_name for run in (embedding, publishing)} == {"animals"}
    assert publishing.tags[PARENT_TAG] == parent.run_id


def test_terminate_ends_the_nested_run_then_the_outer_one(data_root, resuming):
    """Finished work is kept, and the next run makes the rest."""
    with open_instance(data_root) as instance:
        parent, _ = runs_of(instance)
        asked = time.monotonic()
        assert instance.run_coordinator.cancel_run(parent.run_id)

        output = resuming.end()

        assert time.monotonic() - asked < 15, output
        assert [run.status for run in runs_of(instance)] == [CANCELED, CANCELED], output
        ended = [instance.get_run_record_by_id(run.run_id).end_time for run in runs_of(instance)]
        assert ended[1] <= ended[0]
    assert 0 < len(files(data_root)) < 200


def test_terminating_the_nested_run_ends_both(data_root, resuming):
    with open_instance(data_root) as instance:
        _, nested = runs_of(instance)
        assert instance.run_coordinator.cancel_run(nested.run_id)

        output = resuming.end()

        assert [run.status for run in runs_of(instance)] == [CANCELED, CANCELED], output


def test_end_of_the_service_fails_both(data_root, resuming):
    resuming.process.send_signal(signal.SIGTERM)
    output = resuming.end()

    with open_instance(data_root) as instance:
        assert [run.status for run in runs_of(instance)] == [FAILURE, FAILURE], output


def test_kill_fails_both_at_the_next_command(data_root, resuming):
    """The command then makes the rest. Spec: docs/spec/conventions.md#runs-of-dead-processes"""
    resuming.process.kill()
    resuming.process.wait()
    with open_instance(data_root) as instance:
        killed = runs_of(instance)
        assert all(not run.is_finished and OWNER_TAG in run.tags for run in killed)

    done = imagemill("run", "--data-root", data_root.path, stub=True)

    assert done.returncode == 0, done.stdout + done.stderr
    assert len(files(data_root)) == 200
    with open_instance(data_root) as instance:
        assert [instance.get_run_by_id(run.run_id).status for run in killed] == [FAILURE, FAILURE]
        assert sweep(instance) == []
