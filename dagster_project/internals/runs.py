"""Runs that the command line executes in its own process, and that the UI shows, terminates and re-executes like any other.

    create ──> execute in this process ──> RunOutcome
                   ▲ a watcher turns "terminate" of the UI into SIGINT; SIGTERM has the effect of SIGINT
    sweep: a run whose process is gone is reported as failed

The runs of a command are chosen in work.py; the history is located in instance.py.

Private names of Dagster 1.13 are used: `execute_in_process` and `materialize` can neither be terminated nor re-executed
from the UI, and a launched run needs the daemon and takes ten times as long to start.
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
from dagster_project.history_errors import database_unusable, server_unusable
from dagster_project.internals.batched_events import keeping_partitions
from dagster_project.internals.shared_history import folders_of_owners
from imagemill.errors import FAILED_DISK, FULL_DISK, ImagemillError
from resources.dagster_internals.events import (
    DEFER,
    IMAGES_FAILED,
    OWNER_TAG,
    PARENT_TAG,
    is_orphan,
    is_orphan_in,
    owner_of_run,
)
from resources.dagster_internals.missing import report_missing
from resources.dagster_internals.tags import range_tags
from resources.keys import NAME, ROOT_TAGS, asset_key, check_name, is_of_this_root, name_of_op

try:
    from dagster._core.remote_origin import RegisteredCodeLocationOrigin, RemoteJobOrigin, RemoteRepositoryOrigin

    def _origin(location: str, job: str) -> "RemoteJobOrigin | None":
        """Return the origin of a run's job, by which the UI executes it again."""
        repository = RemoteRepositoryOrigin(RegisteredCodeLocationOrigin(location), SINGLETON_REPOSITORY_NAME)
        return RemoteJobOrigin(repository, job)

except ImportError as missing:
    report_missing(missing, "the UI cannot execute runs of the command line again")

    def _origin(location: str, job: str) -> "RemoteJobOrigin | None":
        return None


if TYPE_CHECKING:
    from dagster._core.remote_origin import RemoteJobOrigin
    from dagster_shared.error import SerializableErrorInfo

# Runs that are read together from the history.
RUNS_AT_ONCE = 200

KILLED = "killed; run again to resume"
WATCH_SECONDS = 1.0

# Dagster prints each failed step as an ERROR with its own frames; `RunOutcome.error` has a message for the user instead.
_QUIET = {"loggers": {"console": {"config": {"log_level": "CRITICAL"}}}}

# Texts of a full disk's errors after Dagster's conversion.
_DISK_FULL = (os.strerror(errno.ENOSPC), os.strerror(errno.EDQUOT), "database or disk is full")

_DISK_FAILED = (
    f"OSError: [Errno {errno.EIO}] ",
    "sqlite3.OperationalError: disk I/O error",
    "unable to open database file",
    # After the disk has failed in the middle of a batch of events, Dagster stores the batch again, one by one.
    "duplicate AssetCheckPlanned events",
)

# Errors of a damaged history as text. Only SQLAlchemy writes the brackets, and the ledger is used without it.
_DAMAGED_HISTORY = re.compile(
    r"\(sqlite3\.\w+\) (database disk image is malformed|disk I/O error|file is not a database)"
)

# The same for a history in PostgreSQL: the driver's message, without the statement.
_LOST_SERVER = re.compile(r"\(psycopg2\.[\w.]+\) (.*?)\s*(?:\[SQL: |\(Background on this error|\Z)", re.DOTALL)

_STOPPED = {dg.DagsterRunStatus.CANCELING, dg.DagsterRunStatus.CANCELED}


@dataclass(frozen=True, slots=True)
class StepFailure:
    """Failure of one step.

    Attributes:
        step: key of the step, which is the asset's name; empty if the run failed before any step.
        kind: class name of the exception (`ModelMismatch`, `Failure`).
        text: message of the exception, with the layout of ImagemillError if it is one.
        trace: frames of the user's code, for unexpected errors; empty for ours.
        only_images: whether only single images failed (`resources.dagster_internals.events.images_failed`).
    """

    step: str
    kind: str
    text: str
    trace: str = ""
    only_images: bool = False


