"""A Stage 1 data set: photos, and a file of records that contain their vectors, as the earlier program wrote it."""

import json

import numpy as np

from tests.helpers.product import photos


def vector(number):
    return np.random.default_rng(number).standard_normal(1024).astype(np.float32)


def stage1_record(number, *, size=(48, 32), **changes):
    """Return a record with the six fields; a field that is None is left out."""
    record = {
        "image_path": f"data/approved/photo{number:04d}.jpg", "dinov3_embedding": vector(number).astype(float).tolist(),
        "caption": f"as  recorded {number} ", "t5_attention_mask": [1] * 4 + [0] * 73, "height": size[1], "width": size[0],
        **changes,
    }  # fmt: skip
    return {key: value for key, value in record.items() if value is not None}


def write_stage1(root, records, *, images=None, sidecars=False):
    """Write photos and their records; return the file's bytes."""
    photos(root.approved, len(records) if images is None else images)
    if not sidecars:
        for caption in root.approved.glob("*.txt"):
            caption.unlink()
    root.derived.mkdir(parents=True, exist_ok=True)
    lines = [record if isinstance(record, bytes) else json.dumps(record).encode() for record in records]
    root.stage2_jsonl.write_bytes(b"".join(line + b"\n" for line in lines))
    return root.stage2_jsonl.read_bytes()
