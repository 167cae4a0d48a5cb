"""Runs that our own command line executes in its process: shown, terminated and re-executed in the UI like any other.

    create ──> execute in this process ──> RunOutcome
                   ▲ a watcher turns "terminate" of the UI into SIGINT; SIGTERM does what SIGINT does
    sweep: a run whose process is gone is reported as failed

Belongs here: starting, stopping and reading the outcome of one run.
Belongs elsewhere: which runs a command needs (work.py), where the history is (instance.py).

Private names of Dagster 1.13 are used: `execute_in_process` and `materialize` can neither be terminated nor re-executed
from the UI, and a launched run needs the daemon and ten times as long to start.
"""

import errno
import importlib
import os
import re
import signal
import sys
import threading
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import dagster as dg
from dagster._core.definitions.assets.job.asset_job import IMPLICIT_ASSET_JOB_NAME
from dagster._core.definitions.reconstruct import ReconstructableJob, ReconstructableRepository
from dagster._core.definitions.repository_definition import SINGLETON_REPOSITORY_NAME
from dagster._core.errors import DagsterAssetCheckFailedError, DagsterExecutionInterruptedError
from dagster._core.events import DagsterEvent, DagsterEventType
from dagster._core.execution.api import execute_run
from dagster._core.execution.plan.objects import ErrorSource
from dagster._core.storage.dagster_run import NOT_FINISHED_STATUSES
from dagster._utils.interrupts import capture_interrupts

from dagster_project.code_location import ATTRIBUTE, LOCATION, MODULE
from dagster_project.history_errors import database_unusable
from imagemill.errors import FAILED_DISK, FULL_DISK, ImagemillError
from resources.dagster_internals.events import DEFER, IMAGES_FAILED, OWNER_TAG, is_orphan, owner_of_run
from resources.dagster_internals.missing import report_missing
from resources.dagster_internals.tags import range_tags

try:
    from dagster._core.remote_origin import RegisteredCodeLocationOrigin, RemoteJobOrigin, RemoteRepositoryOrigin

    def _origin(location: str, job: str) -> "RemoteJobOrigin | None":
        """Return the place of a run's job, by which the UI executes it again."""
        repository = RemoteRepositoryOrigin(RegisteredCodeLocationOrigin(location), SINGLETON_REPOSITORY_NAME)
        return RemoteJobOrigin(repository, job)

except ImportError as missing:
    report_missing(missing, "the UI cannot execute runs of the command line again")

    def _origin(location: str, job: str) -> "RemoteJobOrigin | None":
        return None


if TYPE_CHECKING:
    from dagster._core.remote_origin import RemoteJobOrigin
    from dagster_shared.error import SerializableErrorInfo

KILLED = "killed; run again to resume"
WATCH_SECONDS = 1.0

# Dagster prints each failed step as an ERROR with its own frames; `RunOutcome.error` says it in the user's words.
_QUIET = {"loggers": {"console": {"config": {"log_level": "CRITICAL"}}}}

# How a full disk reads once Dagster has turned its error into text.
_DISK_FULL = (os.strerror(errno.ENOSPC), os.strerror(errno.EDQUOT), "database or disk is full")

_DISK_FAILED = (
    f"OSError: [Errno {errno.EIO}] ",
    "sqlite3.OperationalError: disk I/O error",
    "unable to open database file",
    # Dagster stores a batch of events again, one by one, after the disk has failed in the middle of it.
    "duplicate AssetCheckPlanned events",
)

# Errors of a damaged history as text. Only SQLAlchemy writes the brackets, and the ledger is used without it.
_DAMAGED_HISTORY = re.compile(
    r"\(sqlite3\.\w+\) (database disk image is malformed|disk I/O error|file is not a database)"
)

_STOPPED = {dg.DagsterRunStatus.CANCELING, dg.DagsterRunStatus.CANCELED}


