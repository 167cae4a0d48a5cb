"""The Stage 2 records on disk: which file a merge becomes. Byte logic is in imagemill/formats/jsonl.py."""

from contextlib import closing
from pathlib import Path

import dagster as dg

from imagemill.formats.jsonl import write_lines
from imagemill.pipeline.merge import Merge, quarantine, unfinished
from resources.data_root import DataRootResource


class JsonlIOManager(dg.ConfigurableIOManager):
    """Writes a merge to `derived/approved_image_dataset.jsonl`, in one rename and only if a byte changed."""

    data_root: dg.ResourceDependency[DataRootResource]

    def handle_output(self, context: dg.OutputContext, obj: Merge) -> None:
        asset = context.asset_key.to_user_string()
        with closing(self.data_root.ledger()) as ledger:
            try:
                counts = self._write(obj)
                ledger.record_counts(context.run_id, asset, counts)
            finally:
                ledger.release(asset, context.run_id)
        context.add_output_metadata({**counts, "path": dg.MetadataValue.path(str(self.data_root.root().stage2_jsonl))})

    def _write(self, obj: Merge) -> dict[str, int]:
        root = self.data_root.root()
        quarantined = quarantine(root.quarantine, root.stage2_jsonl.name, obj.quarantined)
        rewritten = write_lines(root.stage2_jsonl, obj.ordered(), temporary=unfinished(root.stage2_jsonl))
        return {
            "records": len(obj.lines),
            "added": len(obj.added),
            "changed": len(obj.changed),
            "stage1": len(obj.stage1),
            "quarantined": quarantined,
            "rewritten": int(rewritten),
        }

    def load_input(self, context: dg.InputContext) -> Path:
        """The file; read it with `imagemill.formats.jsonl.read_jsonl`."""
        return self.data_root.root().stage2_jsonl
