"""The UI's hand on runs: what it launches with streamed assets gets the defer tag, what it terminates is told so.

Definitions cannot set that tag, and without it Dagster marks a whole range as materialised, bad images too.
Our command line, jobs and sensors carry it from the start.
"""

import dagster as dg
from dagster._core.run_coordinator import QueuedRunCoordinator, SubmitRunContext
from dagster._core.storage.tags import GRPC_INFO_TAG

from imagemill.embedding_specs import embedding_specs
from io_managers.events import DEFER, DEFER_TAG, PLANNED_TAG, is_orphan, is_run_of_ours


def streamed_assets() -> frozenset[dg.AssetKey]:
    """The assets that report each image themselves: one per embedding kind, registered until now."""
    return frozenset(dg.AssetKey(spec.kind) for spec in embedding_specs())


class DeferCoordinator(QueuedRunCoordinator):
    """Dagster's queue, which also tags what it is given and reaches the runs of our command line."""

    def submit_run(self, context: SubmitRunContext) -> dg.DagsterRun:
        run = context.dagster_run
        if DEFER_TAG not in run.tags and not streamed_assets().isdisjoint(run.asset_selection or ()):
            # The run exists already, and with it Dagster's row "planned" for every image: PLANNED_TAG remembers that.
            self._instance.add_run_tags(run.run_id, {**DEFER, PLANNED_TAG: run.run_id})
            tagged = self._instance.get_run_by_id(run.run_id)
            assert tagged
            context = SubmitRunContext(tagged, context.workspace)
        return super().submit_run(context)

    def cancel_run(self, run_id: str) -> bool:
        """Terminate a run. One of our command line is told by the history alone, which its watcher reads."""
        run = self._instance.get_run_by_id(run_id)
        if run is None or run.is_finished or GRPC_INFO_TAG in run.tags or not is_run_of_ours(run):
            return super().cancel_run(run_id)
        self._instance.report_run_canceling(run)
        if is_orphan(run):
            self._instance.report_run_canceled(run, "The process of this run was gone already.")
        return True
