"""The queue that runs launched in the UI pass through: those with streamed assets leave it with the defer tag.

Definitions cannot set that tag, and without it Dagster marks a whole range as materialised, bad images too.
Our command line, jobs and sensors carry it from the start.
"""

import dagster as dg
from dagster._core.run_coordinator import QueuedRunCoordinator, SubmitRunContext

from imagemill.embedding_specs import embedding_specs
from io_managers.events import DEFER, DEFER_TAG, PLANNED_TAG


def streamed_assets() -> frozenset[dg.AssetKey]:
    """The assets that report each image themselves: one per embedding kind, registered until now."""
    return frozenset(dg.AssetKey(spec.kind) for spec in embedding_specs())


class DeferCoordinator(QueuedRunCoordinator):
    """Dagster's queue, which also tags what it is given."""

    def submit_run(self, context: SubmitRunContext) -> dg.DagsterRun:
        run = context.dagster_run
        if DEFER_TAG not in run.tags and not streamed_assets().isdisjoint(run.asset_selection or ()):
            # The run exists already, and with it Dagster's row "planned" for every image: PLANNED_TAG remembers that.
            self._instance.add_run_tags(run.run_id, {**DEFER, PLANNED_TAG: run.run_id})
            tagged = self._instance.get_run_by_id(run.run_id)
            assert tagged
            context = SubmitRunContext(tagged, context.workspace)
        return super().submit_run(context)
