"""Stage 1 records: extracting the inline vector and restoring it bit for bit.

    {"image_path": "data/approved/abc.jpg", "dinov3_embedding": [0.12, …], "caption": "…", "t5_attention_mask": […],
     "height": 768, "width": 1024}

Only single records: record_index.py finds them; the file is in merge.py (migration) and rollback.py.

Spec: docs/spec/migration.md#forward, docs/spec/migration.md#rollback
"""

from typing import Any

import numpy as np

from imagemill.domain.embedding_specs import DINOV3_WIDTH
from imagemill.domain.stage2_records import INLINE_VECTOR, Record
from imagemill.formats.jsonl import Span
from imagemill.pipeline.stage2.record_index import record_at, record_id

# Fields of a Stage 2 record that a Stage 1 record does not have.
_STAGE2_FIELDS = ("image_id", "aspect_bucket", "format_version")
_FIELDS = ("image_path", INLINE_VECTOR, "caption", "t5_attention_mask", "height", "width")


class Unusable(Exception):
    """Raised for an unusable inline vector; the text gives the reason, without the image's name."""


def read_vector(span: Span, image_id: str) -> np.ndarray:
    """Return the inline vector of this record, float32 (1024,).

    Raises:
        Unusable: if the length is wrong, or values are not numbers or not finite.
        OSError: if the record is no longer at this position, because another run has merged meanwhile.
    """
    record = record_at(span)
    if record_id(record) != image_id or INLINE_VECTOR not in record:
        raise FileNotFoundError(f"the record of {image_id} has moved in {span.path.name}; run again")
    return as_vector(record[INLINE_VECTOR])


def as_vector(value: Any) -> np.ndarray:
    """Convert a JSON array to float32 (1024,), each number rounded to the nearest float32; numbers that were float32 are exact.

    Raises:
        Unusable: if the length is wrong, or values are not numbers or not finite in float32.
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
    """Return a Stage 2 record as a Stage 1 record; additional fields follow the six."""
    old = {**record, INLINE_VECTOR: vector.astype(np.float64).tolist()}
    first = {name: old[name] for name in _FIELDS if name in old}
    return first | {name: value for name, value in old.items() if name not in first and name not in _STAGE2_FIELDS}
