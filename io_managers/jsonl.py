"""IO manager of the Stage 2 records: target file and counters of a merge. Byte logic is in pipeline/stage2/merge.py."""

from pathlib import Path

import dagster as dg

from imagemill.pipeline.accounting import COUNTERS, count_merge
from imagemill.pipeline.leases import Leased
from imagemill.pipeline.problem_list import current_problems
from imagemill.pipeline.stage2.merge import ASSET, UNMIGRATED, Merge, write_records
from imagemill.store.ledger import Ledger
from io_managers.figures import with_units
from io_managers.table_schemas import COLUMN_SCHEMA, ROW_COUNT, STAGE2_COLUMNS, column_schema
from resources.data_root import DataRootResource

# Units of the counters that do not count records.
_UNITS = {
    **dict.fromkeys((*COUNTERS, "total"), "images"),
    "truncated_captions": "captions",
    "rewritten": "files",
}


class JsonlIOManager(dg.ConfigurableIOManager):
    """Writes `derived/approved_image_dataset.jsonl` in one rename, and only if a byte changed."""

    data_root: dg.ResourceDependency[DataRootResource]

    def handle_output(self, context: dg.OutputContext, obj: Leased) -> None:
        """Run the merge, and record its counts."""
        with obj.claimed() as work:
            counts = _merge(work, obj.ledger)
            obj.ledger.record_counts(context.run_id, obj.asset, counts)
        shown = with_units(counts, "records", **_UNITS)
        table = {ROW_COUNT: counts["records"], COLUMN_SCHEMA: column_schema(STAGE2_COLUMNS)}
        context.add_output_metadata({**shown, **table, "path": dg.MetadataValue.path(str(work.root.stage2_jsonl))})

    def load_input(self, context: dg.InputContext) -> Path:
        """Return the file; read it with `imagemill.formats.jsonl.read_jsonl`."""
        return self.data_root.root().stage2_jsonl


def _merge(merge: Merge, ledger: Ledger) -> dict[str, int]:
    merged = write_records(merge, ledger)
    with ledger.transaction():
        ledger.replace_problems(ASSET, merged.problems, lambda problem: problem.reason in UNMIGRATED)
        ledger.record_changes((image_id, ASSET, what) for image_id, what in merged.changes)
    counts = {
        **merged.counts,
        "truncated_captions": ledger.truncated(),
        **count_merge(merge, ledger, current_problems(merge.inventory.scan, ledger)),
    }
    with ledger.transaction():
        ledger.forget_changes()
        ledger.forget_row_changes()
    return counts
