"""Vectors of Stage 1 records, extracted and restored bit for bit. Spec: docs/spec/migration.md#forward"""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from imagemill.formats.jsonl import Span, encode_line, parse_object
from imagemill.pipeline.stage2.stage1 import Unusable, as_vector, read_vector, stage1_record
from tests.helpers.stage1 import stage1_record as old_record
from tests.helpers.stage2 import record_of

vectors = arrays(np.float32, 1024, elements=st.floats(width=32, allow_nan=False, allow_infinity=False))


@settings(deadline=None, max_examples=25)
@given(vectors, st.sampled_from([json.dumps, lambda value: encode_line(value).decode()]))
def test_vector_is_parsed_from_the_text_bit_for_bit(vector, dump):
    """The text is written by Python's json or by imagemill, and includes denormals and minus zero."""
    text = dump({"dinov3_embedding": vector.astype(float).tolist()})

    assert as_vector(parse_object(text.strip().encode())["dinov3_embedding"]).tobytes() == vector.tobytes()


@settings(deadline=None, max_examples=25)
@given(vectors)
def test_rollback_of_a_migrated_record_gives_the_same_bits(vector):
    line = encode_line(stage1_record(record_of("a"), vector))

    assert as_vector(parse_object(line.strip())["dinov3_embedding"]).tobytes() == vector.tobytes()


def test_integers_are_accepted_in_a_vector():
    assert as_vector([0, 1] * 512).tolist() == [0.0, 1.0] * 512


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ([0.5] * 1023, "1023 values"), ([0.5] * 1025, "1025 values"), ([], "0 values"), ("text", "a str"), (None, "NoneType"),
        ([0.5] * 1023 + ["0.5"], "other than numbers"), ([0.5] * 1023 + [None], "other than numbers"),
        ([True] * 1024, "other than numbers"), ([[0.5]] * 1024, "other than numbers"),
        ([1e39] + [0.5] * 1023, "beyond float32"), ([10**400] + [0.5] * 1023, "beyond float32"),
    ],
)  # fmt: skip
def test_value_other_than_a_vector_is_unusable_with_a_reason(value, why):
    with pytest.raises(Unusable, match=why):
        as_vector(value)


def test_restored_record_has_its_six_fields_and_extra_ones():
    record = record_of("a", caption="c", score=[1]) | {"image_path": "x/a.png"}

    old = stage1_record(record, np.zeros(1024, np.float32))

    assert list(old) == ["image_path", "dinov3_embedding", "caption", "t5_attention_mask", "height", "width", "score"]


def test_moved_record_is_not_confused_with_another(tmp_path):
    """Another run merged in the meantime: this image is retried instead of receiving another image's vector."""
    path = tmp_path / "records.jsonl"
    line = json.dumps(old_record(1)).encode()
    path.write_bytes(line)

    assert read_vector(Span(path, 1, 0, len(line)), "photo0001").shape == (1024,)
    for span, image_id in ((Span(path, 1, 3, len(line)), "photo0001"), (Span(path, 1, 0, len(line)), "photo0002")):
        with pytest.raises(FileNotFoundError, match="moved"):
            read_vector(span, image_id)
