"""The light metadata: one JSON line per image that opens and has a caption."""

from contextlib import closing

import dagster as dg
from pydantic import Field

from assets.embeddings import embedding_assets
from imagemill.pipeline.claims import claimed_until_output
from imagemill.pipeline.facts import ASSET, adopt_captions, complete_facts, complete_masks, note_missing_captions
from imagemill.pipeline.merge import Merge, existing_lines, plan_merge
from imagemill.pipeline.scan import survey
from resources.data_root import DataRootResource
from resources.encoders import Encoders


class RecordsConfig(dg.Config):
    """How far a run goes for its records."""

    complete: bool = Field(True, description="Open images no pass has opened yet, tokenise captions without a mask.")


@dg.asset(
    deps=[dg.AssetDep(asset, partition_mapping=dg.AllPartitionMapping()) for asset in embedding_assets],
    io_manager_key="jsonl_io",
    group_name="stage2",
    kinds={"json"},
    owners=["team:imagemill"],
    code_version="1",
)
def stage2_jsonl(
    context: dg.AssetExecutionContext, config: RecordsConfig, data_root: DataRootResource, encoders: Encoders
) -> Merge:
    """`derived/approved_image_dataset.jsonl`: id, path, caption, T5 mask, size, bucket; no embeddings inside.

    Built from the ledger without opening an image that a pass has opened before.
    """
    root = data_root.root()
    with closing(data_root.ledger()) as ledger, claimed_until_output(ledger, ASSET, ["all"], context.run_id):
        scan = survey(root.approved, ledger)
        adopt_captions(root.stage2_jsonl, scan, ledger)
        if config.complete:
            complete_facts(root.approved, scan, ledger, threads=data_root.config().decode_threads)
            complete_masks(ledger, encoders.masks)
        note_missing_captions(scan, ledger)
        return plan_merge(existing_lines(root.stage2_jsonl), ledger.sources(), ledger.captions(), root)
