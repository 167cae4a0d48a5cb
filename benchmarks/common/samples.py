"""Samples of realistic sizes that are ready to be packed, made without a model."""

import shutil
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np

from imagemill.domain.buckets import BUCKETS
from imagemill.domain.embedding_specs import embedding_specs
from imagemill.domain.layout import DataRoot
from imagemill.domain.stage2_records import build_record
from imagemill.fs.fingerprints import file_signature, fingerprint_file
from imagemill.pipeline.shards.readiness import ReadySample
from imagemill.pipeline.shards.shard_plan import plan_shards
from imagemill.pipeline.shards.shard_sets import ShardParameters
from imagemill.pipeline.shards.shard_writer import write_bucket
from imagemill.store.ledger import FileRow
from tests.helpers.npy_files import write_npy

SIZES = ((1024, 1024), (832, 1216), (1216, 832), (768, 1024), (1280, 768))


def make_samples(root: DataRoot, count: int, sizes: Sequence[tuple[int, int]] = SIZES) -> list[ReadySample]:
    """Make samples of a few images of these (height, width), each with its own files.

    If all names shared the same few files, they would be read from the processor's cache, into which no real data set fits.
    """
    arrays: dict[tuple[str, tuple[int, int]], Path] = {}
    for spec in embedding_specs():
        for height, width in sizes:
            path = root.path / "originals" / f"{spec.kind}-{height}x{width}.npy"
            values = np.random.default_rng(height).integers(0, 256, spec.shape(height, width), np.uint8)
            write_npy(path, values.astype(spec.dtype))
            arrays[spec.kind, (height, width)] = path
    return [_sample(root, n, sizes[n % len(sizes)], arrays) for n in range(count)]


def _sample(
    root: DataRoot, n: int, size: tuple[int, int], arrays: dict[tuple[str, tuple[int, int]], Path]
) -> ReadySample:
    image_id = f"image{n:07d}"
    files = []
    for spec in embedding_specs():
        path = root.derived / spec.folder / f"{image_id}.npy"
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(arrays[spec.kind, size], path)
        files.append(FileRow(spec.kind, image_id, file_signature(path), None, fingerprint_file(path), "maker"))
    record = record_of(image_id, size)
    return ReadySample(
        image_id, BUCKETS[0], msgspec.json.encode(record), tuple(record["t5_attention_mask"]), tuple(files)
    )


def record_of(image_id: str, size: tuple[int, int]) -> dict:
    return build_record(
        image_id=image_id, image_path=f"data/approved/{image_id}.jpg", caption=f"a photo of something, called {image_id}",
        mask=[1] * 12 + [0] * 65, height=size[0], width=size[1],
    )  # fmt: skip


def pack(root: DataRoot, ready: Sequence[ReadySample], *, per_tar: int = 250) -> None:
    """Write the samples with the product's own writer, two tars at a time."""
    shard_set = plan_shards(ready, BUCKETS[:1], root.shards, ShardParameters(per_tar), "replace")
    shard_set.workers = 2
    write_bucket(shard_set, shard_set.plans[0], root.derived, {})