@dataclass(frozen=True, slots=True)
class StepFailure:
    """Why one step failed.

    Attributes:
        step: its key, the asset's name; empty where the run failed before any step.
        kind: class name of the exception (`ModelMismatch`, `Failure`).
        text: what the exception says, laid out by ImagemillError where it is one.
        trace: the frames of the user's code, for errors nobody foresaw; empty for ours.
        only_images: whether single images failed and nothing else (`resources.dagster_internals.events.images_failed`).
    """

    step: str
    kind: str
    text: str
    trace: str = ""
    only_images: bool = False


@dataclass(frozen=True, slots=True)
class RunOutcome:
    """What became of one run.

    Attributes:
        run: as it stands in the history now.
        failures: steps that failed by themselves; a step that an interrupt stopped is not among them.
        checks: `asset:check` → passed, of the checks that this run evaluated; one that warns passes.
        warnings: the checks that warn.
        findings: what the failed ones of them say.
        signal: number of the signal that reached this process meanwhile; SIGINT too where the UI terminated the run.
    """

    run: dg.DagsterRun
    failures: tuple[StepFailure, ...] = ()
    checks: Mapping[str, bool] = field(default_factory=dict)
    findings: Mapping[str, str] = field(default_factory=dict)
    warnings: frozenset[str] = frozenset()
    signal: int | None = None

    @property
    def run_id(self) -> str:
        return self.run.run_id

    @property
    def success(self) -> bool:
        return self.run.is_success

    @property
    def error(self) -> str | None:
        """The failures' texts, one after another; None where no step failed."""
        return "\n".join(dict.fromkeys(failure.text for failure in self.failures)) or None

    @property
    def only_images_failed(self) -> bool:
        return bool(self.failures) and all(failure.only_images for failure in self.failures)


# ---- running


def run_here(
    instance: dg.DagsterInstance,
    assets: Iterable[str | dg.AssetKey],
    *,
    tags: Mapping[str, str] | None = None,
    run_config: Mapping[str, Any] | None = None,
    job: str = IMPLICIT_ASSET_JOB_NAME,
    partition_range: tuple[str, str] | None = None,
    deferred: bool = False,
    module: str = MODULE,
    attribute: str = ATTRIBUTE,
    location: str = LOCATION,
) -> RunOutcome:
    """Execute one run over these assets in this process, and return when it has ended.

    Failing steps, SIGINT, SIGTERM and a termination in the UI end in the outcome, not in an exception; finished work is
    kept. Steps that do not depend on a failed one are still done.

    Args:
        instance: a persistent one (`open_instance`).
        assets: what to materialise; one partitions definition per run.
        tags, run_config: of the run.
        job: a job of the definitions, which runs as a whole if there are no assets.
        partition_range: first and last partition key, in order of registration.
        deferred: whether the assets report their own events (`resources.dagster_internals.events`).
        module, attribute: where the definitions are. location: their name in workspace.yaml, for re-execution.

    Raises:
        DagsterError: the assets, the partition range or the run configuration do not fit the definitions.
    """
    sweep(instance)
    with _signals() as signals, capture_interrupts():
        reconstructable = _job(module, attribute, job, assets)
        given = {
            **(DEFER if deferred else {}),
            **(range_tags(*partition_range) if partition_range else {}),
            **(tags or {}),
        }
        run = _create(instance, reconstructable, location, given, {**_QUIET, **(run_config or {})})
        with _watched(instance, run.run_id):
            try:
                result = execute_run(reconstructable, run, instance)
            except BaseException:
                with suppress(Exception):  # the history itself may be what cannot be written to
                    _report_failed(instance, run.run_id, "the run could not be executed")
                raise
    return _outcome(instance, run.run_id, result.all_events, signals)


def _job(module: str, attribute: str, name: str, assets: Iterable[str | dg.AssetKey]) -> ReconstructableJob:
    keys = frozenset(
        asset if isinstance(asset, dg.AssetKey) else dg.AssetKey.from_user_string(asset) for asset in assets
    )
    importlib.import_module(module)  # Dagster would look for it without the first entry of sys.path
    repository = ReconstructableRepository.for_module(module, attribute)
    job = repository.get_reconstructable_job(name)
    return job.get_subset(asset_selection=keys) if keys else job


