"""Run coordinator: tags UI-launched runs of streamed assets, and forwards terminations to runs of the command line.

Definitions cannot set the defer tag, and without it Dagster marks a whole range as materialised, including failed images.
Our command line, jobs and sensors set it from the start.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import dagster as dg
from dagster._core.run_coordinator import QueuedRunCoordinator, SubmitRunContext
from dagster._core.storage.dagster_run import NOT_FINISHED_STATUSES

from dagster_project.command_line import COMMAND_TAG
from imagemill.domain.buckets import BUCKETS
from resources.dagster_internals.events import (
    DEFER,
    PARENT_TAG,
    PLANNED_TAG,
    STREAMED_TAG,
    UI_TAG,
    is_command_line_run,
    is_orphan,
)
from resources.dagster_internals.tags import (
    DEFER_TAG,
    MAX_RETRIES_TAG,
    PARTITION_TAG,
    RANGE_START_TAG,
    SCHEDULE_NAME_TAG,
    SENSOR_NAME_TAG,
    range_tags,
)

if TYPE_CHECKING:
    from dagster._core.workspace.context import BaseWorkspaceRequestContext

EMBED_JOB, EMBED_RANGE_JOB, PUBLISH_JOB, RESUME_JOB = "embed_images", "embed_range", "publish_shards", "resume_missing"

_LAUNCHED_BY_DAEMON = {SENSOR_NAME_TAG, SCHEDULE_NAME_TAG}
_REPEATED = " (executed again in the UI)"
_PARTITION_TAGS = {PARTITION_TAG, RANGE_START_TAG}


class DeferCoordinator(QueuedRunCoordinator):
    """Dagster's run queue, which also tags submitted runs and can terminate runs of our command line."""

    def submit_run(self, context: SubmitRunContext) -> dg.DagsterRun:
        """Add our tags to a run, and submit it."""
        run = context.dagster_run
        if tags := {**_embedding_tags(run, context.workspace), **_bucket_tags(run), **_repeated_tags(run)}:
            self._instance.add_run_tags(run.run_id, tags)
            tagged = self._instance.get_run_by_id(run.run_id)
            assert tagged
            context = SubmitRunContext(tagged, context.workspace)
        return super().submit_run(context)

    def cancel_run(self, run_id: str) -> bool:
        """Terminate a run.

        The process of a command line run reads the termination from the history, and so does one that executes a nested run: it
        ends that run first. Only the process knows whether its nested run has just ended.
        """
        run = self._instance.get_run_by_id(run_id)
        nested = [] if run is None or run.is_finished else self._nested(run_id)
        if run is None or run.is_finished or not (nested or is_command_line_run(run)):
            return super().cancel_run(run_id)
        self._instance.report_run_canceling(run)
        for dead in filter(is_orphan, (*nested, run)):
            self._instance.report_run_canceled(dead, "The process of this run was gone already.")
        return True

    def _nested(self, run_id: str) -> Sequence[dg.DagsterRun]:
        """Return the unfinished nested runs of a run."""
        return self._instance.get_runs(dg.RunsFilter(statuses=NOT_FINISHED_STATUSES, tags={PARENT_TAG: run_id}))


def _embeds(run: dg.DagsterRun, workspace: "BaseWorkspaceRequestContext") -> bool:
    """Return whether a run makes embeddings, by its job or by the tag of a selected asset.

    Locations may have other kinds than this process, so names say nothing.
    """
    if run.job_name in (EMBED_JOB, EMBED_RANGE_JOB):
        return True
    if not run.asset_selection:
        return False
    graph = workspace.asset_graph
    return any(graph.has(key) and STREAMED_TAG in graph.get(key).tags for key in run.asset_selection)


def _embedding_tags(run: dg.DagsterRun, workspace: "BaseWorkspaceRequestContext") -> dict[str, str]:
    """Return the tags of a run that makes embeddings: how its images are reported, and how it ends."""
    if not _embeds(run, workspace):
        return {}
    tags = {}
    if not _LAUNCHED_BY_DAEMON & run.tags.keys():
        # Missing images fail such a run; a retry would leave them out and succeed.
        tags |= {UI_TAG: run.run_id, MAX_RETRIES_TAG: "0"}
    if DEFER_TAG not in run.tags:
        # The run exists already, and so do Dagster's "planned" rows for every image: PLANNED_TAG records that.
        tags |= {**DEFER, PLANNED_TAG: run.run_id}
    return tags


def _bucket_tags(run: dg.DagsterRun) -> dict[str, str]:
    """Return the range of all buckets for a run of `publish_shards` without partitions."""
    if run.job_name != PUBLISH_JOB or _PARTITION_TAGS & run.tags.keys():
        return {}
    return range_tags(BUCKETS[0], BUCKETS[-1])


def _repeated_tags(run: dg.DagsterRun) -> dict[str, str]:
    """Return the changed command tag of a re-executed run, which inherits its parent's but was not started by a command."""
    command = run.tags.get(COMMAND_TAG)
    if command is None or command.endswith(_REPEATED):
        return {}
    return {COMMAND_TAG: f"{command}{_REPEATED}"}
