"""Log entries of asset events, equal to those that Dagster writes."""

import logging
import os
import time
from collections.abc import Hashable, Mapping
from typing import TYPE_CHECKING, Any

import dagster as dg
from dagster import DagsterEvent, DagsterEventType, EventLogEntry
from dagster._core.definitions.metadata import normalize_metadata
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


class MaterializationEntries:
    """Log entries of the materialisations of one asset.

    Dagster makes and checks the first of those with the same names of metadata and tags. The others are this entry with
    their own values, which takes a fifth of the time.

    Args:
        asset_key: the asset.
        of_run: run id, job name and step, as `new_entry` takes them.
    """

    def __init__(self, asset_key: dg.AssetKey, *of_run: Any) -> None:
        self._asset_key, self._of_run = asset_key, of_run
        self._first: dict[Hashable, EventLogEntry] = {}

    def entry(self, partition: str | None, metadata: Mapping[str, Any], tags: Mapping[str, str]) -> EventLogEntry:
        """Return the entry of one materialisation. `partition`: None for the whole asset."""
        names = (partition is None, *metadata, None, *tags)
        first = self._first.get(names)
        if first is None:
            event = dg.AssetMaterialization(self._asset_key, partition=partition, metadata=metadata, tags=tags)
            self._first[names] = first = new_entry(event, *self._of_run)
            return first
        of_asset = first.get_dagster_event()
        data: Any = of_asset.event_specific_data
        made = data.materialization._replace(partition=partition, metadata=normalize_metadata(metadata), tags=tags)
        changed = of_asset._replace(event_specific_data=data._replace(materialization=made))
        return first._replace(timestamp=time.time(), dagster_event=changed)
