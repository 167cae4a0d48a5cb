"""Records of Stage 1: the vector inside them, taken out and put back bit for bit.

    {"image_path": "data/approved/abc.jpg", "dinov3_embedding": [0.12, …], "caption": "…", "t5_attention_mask": […],
     "height": 768, "width": 1024}

Belongs here: one record. Belongs elsewhere: finding them (record_index.py), the file after migration (merge.py) or before it
(rollback.py).
Spec: docs/spec/migration.md#forward, docs/spec/migration.md#rollback
"""

from typing import Any

import numpy as np

from imagemill.domain.embedding_specs import DINOV3_WIDTH
from imagemill.domain.stage2_records import INLINE_VECTOR, Record
from imagemill.pipeline.stage2.record_index import Span, record_id

# What a Stage 2 record has and a Stage 1 record has not.
_STAGE2_FIELDS = ("image_id", "aspect_bucket", "format_version")
_FIELDS = ("image_path", INLINE_VECTOR, "caption", "t5_attention_mask", "height", "width")


class Unusable(Exception):
    """An inline vector that is none; the text says why, without the image's name."""


def read_vector(span: Span, image_id: str) -> np.ndarray:
    """The inline vector of this record, float32 (1024,).

    Raises:
        Unusable: of another length, not numbers, not finite. OSError: the record is not there any more: another run has
            merged meanwhile.
    """
    record = span.record()
    if record_id(record) != image_id or INLINE_VECTOR not in record:
        raise FileNotFoundError(f"the record of {image_id} has moved in {span.path.name}; run again")
    return as_vector(record[INLINE_VECTOR])


def as_vector(value: Any) -> np.ndarray:
    """A JSON array as float32 (1024,): every number is the nearest float32, which for numbers written from one is itself.

    Raises:
        Unusable: of another length, not numbers, not finite in float32.
    """
    if not isinstance(value, list) or len(value) != DINOV3_WIDTH:
        found = f"{len(value)} values" if isinstance(value, list) else f"a {type(value).__name__}"
        raise Unusable(f"inline vector is {found}, expected {DINOV3_WIDTH}")
    if not all(type(number) in (float, int) for number in value):
        raise Unusable("inline vector holds something other than numbers")
    try:
        with np.errstate(over="ignore"):
            vector = np.array(value, np.float64).astype(np.float32)
    except OverflowError as error:
        raise Unusable("inline vector holds a number beyond float32") from error
    if not np.isfinite(vector).all():
        raise Unusable("inline vector holds NaN, infinity or a number beyond float32")
    return vector


def stage1_record(record: Record, vector: np.ndarray) -> Record:
    """A Stage 2 record as Stage 1 had it; further fields behind the six."""
    old = {**record, INLINE_VECTOR: vector.astype(np.float64).tolist()}
    first = {name: old[name] for name in _FIELDS if name in old}
    return first | {name: value for name, value in old.items() if name not in first and name not in _STAGE2_FIELDS}
