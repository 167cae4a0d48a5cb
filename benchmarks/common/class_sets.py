"""Sets of shards sorted by class, which show how well a reader mixes: a caption names the class of its sample."""

from pathlib import Path

import numpy as np

from imagemill.domain.embedding_specs import T5
from imagemill.formats.energon import write_energon
from imagemill.formats.jsonl import encode_sorted, write_jsonl
from imagemill.formats.manifest import write_json
from imagemill.formats.npy import npy_header
from imagemill.formats.tar import write_shard
from imagemill.fs.fingerprints import RunningFingerprint
from imagemill.pipeline.shards.shard_manifest import (
    FORMAT,
    Manifest,
    ShardEntry,
    ShardParameters,
    document_of,
    sealed,
)
from imagemill.pipeline.shards.shard_sets import INDEX, JSON_MEMBER, MANIFEST, IndexLine, bucket_folder, shard_name

BUCKET = "1024x1024"
MEMBERS = (JSON_MEMBER, T5.member)
_WIDTH = 1024


def write_class_set(output: Path, samples: int, sample_kb: int, *, tars: int, classes: int) -> Path:
    """Write one bucket's set without a data root; return its folder.

    Args:
        output: `shards/`.
        samples: number of samples, sorted by class.
        sample_kb: size of the array of a sample, a float16 matrix of 1024 columns, in KiB (even).
        tars: number of tars.
        classes: number of classes, each with equally many samples.
    """
    folder = bucket_folder(output, BUCKET)
    folder.mkdir(parents=True)
    shape = (sample_kb * 1024 // (2 * _WIDTH), _WIDTH)
    values = npy_header(shape, T5.dtype) + np.random.default_rng(0).random(shape).astype(T5.dtype).tobytes()
    lines: list[IndexLine] = []
    shards = []
    for number, rows in enumerate(np.array_split(np.arange(samples), tars)):
        checksum, path = RunningFingerprint(), folder / shard_name(number)
        records = ((f"sample{row:07d}", _record(row, row * classes // samples)) for row in rows)
        entries = write_shard(
            path,
            ((key, [(JSON_MEMBER, record), (T5.member, values)]) for key, record in records),
            checksum=checksum,
        )
        lines += [IndexLine(e.key, e.key, path.name, e.offset, e.size, "0" * 32) for e in entries]
        shards.append((ShardEntry(path.name, len(rows), path.stat().st_size, str(checksum)), entries))
    write_jsonl(folder / INDEX, lines)
    write_energon(folder, [(entry.name, entries) for entry, entries in shards], bucket=BUCKET)
    manifest = Manifest(
        format=FORMAT, bucket=BUCKET, digest="0" * 64, samples=samples, tombstones=0, appended=False,
        members=list(MEMBERS), shards=[entry for entry, _ in shards], parameters=ShardParameters(), provenance={},
    )  # fmt: skip
    write_json(folder / MANIFEST, sealed(document_of(manifest)))
    return folder


def _record(row: int, class_number: int) -> bytes:
    return encode_sorted({"caption": f"class {class_number}", "image_id": f"sample{row:07d}"})
