"""IO manager of reports: each is written as soon as it is made, with its counters and pages as metadata.

The content of reports is made in imagemill/pipeline/. A file that already holds a report's bytes keeps its modification time.
"""

from collections import Counter
from pathlib import Path
from typing import Any

import dagster as dg

from imagemill.pipeline.curation.reports import CurationReport, Reports, write_report
from imagemill.pipeline.leases import Leased
from resources.dagster_internals.events import StreamedEvents
from resources.data_root import DataRootResource


class ReportIOManager(dg.ConfigurableIOManager):
    """Writes a stream of reports to files. The asset's metadata `place` names the location below `derived/`."""

    data_root: dg.ResourceDependency[DataRootResource]

    def handle_output(self, context: dg.OutputContext, obj: Leased) -> None:
        """Write the reports, and record their counts."""
        with obj.claimed() as reports:
            counts = self._write(context, reports)
            obj.ledger.record_counts(context.run_id, obj.asset, counts)

    def _write(self, context: dg.OutputContext, obj: Reports) -> dict[str, int]:
        counts: Counter[str] = Counter()
        with StreamedEvents(context) as events:
            for report in obj.stream:
                counts.update({"reports": 1, "rewritten": write_report(report)})
                _report(context, events, report, obj.place)
        return dict(counts)

    def load_input(self, context: dg.InputContext) -> Path:
        """Return the folder or file of the reports."""
        assert context.upstream_output
        return self.data_root.root().derived / context.upstream_output.definition_metadata["place"]


def _report(context: dg.OutputContext, events: StreamedEvents, report: CurationReport, place: Path) -> None:
    """Report to Dagster: as our own event if the run is deferred, else as metadata of the event that Dagster writes."""
    pages = {title: dg.MetadataValue.md(page) for title, page in report.pages.items()}
    if report.partition is None and context.has_asset_partitions:
        # A report on all partitions together is shown with each of them.
        context.step_context.add_asset_metadata(pages)
        return
    metadata: dict[str, Any] = {**report.counts, **pages, "path": dg.MetadataValue.path(str(report.path or place))}
    context.step_context.add_asset_metadata(metadata, partition_key=report.partition)
    events.add(report.partition, data_version=report.version, metadata=metadata)
