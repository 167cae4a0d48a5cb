"""Sets of shards written by the product from records of another program."""

import json
import shutil

import numpy as np

from imagemill.domain.buckets import BUCKETS
from imagemill.domain.embedding_specs import DINOV3, VAE, embedding_specs, latent_shape
from imagemill.domain.layout import DataRoot
from imagemill.formats.energon import META, write_energon
from imagemill.formats.manifest import read_json, write_json
from imagemill.pipeline.shards.shard_manifest import sealed
from imagemill.pipeline.shards.shard_plan import plan_shards
from imagemill.pipeline.shards.shard_sets import (
    MANIFEST,
    ShardParameters,
    entries_by_shard,
    load_manifest,
    read_index,
    set_digest,
)
from imagemill.pipeline.shards.shard_statistics import crop_statistics, statistics_of
from imagemill.pipeline.shards.shard_writer import write_bucket
from imagemill.store.provenance import ModelIdentity
from tests.helpers.stage2 import foreign, ready, record_of

FACTORS = {"scaling_factor": 0.5, "shift_factor": 0.25}
NEW_VALUE = -5


def shard_set(folder, sizes, *, shard_size=3, preview=False):
    """Make a data root with shards; latents are noise.

    Args:
        root: the data root.
        sizes: id → (width, height) in pixels.
        preview: whether the manifests name a preview model for the VAE.
    """
    root = DataRoot(folder)
    foreign(root, *(record_of(i, size=size, caption=f"a picture called {i}") for i, size in sizes.items()))
    for number, (image_id, (width, height)) in enumerate(sizes.items()):
        noise = np.random.default_rng(number).normal(size=latent_shape(height, width))
        np.save(root.derived / VAE.folder / f"{image_id}.npy", noise.astype(VAE.dtype))
    plans = plan_shards(
        ready(root, BUCKETS).ready, list(BUCKETS), root.shards, ShardParameters(shard_size=shard_size), "replace"
    )
    for plan in plans.plans:
        write_bucket(plans, plan, root.derived, identities(preview=preview))
    return root


def identities(*, preview=False):
    """Return the identity of each kind in the sets of `shard_set`."""
    return {s.kind: ModelIdentity(kind=s.kind, model="m", preview=preview, facts=FACTORS) for s in embedding_specs()}


def change_values(root, *image_ids):
    """Write other DINOv3 values into files of the same length: when repacked, every sample keeps its position."""
    for image_id in image_ids:
        np.save(root.derived / DINOV3.folder / f"{image_id}.npy", np.full(1024, NEW_VALUE, DINOV3.dtype))


def publish(root, existing, *, withdrawn=(), shard_size=3, models=None):
    """Replace the existing sets by the samples that are ready now, as the commands do."""
    samples = [sample for sample in ready(root, BUCKETS).ready if sample.image_id not in withdrawn]
    plans = plan_shards(
        samples, list(BUCKETS), root.shards, ShardParameters(shard_size=shard_size), existing, withdrawn=set(withdrawn)
    )
    for plan in plans.plans:
        write_bucket(plans, plan, root.derived, models or {})


def change_manifest(folder, **changes):
    """Write another manifest that is consistent in itself."""
    write_json(folder / MANIFEST, sealed(read_json(folder / MANIFEST) | changes))


def bury(bucket, *image_ids):
    """Write tombstones for these ids as earlier releases did, Energon's files too, and count the rest in the manifest."""
    lines = [json.loads(line) for line in (bucket / "index.jsonl").read_text().splitlines()]
    dead = [line for line in lines if line["image_id"] in image_ids]
    tombstones = [{key: line[key] for key in ("image_id", "shard", "offset")} | {"why": "withdrawn"} for line in dead]
    (bucket / "tombstones.jsonl").write_text("".join(json.dumps(tombstone) + "\n" for tombstone in tombstones))
    digest = set_digest(line["digest"] for line in lines if line not in dead)
    live = [line for line in read_index(bucket) if line.image_id not in image_ids]
    change_manifest(
        bucket, samples=len(live), tombstones=len(dead), digest=digest, statistics=statistics_of(live),
        crop=crop_statistics(live, bucket.name.removeprefix("bucket_"), "original"),
    )  # fmt: skip
    for path in (bucket / META, *bucket.glob("*.idx")):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    shards = entries_by_shard(load_manifest(bucket).shards, read_index(bucket))
    places = {(line["shard"], line["offset"]) for line in dead}
    write_energon(bucket, shards, bucket=bucket.name.removeprefix("bucket_"), dead=places)