@dataclass(frozen=True, slots=True)
class RunOutcome:
    """Outcome of one run.

    Attributes:
        run: its current state in the history.
        failures: steps that failed by themselves; a step that an interrupt stopped is not among them.
        checks: `asset:check` → passed, of the checks that this run evaluated; a warning counts as passed.
        findings: messages of the failed checks.
        warnings: the checks that warned.
        signal: number of the signal that reached this process during the run; SIGINT also if the UI terminated the run.
    """

    run: dg.DagsterRun
    failures: tuple[StepFailure, ...] = ()
    checks: Mapping[str, bool] = field(default_factory=dict)
    findings: Mapping[str, str] = field(default_factory=dict)
    warnings: frozenset[str] = frozenset()
    signal: int | None = None

    @property
    def run_id(self) -> str:
        """Id of the run."""
        return self.run.run_id

    @property
    def success(self) -> bool:
        """Whether the run succeeded."""
        return self.run.is_success

    @property
    def error(self) -> str | None:
        """The failures' messages, one after another; None if no step failed."""
        return "\n".join(dict.fromkeys(failure.text for failure in self.failures)) or None

    @property
    def only_images_failed(self) -> bool:
        """Whether steps failed, but only for single images."""
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
    parent: dg.DagsterRun | None = None,
    module: str = MODULE,
    attribute: str = ATTRIBUTE,
    location: str = NAME or LOCATION,
) -> RunOutcome:
    """Execute one run over these assets in this process, and return when it has ended.

    Failing steps, SIGINT, SIGTERM and a termination in the UI are reported in the outcome, not as an exception; finished work
    is kept. Steps that do not depend on a failed one are still executed.

    Args:
        instance: a persistent one (`open_instance`).
        assets: assets to materialise; one partitions definition per run.
        tags: tags of the run.
        run_config: configuration of the run.
        job: a job of the definitions, which runs as a whole if there are no assets.
        partition_range: first and last partition key, in order of registration.
        deferred: whether the assets report their own events (`resources.dagster_internals.events`).
        parent: run whose step executes this one; if it is terminated, this one is interrupted.
        module: module of the definitions.
        attribute: name of the definitions in their module.
        location: name of the code location in workspace.yaml, for re-execution.

    Raises:
        DagsterError: if the assets, the partition range or the run configuration do not fit the definitions.
    """
    sweep(instance)
    with _signals() as signals, capture_interrupts(), keeping_partitions(instance):
        reconstructable = _job(module, attribute, job, assets)
        given = {
            **(DEFER if deferred else {}),
            **(range_tags(*partition_range) if partition_range else {}),
            **({PARENT_TAG: parent.run_id} if parent else {}),
            **(tags or {}),
        }
        run_id = str(uuid.uuid4())
        try:
            run = _create(instance, reconstructable, location, given, {**_QUIET, **(run_config or {})}, run_id)
            with _watched(instance, run_id, parent):
                result = execute_run(reconstructable, run, instance)
        except BaseException:
            with suppress(Exception):  # the history itself may be unwritable
                _report_failed(instance, run_id, "the run could not be executed")
            raise
        _end_canceling(instance, run_id)
    return _outcome(instance, run_id, result.all_events, signals)


def _job(module: str, attribute: str, name: str, assets: Iterable[str | dg.AssetKey]) -> ReconstructableJob:
    keys = frozenset(asset if isinstance(asset, dg.AssetKey) else asset_key(asset) for asset in assets)
    importlib.import_module(module)  # Dagster would search for it without the first entry of sys.path
    repository = ReconstructableRepository.for_module(module, attribute)
    job = repository.get_reconstructable_job(name)
    return job.get_subset(asset_selection=keys) if keys else job


def _create(
    instance: dg.DagsterInstance,
    job: ReconstructableJob,
    location: str,
    tags: Mapping[str, str],
    run_config: Mapping[str, Any],
    run_id: str,
) -> dg.DagsterRun:
    """Create a run with its code location, so that the UI can re-execute it, and its process, so that a sweep finds it."""
    definition = job.get_definition()
    return instance.create_run_for_job(
        job_def=definition,
        run_id=run_id,
        run_config=run_config,
        status=dg.DagsterRunStatus.NOT_STARTED,
        # The job's own tags select executors and pools; the run's tags override them.
        tags={**definition.run_tags, **tags, OWNER_TAG: owner_of_run(run_id)},
        asset_selection=job.asset_selection,
        remote_job_origin=_origin(location, definition.name),
        job_code_origin=job.get_python_origin(),
    )


