"""Asset events of an image asset while its files are published: one event per image, written in batches.

    row arrives ──add──> buffer ──500 events or 1 s──> event log (one transaction)
                            └── a run without the defer tag: buffered, and stored only if the step fails

In a range run with DEFER_TAG Dagster writes no events of its own, so each asset reports the images that arrived
(0.3 ms per image instead of 15); kill -9 loses at most one batch of events, never a file.

A batch is stored by dagster_project/internals/storage.py.

Private names of Dagster 1.13 are used: tests/resources/dagster_internals/test_events.py compares the events with Dagster's own.
"""

import signal
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, Self

import dagster as dg

from imagemill.fs.owners import is_dead_among, is_dead_owner, owner_name
from resources.dagster_internals.missing import report_missing
from resources.dagster_internals.tags import (
    CODE_VERSION_TAG,
    DATA_VERSION_TAG,
    DEFER_TAG,
    GRPC_INFO_TAG,
    INPUT_DATA_VERSION_PREFIX,
    INPUT_POINTER_PREFIX,
    IS_USER_PROVIDED_TAG,
    NO_POINTER,
)

try:
    from resources.dagster_internals.entries import MaterializationEntries, new_entry
except ImportError as missing:
    new_entry = MaterializationEntries = None
    report_missing(missing, "events are stored one at a time: about 12 ms per image instead of 0.6")

try:
    from resources.dagster_internals.failures import ExplainedFailure
except ImportError as missing:
    ExplainedFailure = dg.Failure
    report_missing(missing, "the UI shows a stack trace with each failure that names images")

DEFER = {DEFER_TAG: "true"}
# All contain the id of the run that they were written for, because a re-execution inherits tags that do not apply to it.
OWNER_TAG = "imagemill/owner"
PLANNED_TAG = "imagemill/planned"
UI_TAG = "imagemill/launched_in_ui"
# Of an asset: its runs report each partition themselves.
STREAMED_TAG = "imagemill/streamed"
# Tag of a nested run: id of the run whose step executes it.
PARENT_TAG = "imagemill/parent_run"

# Metadata key of a failure that concerns only single images.
IMAGES_FAILED = "images"

BATCH_EVENTS = 500
BATCH_SECONDS = 1.0
SHOWN_IDS = 20

AssetEvent = dg.AssetMaterialization | dg.AssetObservation | dg.AssetCheckEvaluation
AnyContext = dg.OutputContext | dg.AssetExecutionContext


# ---- kind of run


def deferred(context: AnyContext) -> bool:
    """Return whether the run's assets report their own events. Otherwise Dagster marks the whole range when the step succeeds."""
    return _run_of(context).tags.get(DEFER_TAG) == "true"


def announced(context: AnyContext) -> bool:
    """Return whether Dagster announced this run's images as planned before the coordinator deferred them."""
    run = _run_of(context)
    return run.tags.get(PLANNED_TAG) == run.run_id


def launched_in_ui(context: AnyContext) -> bool:
    """Return whether a person launched this run in the UI, including backfills, jobs and re-executions.

    Such a step ends with a `dg.Failure` if images are missing: the UI then shows exactly those as failed, and names them.
    """
    run = _run_of(context)
    return run.run_id in {run.tags.get(UI_TAG), run.tags.get(PLANNED_TAG)}


def owner_of_run(run_id: str) -> str:
    """Return the value of OWNER_TAG for a run executed by this process."""
    return f"{owner_name()}/{run_id}"


def is_run_of_ours(run: dg.DagsterRun) -> bool:
    """Return whether a process of ours executes this run. A re-execution inherits its parent's tags, hence the run id."""
    return run.tags.get(OWNER_TAG, "").partition("/")[2] == run.run_id


def is_command_line_run(run: dg.DagsterRun) -> bool:
    """Return whether a process of the command line executes this run; a run of the UI is also tagged by its code server."""
    return is_run_of_ours(run) and GRPC_INFO_TAG not in run.tags


