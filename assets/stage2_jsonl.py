"""The Stage 2 records: one JSON line per image that opens and has a caption."""

import dagster as dg

from assets.command_options import RecordOptions, read_options
from assets.embeddings import embedding_assets
from assets.partitions import asset
from imagemill.domain.embedding_specs import T5, embedding_specs, mask_length
from imagemill.pipeline.leases import Leased
from imagemill.pipeline.stage2.image_metadata import complete_facts, complete_masks, note_missing_captions
from imagemill.pipeline.stage2.merge import ASSET, Merge
from io_managers.viewer import page_shown
from resources.data_root import DataRootResource
from resources.encoders import Encoders


@asset(
    deps=[dg.AssetDep(kind, partition_mapping=dg.AllPartitionMapping()) for kind in embedding_assets],
    config_schema={},  # a re-executed rollback run of an earlier version is refused, instead of merging
    io_manager_key="jsonl_io",
    group_name="stage2",
    kinds={"json"},
    look=page_shown("images without a caption", "images", show="no_caption"),
)
def stage2_jsonl(context: dg.AssetExecutionContext, data_root: DataRootResource, encoders: Encoders) -> Leased:
    """`derived/approved_image_dataset.jsonl`: id, path, caption, T5 mask, size, bucket; no embeddings inside.

    Built from the ledger, without opening images that an earlier pass has opened. The job `resume_missing` makes
    missing embeddings first.
    """
    session, given = data_root.session, read_options(context, RecordOptions)
    ledger = session.ledger

    def plan() -> Merge:
        inventory = session.inventory()
        scan, among = inventory.scan, inventory.in_question(ledger)
        if given.complete:
            threads = session.config.decoders
            complete_facts(session.root.approved, scan, ledger, threads=threads, up_to=given.up_to, among=among)
            complete_masks(ledger, encoders.masks, mask_length([session.in_force(T5)]))
        note_missing_captions(scan, ledger, among=among)
        kinds = tuple(spec.kind for spec in embedding_specs()) if given.kinds is None else given.kinds
        return Merge(inventory, kinds, given.migrate, given.up_to, session.captioned)

    return Leased(ledger, ASSET, ["all"], context.run.run_id, plan)
