"""The main job as plain calls, in one process and without Dagster: `python -m benchmarks.common.pure DATA_ROOT`.

It does each step of `imagemill run` once: scan, embed, write records, pack shards, count. It does not read again what it has
written.
"""

import sys

from benchmarks.common.encoders import use_free_encoders
from imagemill.config import read_config
from imagemill.domain.buckets import BUCKETS
from imagemill.domain.embedding_specs import EmbeddingSpec, embedding_specs
from imagemill.domain.layout import DataRoot
from imagemill.pipeline.session import open_session
from imagemill.pipeline.shards.readiness import find_ready
from imagemill.pipeline.shards.shard_plan import plan_shards
from imagemill.pipeline.shards.shard_sets import ShardParameters
from imagemill.pipeline.shards.shard_writer import write_bucket
from imagemill.pipeline.stage2 import merge
from imagemill.pipeline.stage2.embed import EmbedWorker
from imagemill.pipeline.stage2.inventory import Inventory
from imagemill.pipeline.stage2.plan import plan_for
from imagemill.pipeline.status import read_status
from imagemill.store.ledger import Ledger
from imagemill.store.provenance import read_identity, read_recorded_models
from tests.helpers.passes import run_pass


def main() -> None:
    root = DataRoot.resolve(sys.argv[1])
    with Ledger(root.ledger) as ledger:
        inventory = Inventory(root)
        inventory.survey(ledger)
        for spec in embedding_specs():
            embed(spec, inventory, ledger)
        write_records(root, ledger)
        pack(root, ledger)
    with open_session(root.path) as session:
        assert not read_status(session).problems


def embed(spec: EmbeddingSpec, inventory: Inventory, ledger: Ledger) -> None:
    root, store = inventory.root, inventory.store(spec)
    config = read_config(root.config_file)
    plan = plan_for(spec, list(inventory.scan.sources), inventory, ledger)
    worker = EmbedWorker(
        spec=spec,
        approved=root.approved,
        store=store,
        recorded_models=read_recorded_models(ledger, spec.kind),
        preview_root=root.preview_models,
        settings=config.encoder(spec),
        threads=config.model_threads,
        decode_threads=config.decoders,
        write_threads=config.write_threads,
        decode_ahead_pixels=config.decode_ahead_pixels,
    )
    run_pass(worker, plan.jobs, ledger)


def write_records(root: DataRoot, ledger: Ledger) -> None:
    inventory = Inventory(root)
    inventory.survey(ledger)
    merge.write_records(merge.Merge(inventory), ledger)


def pack(root: DataRoot, ledger: Ledger) -> None:
    ready = find_ready(root.stage2_jsonl, root.derived, ledger, buckets=BUCKETS).ready
    shard_set = plan_shards(ready, list(BUCKETS), root.shards, ShardParameters())
    model_keys = {spec.kind: read_identity(ledger, spec.kind) for spec in embedding_specs()}
    for plan in shard_set.plans:
        write_bucket(
            shard_set, plan, root.derived, {kind: model_key for kind, model_key in model_keys.items() if model_key}
        )


if __name__ == "__main__":
    use_free_encoders()
    main()