def claim_run(instance: dg.DagsterInstance, run: dg.DagsterRun) -> None:
    """Tag a run with this process, which executes all of its steps, so that a sweep can detect the death of the process."""
    if run.tags.get(OWNER_TAG) != (owner := owner_of_run(run.run_id)):
        instance.add_run_tags(run.run_id, {OWNER_TAG: owner})


def is_orphan(run: dg.DagsterRun) -> bool:
    """Return whether the process that executes this run has ended on this machine."""
    return is_run_of_ours(run) and is_dead_owner(run.tags[OWNER_TAG].partition("/")[0])


def is_orphan_in(folders: Iterable[Path], run: dg.DagsterRun) -> bool:
    """Return whether the process that executes this run has ended, if its lock file was in one of these folders."""
    return is_run_of_ours(run) and is_dead_among(folders, run.tags[OWNER_TAG].partition("/")[0])


def _run_of(context: AnyContext) -> dg.DagsterRun:
    return context.step_context.dagster_run if isinstance(context, dg.OutputContext) else context.run


def _claim(context: dg.OutputContext) -> None:
    """Tag a run of a code server with this process, so that a sweep can detect its death.

    A step of another executor runs in a child process that ends before its run does, so such a run stays untagged.
    """
    step_context = context.step_context
    if step_context.job_def.executor_def.name == "in_process":
        claim_run(step_context.instance, step_context.dagster_run)


# ---- interrupts