def _create(
    instance: dg.DagsterInstance,
    job: ReconstructableJob,
    location: str,
    tags: Mapping[str, str],
    run_config: Mapping[str, Any],
) -> dg.DagsterRun:
    """A run that names its code location, so that the UI can re-execute it, and its process, so that a sweep finds it."""
    run_id, definition = str(uuid.uuid4()), job.get_definition()
    return instance.create_run_for_job(
        job_def=definition,
        run_id=run_id,
        run_config=run_config,
        status=dg.DagsterRunStatus.NOT_STARTED,
        # The job's own tags choose executors and pools; the run's go first.
        tags={**definition.run_tags, **tags, OWNER_TAG: owner_of_run(run_id)},
        asset_selection=job.asset_selection,
        remote_job_origin=_origin(location, definition.name),
        job_code_origin=job.get_python_origin(),
    )


# ---- stopping


@contextmanager
def _signals() -> Iterator[list[int]]:
    """Numbers of the SIGINTs and SIGTERMs of the block, filled in at its end; their handlers are put back.

    Dagster handles both by one function that forgets which it was. The wakeup descriptor is written before any handler.
    """
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield received
        return
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    reading, writing = os.pipe()
    for end in (reading, writing):
        os.set_blocking(end, False)
    before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    try:
        yield received
    finally:
        signal.set_wakeup_fd(before)
        for number, handler in handlers.items():
            if handler is not None:  # None: not set by Python, which then cannot put it back
                signal.signal(number, handler)
        with suppress(BlockingIOError):
            received += [number for number in os.read(reading, 4096) if number in handlers]
        os.close(reading)
        os.close(writing)


@contextmanager
def _watched(instance: dg.DagsterInstance, run_id: str) -> Iterator[None]:
    """Interrupt the main thread when somebody terminates or deletes the run, and again where Python forgot an interrupt.

    The UI can only write a termination into the history: it has no way to this process.
    """
    over = threading.Event()

    def watch() -> None:
        told = False
        while not over.wait(WATCH_SECONDS):
            again = bool(forgotten)
            forgotten.clear()
            if again or (not told and _is_stopped(instance, run_id)):
                told = True
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    watcher = threading.Thread(target=watch, name="run watcher", daemon=True)
    with _forgotten_interrupts() as forgotten:
        watcher.start()
        try:
            yield
        finally:
            over.set()
            watcher.join()


def _is_stopped(instance: dg.DagsterInstance, run_id: str) -> bool:
    try:
        run = instance.get_run_by_id(run_id)
    except Exception:  # a locked database is read again a second later
        return False
    return run is None or run.status in _STOPPED


@contextmanager
def _forgotten_interrupts() -> Iterator[list[object]]:
    """Interrupts that Dagster's handler raised inside a callback of the garbage collector: no error can leave that."""
    forgotten: list[object] = []
    before = sys.unraisablehook

    def take(unraisable: Any) -> None:
        if issubclass(unraisable.exc_type, DagsterExecutionInterruptedError):
            forgotten.append(unraisable.exc_type)
        else:
            before(unraisable)

    sys.unraisablehook = take
    try:
        yield forgotten
    finally:
        sys.unraisablehook = before


def sweep(instance: dg.DagsterInstance) -> list[str]:
    """Report the runs of dead processes of this machine as ended; returns their ids.

    Dagster's run monitoring does not see that such a process is gone, and its queue would wait for it for ever.
    """
    dead = [run for run in instance.get_runs(dg.RunsFilter(statuses=NOT_FINISHED_STATUSES)) if is_orphan(run)]
    for run in dead:
        if run.status is dg.DagsterRunStatus.CANCELING:
            instance.report_run_canceled(run, KILLED)
        else:
            instance.report_run_failed(run, KILLED)
    return [run.run_id for run in dead]


