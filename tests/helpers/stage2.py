"""Data roots filled in the test's own process, by the real pipeline with stub encoders or with files of another program."""

import dataclasses
import itertools
import json
from contextlib import contextmanager

import numpy as np
from PIL import Image

from imagemill.domain.buckets import BUCKETS
from imagemill.domain.embedding_specs import EmbeddingSpec, embedding_specs
from imagemill.domain.stage2_records import build_record
from imagemill.formats.npy import NpyStore
from imagemill.pipeline.shards.readiness import ASSET, find_ready
from imagemill.pipeline.shards.shard_plan import plan_shards
from imagemill.pipeline.shards.shard_sets import ShardParameters
from imagemill.pipeline.shards.shard_writer import write_bucket
from imagemill.pipeline.stage2 import merge
from imagemill.pipeline.stage2.embed import EmbedWorker
from imagemill.pipeline.stage2.inventory import Inventory
from imagemill.pipeline.stage2.plan import plan_for
from imagemill.store.ledger import Ledger
from imagemill.store.provenance import read_identity, read_recorded_models, record_identity
from tests.helpers.passes import run_pass
from tests.helpers.stubs import StubEncoder, StubTokenizer

_serial = itertools.count(1)


def picture(path, *, size=(32, 24), seed=None):
    """A small noisy picture, different from all others unless a seed is given; size is (width, height)."""
    noise = np.random.default_rng(next(_serial) if seed is None else seed)
    Image.fromarray(noise.integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)).save(path)


def photos(root, *ids, size=(32, 24), captions=True):
    """Write pictures into `approved/`, with captions beside them."""
    for image_id in ids:
        picture(root.approved / f"{image_id}.png", size=size)
        if captions:
            (root.approved / f"{image_id}.txt").write_text(f"noise called {image_id}")


def with_encoder(spec, encoder):
    """Return the same kind with another encoder class."""

    class Spec(EmbeddingSpec):
        def encoder_class(self):
            return encoder

    return Spec(**{field.name: getattr(spec, field.name) for field in dataclasses.fields(spec)})


def worker_of(root, spec, *, decode_threads=2, write_threads=2, donors=None, **settings):
    """Return a worker of a spec that has its encoder already (`with_encoder`)."""
    return EmbedWorker(
        spec=spec, approved=root.approved, store=NpyStore(root.derived / spec.folder, spec),
        recorded_models=models_of(root, spec.kind), preview_root=root.preview_models,
        settings=spec.settings_class(**settings), threads=1, decode_threads=decode_threads, write_threads=write_threads,
        donors=donors or {},
    )  # fmt: skip


def plan_of(root, spec, ledger):
    """Return the plan of one pass over all existing images."""
    inventory = surveyed(root, ledger)
    sources = inventory.scan.sources
    ids = [*sources, *(image_id for image_id in inventory.recorded.lines if image_id not in sources)]
    return plan_for(spec, ids, inventory, ledger)


def surveyed(root, ledger):
    """Scan the folders, and record their contents in the ledger."""
    inventory = Inventory(root)
    inventory.survey(ledger)
    return inventory


@contextmanager
def _quick_ledger(root):
    """Return a ledger without synchronous writes, whose durability no test needs."""
    with Ledger(root.ledger) as ledger:
        ledger._db.execute("PRAGMA synchronous = OFF")
        yield ledger


def embed(root, *specs, encoder=StubEncoder, **options):
    """Run passes without Dagster; return the counters of each kind."""
    counts = {}
    with _quick_ledger(root) as ledger:
        for spec in specs or embedding_specs():
            stubbed = with_encoder(spec, encoder)
            counts[spec.kind] = run_pass(worker_of(root, stubbed, **options), plan_of(root, spec, ledger).jobs, ledger)
    return counts


def write_records(root):
    """Merge and write the JSONL; return the result of the merge."""
    with _quick_ledger(root) as ledger:
        return merge.write_records(merge.Merge(surveyed(root, ledger)), ledger)


def stage2(root, *ids, size=(32, 24)):
    """Photos, embedded and recorded."""
    photos(root, *ids, size=size)
    embed(root)
    write_records(root)


def ready(root, buckets):
    """Return readiness by this root's ledger, with adopted files recorded as the asset does."""
    with _quick_ledger(root) as ledger:
        found = find_ready(root.stage2_jsonl, root.derived, ledger, buckets=buckets)
        ledger.record_files(found.adopted)
    return found


def record_of(image_id, *, size=(32, 24), caption="noise", **changes):
    """Return a valid record as another program would write it."""
    record = build_record(
        image_id=image_id, image_path=f"data/approved/{image_id}.png", caption=caption,
        mask=StubTokenizer().masks([caption])[0][0], height=size[1], width=size[0],
    )  # fmt: skip
    return record | changes


def foreign(root, *records):
    """Write a Stage 2 layout unknown to imagemill: records, and npy files by numpy's own writer, without a ledger."""
    for record in records:
        for spec in embedding_specs():
            path = root.derived / spec.folder / f"{record['image_id']}.npy"
            path.parent.mkdir(parents=True, exist_ok=True)
            np.save(path, np.full(spec.shape(record["height"], record["width"]), 1 + next(_serial) % 999, spec.dtype))
    write_text(root.stage2_jsonl, *(json.dumps(record) for record in records))


def write_text(path, *lines):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join((line if isinstance(line, bytes) else line.encode()) + b"\n" for line in lines))


def identity_of(root, kind):
    """Return the recorded model of a kind."""
    with Ledger(root.ledger) as ledger:
        return read_identity(ledger, kind)


def models_of(root, kind):
    """Return the models of a kind's files, as a worker gets them."""
    with Ledger(root.ledger) as ledger:
        return read_recorded_models(ledger, kind)


def record_identity_of(root, identity):
    """Record a model, as the publication of its first file would."""
    with Ledger(root.ledger) as ledger:
        record_identity(ledger, identity)


def pack(root, output=None, existing="replace", **parameters):
    """Write shards as the asset does, with problems recorded."""
    with Ledger(root.ledger) as ledger:
        found = find_ready(root.stage2_jsonl, root.derived, ledger, buckets=BUCKETS)
        ledger.record_files(found.adopted)
        ledger.replace_problems(ASSET, found.problems)
        if output:
            ledger.record_setting("place.shards", str(output))
        withdrawn = ledger.ids("withdrawn")
    shard_set = plan_shards(
        found.ready, BUCKETS, output or root.shards, ShardParameters(**parameters), existing, withdrawn=withdrawn
    )
    for plan in shard_set.plans:
        write_bucket(shard_set, plan, root.derived, {})