# ---- stopping


@contextmanager
def _signals() -> Iterator[list[int]]:
    """Yield a list that contains the SIGINTs and SIGTERMs of the block after its end, and restore their handlers.

    Dagster handles both by one function that forgets the number. The wakeup descriptor is written before any handler runs.
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
            if handler is not None:  # None: not set by Python, which then cannot restore it
                signal.signal(number, handler)
        with suppress(BlockingIOError):
            received += [number for number in os.read(reading, 4096) if number in handlers]
        os.close(reading)
        os.close(writing)


@contextmanager
def _watched(instance: dg.DagsterInstance, run_id: str, parent: dg.DagsterRun | None) -> Iterator[None]:
    """Interrupt the main thread if the run or its parent is terminated or deleted, and again if Python dropped an interrupt.

    The UI can only write a termination into the history, because it cannot reach this process.
    """
    over = threading.Event()

    def watch() -> None:
        interrupted = False
        while not over.wait(WATCH_SECONDS):
            again = bool(dropped)
            dropped.clear()
            if again or (not interrupted and (is_stopped(instance, run_id) or _ends_with(instance, run_id, parent))):
                interrupted = True
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    watcher = threading.Thread(target=watch, name="run watcher", daemon=True)
    with _dropped_interrupts() as dropped:
        watcher.start()
        try:
            yield
        finally:
            over.set()
            watcher.join()


def _ends_with(instance: dg.DagsterInstance, run_id: str, parent: dg.DagsterRun | None) -> bool:
    """Return whether the parent is terminated or deleted; its nested run is then reported as being terminated."""
    if parent is None or not is_stopped(instance, parent.run_id):
        return False
    with suppress(Exception):  # of a locked database: the run then ends FAILURE
        if (run := instance.get_run_by_id(run_id)) and not run.is_finished:
            instance.report_run_canceling(run)
    return True


def _end_canceling(instance: dg.DagsterInstance, run_id: str) -> None:
    """Report a run as terminated that was ended before it could be interrupted."""
    run = instance.get_run_by_id(run_id)
    if run and run.status is dg.DagsterRunStatus.CANCELING:
        instance.report_run_canceled(run)


def is_stopped(instance: dg.DagsterInstance, run_id: str) -> bool:
    """Return whether a run is terminated or deleted."""
    try:
        run = instance.get_run_by_id(run_id)
    except Exception:  # a locked database is read again a second later
        return False
    return run is None or run.status in _STOPPED


@contextmanager
def _dropped_interrupts() -> Iterator[list[object]]:
    """Yield the list of interrupts that Dagster's handler raised inside a garbage collector callback, which Python drops."""
    dropped: list[object] = []
    before = sys.unraisablehook

    def take(unraisable: Any) -> None:
        if issubclass(unraisable.exc_type, DagsterExecutionInterruptedError):
            dropped.append(unraisable.exc_type)
        else:
            before(unraisable)

    sys.unraisablehook = take
    try:
        yield dropped
    finally:
        sys.unraisablehook = before


def free_pools(instance: dg.DagsterInstance, run: dg.DagsterRun) -> None:
    """Give up the places in pools that a step of this run holds, for its nested runs.

    Needed where `dagster.yaml` does not set `concurrency.pools.granularity: run`: each step then takes a place by itself.
    """
    if instance.event_log_storage.supports_global_concurrency_limits:
        instance.event_log_storage.free_concurrency_slots_for_run(run.run_id)


def end_with_nested(instance: dg.DagsterInstance, run: dg.DagsterRun, nested: RunOutcome) -> None:
    """End the step of a run that was terminated, or whose nested run was: then the run ends CANCELED too.

    Raises:
        DagsterExecutionInterruptedError: if either run was terminated, or if the process was interrupted.
    """
    terminated = is_stopped(instance, run.run_id)
    if not terminated and nested.run.status in _STOPPED:
        instance.report_run_canceling(run)
    if terminated or nested.run.status in _STOPPED or nested.signal:
        raise DagsterExecutionInterruptedError