def _report_failed(instance: dg.DagsterInstance, run_id: str, message: str) -> None:
    run = instance.get_run_by_id(run_id)
    if run and not run.is_finished:
        instance.report_run_failed(run, message)


# ---- the outcome


def _outcome(
    instance: dg.DagsterInstance, run_id: str, events: Sequence[DagsterEvent], signals: Sequence[int]
) -> RunOutcome:
    run = instance.get_run_by_id(run_id)
    assert run
    failures = tuple(failure for event in events if (failure := _step_failure(event)))
    if not failures and run.status is dg.DagsterRunStatus.FAILURE and not signals:
        failures = tuple(failure for event in events if (failure := _run_failure(event)))
    evaluations = [
        event.asset_check_evaluation_data
        for event in events
        if event.event_type is DagsterEventType.ASSET_CHECK_EVALUATION
    ]
    warned = {e.asset_check_key.to_user_string() for e in evaluations if not e.passed and not _is_failed(e)}
    checks = {e.asset_check_key.to_user_string(): not _is_failed(e) for e in evaluations}
    findings = {e.asset_check_key.to_user_string(): _said(e) for e in evaluations if _is_failed(e)}
    failures = tuple(_with_findings(failure, findings.values()) for failure in failures)
    return RunOutcome(run, failures, checks, findings, frozenset(warned), signals[0] if signals else None)


def _step_failure(event: DagsterEvent) -> StepFailure | None:
    if not event.is_step_failure or event.step_failure_data.error_source is ErrorSource.INTERRUPT:
        return None
    data, step = event.step_failure_data, event.step_key or ""
    if data.user_failure_data:
        said = data.user_failure_data
        return StepFailure(step, "Failure", said.description or said.label, only_images=IMAGES_FAILED in said.metadata)
    return _explained(step, data.error)


def _is_failed(evaluation: dg.AssetCheckEvaluation) -> bool:
    return not evaluation.passed and evaluation.severity is dg.AssetCheckSeverity.ERROR


def _said(failed: dg.AssetCheckEvaluation) -> str:
    """A failed check with the rules that are broken, and its first findings with their remedies."""
    said = f"check {failed.asset_check_key.to_user_string()} failed: {failed.description}"
    first = failed.metadata.get("first findings")
    return f"{said}\n{first.value}" if first else said


def _with_findings(failure: StepFailure, findings: Iterable[str]) -> StepFailure:
    """Dagster says of a blocking check only that it failed."""
    if failure.kind != DagsterAssetCheckFailedError.__name__:
        return failure
    return replace(failure, text="\n".join(findings), trace="")


def _run_failure(event: DagsterEvent) -> StepFailure | None:
    """The failure of a run that ended outside its steps: a resource, most often."""
    if not event.is_failure or not event.is_job_event:
        return None
    error = getattr(event.event_specific_data, "error", None)
    return _explained("", error) if error else StepFailure("", "", event.message or "the run failed")


def _explained(step: str, error: "SerializableErrorInfo | None") -> StepFailure:
    """The user's exception out of Dagster's around it."""
    if error is None:
        return StepFailure(step, "", "the step failed and said nothing")
    while error.cause and (error.cls_name or "").startswith("Dagster"):
        error = error.cause
    kind, message = error.cls_name or "", error.message.strip()
    ours = re.match(rf"(?:imagemill|resources)[\w.]*\.{re.escape(kind)}: ", message)
    if ours:
        return StepFailure(step, kind, message[ours.end() :])
    if damaged := _DAMAGED_HISTORY.search(message):
        return StepFailure(step, kind, str(database_unusable(Path(os.environ["DAGSTER_HOME"]), damaged[1])))
    if any(text in message for text in _DISK_FULL):
        message = str(ImagemillError(message, do=FULL_DISK))
    elif any(text in message for text in _DISK_FAILED):
        message = str(ImagemillError(message, where=step, do=FAILED_DISK))
    return StepFailure(step, kind, message, "".join(error.stack))
