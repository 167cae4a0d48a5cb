"""Log entries of asset events, equal to those that Dagster writes."""

import logging
import os
import time
from typing import TYPE_CHECKING

import dagster as dg
from dagster import DagsterEvent, DagsterEventType, EventLogEntry
from dagster._core.events import AssetObservationData, StepMaterializationData
from dagster._core.instance.utils import RUNLESS_JOB_NAME, RUNLESS_RUN_ID

if TYPE_CHECKING:
    from dagster._core.execution.plan.step import ExecutionStep

AssetEvent = dg.AssetMaterialization | dg.AssetObservation | dg.AssetCheckEvaluation


def new_entry(
    event: AssetEvent,
    run_id: str = RUNLESS_RUN_ID,
    job_name: str = RUNLESS_JOB_NAME,
    step: "ExecutionStep | None" = None,
) -> EventLogEntry:
    """Return the log entry that Dagster would write for this event; without a run by default."""
    if isinstance(event, dg.AssetMaterialization):
        kind, data = DagsterEventType.ASSET_MATERIALIZATION, StepMaterializationData(event)
        message = event.description or f"Materialized value {' '.join(event.asset_key.path)}."
    elif isinstance(event, dg.AssetCheckEvaluation):
        kind, data, message = DagsterEventType.ASSET_CHECK_EVALUATION, event, ""
    else:
        kind, data, message = DagsterEventType.ASSET_OBSERVATION, AssetObservationData(event), ""
    dagster_event = DagsterEvent(
        event_type_value=kind.value,
        job_name=job_name,
        step_handle=step.handle if step else None,
        node_handle=step.node_handle if step else None,
        step_kind_value=step.kind.value if step else None,
        event_specific_data=data,
        message=message,
        pid=os.getpid() if step else None,
    )
    return EventLogEntry(
        error_info=None,
        level=logging.DEBUG if step else logging.INFO,
        user_message=message if step else "",
        run_id=run_id,
        timestamp=time.time(),
        step_key=step.key if step else None,
        job_name=job_name,
        dagster_event=dagster_event,
    )