def runs_of_this_root(instance: dg.DagsterInstance, statuses: Sequence[dg.DagsterRunStatus]) -> Iterator[dg.DagsterRun]:
    """Yield this root's runs with these statuses, newest first, however many other roots of the history have between them."""
    wanted, last = dg.RunsFilter(statuses=statuses, tags=ROOT_TAGS), None
    while page := instance.get_runs(wanted, cursor=last, limit=RUNS_AT_ONCE):
        yield from filter(is_of_this_root, page)
        last = page[-1].run_id


def sweep(instance: dg.DagsterInstance) -> list[str]:
    """Report runs of dead processes of this machine as ended; return their ids.

    Dagster's run monitoring does not detect that such a process is gone, and its queue would wait for the run for ever. All roots
    of a history wait for places in its queue, so those of another root are reported too if its lock files are on this machine.
    """
    owners = folders_of_owners(instance)
    dead = [
        run
        for run in instance.get_runs(dg.RunsFilter(statuses=NOT_FINISHED_STATUSES))
        if (is_orphan(run) if is_of_this_root(run) else is_orphan_in(owners, run))
    ]
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
    warned = {check_name(e.asset_check_key) for e in evaluations if not e.passed and not _is_failed(e)}
    checks = {check_name(e.asset_check_key): not _is_failed(e) for e in evaluations}
    findings = {check_name(e.asset_check_key): _check_message(e) for e in evaluations if _is_failed(e)}
    failures = tuple(_with_findings(failure, findings.values()) for failure in failures)
    return RunOutcome(run, failures, checks, findings, frozenset(warned), signals[0] if signals else None)


def _step_failure(event: DagsterEvent) -> StepFailure | None:
    if not event.is_step_failure or event.step_failure_data.error_source is ErrorSource.INTERRUPT:
        return None
    data, step = event.step_failure_data, name_of_op(event.step_key or "")
    if data.user_failure_data:
        failure = data.user_failure_data
        only_images = IMAGES_FAILED in failure.metadata
        return StepFailure(step, "Failure", failure.description or failure.label, only_images=only_images)
    return _explained(step, data.error)


def _is_failed(evaluation: dg.AssetCheckEvaluation) -> bool:
    return not evaluation.passed and evaluation.severity is dg.AssetCheckSeverity.ERROR


def _check_message(failed: dg.AssetCheckEvaluation) -> str:
    """Return the message of a failed check: the violated rules, and the first findings with their remedies."""
    text = f"check {check_name(failed.asset_check_key)} failed: {failed.description}"
    first = failed.metadata.get("first findings")
    return f"{text}\n{first.value}" if first else text


def _with_findings(failure: StepFailure, findings: Iterable[str]) -> StepFailure:
    """Add the findings to the failure of a blocking check, of which Dagster reports only that it failed."""
    if failure.kind != DagsterAssetCheckFailedError.__name__:
        return failure
    return replace(failure, text="\n".join(findings), trace="")


def _run_failure(event: DagsterEvent) -> StepFailure | None:
    """Return the failure of a run that ended outside its steps, most often in a resource."""
    if not event.is_failure or not event.is_job_event:
        return None
    error = getattr(event.event_specific_data, "error", None)
    return _explained("", error) if error else StepFailure("", "", event.message or "the run failed")


def _explained(step: str, error: "SerializableErrorInfo | None") -> StepFailure:
    """Return the failure with the user's exception, extracted from Dagster's wrappers."""
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
    if lost := _LOST_SERVER.search(message):
        return StepFailure(step, kind, str(server_unusable(Path(os.environ["DAGSTER_HOME"]), lost[1])))
    if any(text in message for text in _DISK_FULL):
        message = str(ImagemillError(message, do=FULL_DISK))
    elif any(text in message for text in _DISK_FAILED):
        message = str(ImagemillError(message, where=step, do=FAILED_DISK))
    return StepFailure(step, kind, message, "".join(error.stack))