@contextmanager
def interrupts_held() -> Iterator[None]:
    """Delay SIGINT and SIGTERM until the end of the block, then handle them with the previous handlers.

    An interrupt raised inside SQLite's insert keeps the index locked for as long as its traceback lives.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    held: list[int] = []
    # A handler that is None was not set by Python, so Python could not restore it.
    handlers = {
        number: old for number in (signal.SIGINT, signal.SIGTERM) if (old := signal.getsignal(number)) is not None
    }
    try:
        for number in handlers:
            signal.signal(number, lambda received, _: held.append(received))
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        if held:
            signal.raise_signal(held[0])


# ---- events


def version_tags(
    data_version: str, *, code_version: str, inputs: Mapping[str, str] | None = None, pointer: int | None = None
) -> dict[str, str]:
    """Return the tags by which the UI distinguishes fresh from stale; without them it shows "unsynced".

    Args:
        data_version: fingerprint of the output.
        code_version: code version of the asset that made it.
        inputs: per upstream asset (`"approved_images"`), the fingerprint of the input.
        pointer: newest event in the log before the inputs were read; a later input event with another version makes it stale.
    """
    tags = {
        DATA_VERSION_TAG: data_version,
        IS_USER_PROVIDED_TAG: "true",
        CODE_VERSION_TAG: code_version,
    }
    for upstream, version in (inputs or {}).items():
        tags[f"{INPUT_DATA_VERSION_PREFIX}/{upstream}"] = version
        tags[f"{INPUT_POINTER_PREFIX}/{upstream}"] = str(pointer) if pointer else NO_POINTER
    return tags


class StreamedEvents:
    """The events of one step's output. Use as a context manager inside `handle_output`.

    with StreamedEvents(context) as events:
        for row in rows:
            events.add(row.image_id, data_version=row.content, inputs={"approved_images": row.source})
        if missing:
            raise dg.Failure(...)                  # inside the block: the added events are still stored

    Attributes:
        deferred: whether events are stored as they come. Otherwise they are buffered, dropped if the block succeeds
            (Dagster then marks the range itself) and stored if it fails (Dagster then marks nothing).
    """

    def __init__(self, context: dg.OutputContext) -> None:
        self._step_context = step_context = context.step_context
        self.deferred = deferred(context)
        self._asset_key, self._storage = context.asset_key, step_context.instance.event_log_storage
        self._code_version = step_context.job_def.asset_layer.get(self._asset_key).code_version or step_context.run_id
        self._pointer = self._storage.get_maximum_record_id()
        run = step_context.run_id, step_context.job_name, step_context.step
        self._entries = MaterializationEntries(self._asset_key, *run) if MaterializationEntries else None
        self._buffer: list[Any] = []
        self._observed: list[Any] = []
        self._flushed = time.monotonic()
        _claim(context)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self.deferred or kind is not None:
            self.flush()
        self._store(self._observed)

    def add(
        self,
        partition: str | None,
        *,
        data_version: str,
        inputs: Mapping[str, str] | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> None:
        """Report one partition (None: the whole unpartitioned asset) as materialised; see `version_tags`."""
        tags = version_tags(data_version, code_version=self._code_version, inputs=inputs, pointer=self._pointer)
        if self._entries:
            self._buffer.append(self._entries.entry(partition, metadata or {}, tags))
        else:
            event = dg.AssetMaterialization(self._asset_key, partition=partition, metadata=metadata, tags=tags)
            self._buffer.append(event)
        if self.deferred and (len(self._buffer) >= BATCH_EVENTS or time.monotonic() - self._flushed >= BATCH_SECONDS):
            self.flush()

    def add_check(self, evaluation: dg.AssetCheckEvaluation) -> None:
        """Report a check that Dagster skips because this step fails."""
        self._buffer.append(self._entry(evaluation))

    def observe(self, metadata: Mapping[str, Any]) -> None:
        """Report figures of the whole run: an observation without a partition, stored at the end of the block."""
        self._observed.append(self._entry(dg.AssetObservation(self._asset_key, metadata=metadata)))

    def _entry(self, event: AssetEvent) -> object:
        context = self._step_context
        return new_entry(event, context.run_id, context.job_name, context.step) if new_entry else event

    def flush(self) -> None:
        """Store the buffered events. An interrupt is delayed until the end of the transaction."""
        # The buffer is swapped first, so that after an interrupt no batch is stored a second time.
        batch, self._buffer = self._buffer, []
        self._store(batch)
        self._flushed = time.monotonic()

    def _store(self, batch: list[Any]) -> None:
        if batch:
            with interrupts_held():
                if new_entry:
                    self._storage.store_event_batch(batch)
                else:
                    self._store_each(batch)

    def _store_each(self, events: Iterable[AssetEvent]) -> None:
        for event in events:
            if isinstance(event, dg.AssetMaterialization):
                dg.DagsterEvent.asset_materialization(self._step_context, event)
            elif isinstance(event, dg.AssetObservation):
                dg.DagsterEvent.asset_observation(self._step_context, event)
            else:
                dg.DagsterEvent.asset_check_evaluation(self._step_context, event)


def images_failed(text: str, ids: Sequence[str], metadata: Mapping[str, Any] | None = None) -> dg.Failure:
    """Return the failure of a step that completed everything except these images.

    Args:
        text: message, shown in the UI.
        ids: the missing images.
        metadata: shown with the failure; by default the first ids.
    """
    first = {"first ids": dg.MetadataValue.md("\n".join(f"- {i}" for i in ids[:SHOWN_IDS]))}
    return ExplainedFailure(text, {IMAGES_FAILED: len(ids), **(first if metadata is None else metadata)})


def report_without_run(instance: dg.DagsterInstance, events: Iterable[AssetEvent]) -> int:
    """Record events of files made elsewhere, in batches (0.14 ms each); return their number.

    Dagster compares versions of an external asset by its *observations*; materialisations fill its partition counts.
    """
    stored = 0
    events = iter(events)
    while batch := list(islice(events, BATCH_EVENTS)):
        with interrupts_held():
            if new_entry:
                entries = [new_entry(event) for event in batch]
                instance.event_log_storage.store_event_batch(entries)
            else:
                for event in batch:
                    instance.report_runless_asset_event(event)
            stored += len(batch)
    return stored
