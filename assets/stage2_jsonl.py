"""The light metadata: one JSON line per image that opens and has a caption."""

from contextlib import closing

import dagster as dg

from assets.command_options import RecordOptions, read_options
from assets.embeddings import embedding_assets
from imagemill.domain.embedding_specs import embedding_specs
from imagemill.pipeline.leases import claimed_until_output
from imagemill.pipeline.stage2.image_metadata import (
    adopt_captions,
    complete_facts,
    complete_masks,
    note_missing_captions,
)
from imagemill.pipeline.stage2.merge import ASSET, Merge
from imagemill.pipeline.stage2.record_index import read_recorded
from imagemill.pipeline.stage2.scan import survey
from resources.data_root import DataRootResource
from resources.encoders import Encoders


@dg.asset(
    deps=[dg.AssetDep(asset, partition_mapping=dg.AllPartitionMapping()) for asset in embedding_assets],
    config_schema={},  # refuses the rollback of an earlier version's run that is executed again, instead of merging
    io_manager_key="jsonl_io",
    group_name="stage2",
    kinds={"json"},
    owners=["team:imagemill"],
    code_version="1",
)
def stage2_jsonl(context: dg.AssetExecutionContext, data_root: DataRootResource, encoders: Encoders) -> Merge:
    """`derived/approved_image_dataset.jsonl`: id, path, caption, T5 mask, size, bucket; no embeddings inside.

    Built from the ledger without opening an image that a pass has opened before.
    """
    root, given = data_root.root(), read_options(context, RecordOptions)
    with closing(data_root.ledger()) as ledger, claimed_until_output(ledger, ASSET, ["all"], context.run.run_id):
        scan = survey(root.approved, ledger)
        adopt_captions(root, read_recorded(root.stage2_jsonl), scan, ledger)
        if given.complete:
            threads = data_root.config().decode_threads
            complete_facts(root.approved, scan, ledger, threads=threads, up_to=given.up_to)
            complete_masks(ledger, encoders.masks)
        note_missing_captions(scan, ledger)
        kinds = tuple(spec.kind for spec in embedding_specs()) if given.kinds is None else given.kinds
        return Merge(root, scan, kinds, given.migrate, given.up_to)
