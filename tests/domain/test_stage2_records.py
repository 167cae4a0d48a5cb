"""Single Stage 2 records: their fields and the rules for valid ones.

Spec: docs/spec/stage2.md#record-fields, docs/spec/shards.md#readiness
"""

import pytest

from imagemill.domain.buckets import bucket_crop
from imagemill.domain.stage2_records import (
    CROP_BOX,
    RECORD_FIELDS,
    build_record,
    mask_problem,
    violations,
)
from imagemill.domain.violations import is_plain_text, text_warnings

MASK = [1] * 5 + [0] * 72


@pytest.mark.parametrize(
    ("text", "rules"),
    [
        ("a <|coord_1|>", ["special_token"]), ("<|box_start|>", ["special_token"]), ("<|任何|>", ["special_token"]),
        ("a\x00b", ["control_character"]), ("a\nb", ["control_character"]), ("\x7f\x85", ["control_character"]),
        ("\x1b<|x|>", ["control_character", "special_token"]),
        ("a < b | c > d", []), ("<||>", []), ("<| <x> |>", []), ("中文　é", []), ("<b>bold</b>", []),
    ],
)  # fmt: skip
def test_text_that_a_tokenizer_may_misread_is_a_warning(text, rules):
    assert [warning.rule for warning in text_warnings("caption", text)] == rules
    assert not (rules and is_plain_text(text))


def record(**changes):
    built = build_record(
        image_id="abc", image_path="data/approved/abc.jpg", caption="A ball.", mask=MASK, height=768, width=1024
    )
    return {**built, **changes}


def test_record_holds_the_eight_fields_in_the_seeds_order():
    assert tuple(record()) == RECORD_FIELDS
    assert record()["format_version"] == 2
    assert record()["aspect_bucket"] == "1216x832"


def test_extra_fields_of_an_earlier_record_are_kept_and_its_inline_vector_is_not():
    built = build_record(
        image_id="abc", image_path="new/abc.jpg", caption="A ball.", mask=MASK, height=8, width=8,
        base={"image_path": "old/abc.jpg", "note": "mine", "dinov3_embedding": [0.0]},
    )  # fmt: skip

    assert (built["image_path"], built["note"]) == ("old/abc.jpg", "mine")
    assert "dinov3_embedding" not in built


def test_record_of_a_file_under_another_name_gets_its_path():
    """If `a.jpg` is replaced by `a.png`, the record keeps its id but not its path."""
    built = build_record(
        image_id="a", image_path="data/approved/a.png", caption="A ball.", mask=MASK, height=8, width=8,
        base={"image_path": "data/approved/a.jpg"},
    )  # fmt: skip

    assert built["image_path"] == "data/approved/a.png"


def cropped(base=None, *, size=(1024, 768), wanted=True):
    return build_record(
        image_id="abc", image_path="abc.jpg", caption="A ball.", mask=MASK, height=size[1], width=size[0],
        cropped=wanted, base=base,
    )  # fmt: skip


def test_record_has_its_crop_box_only_while_the_vae_encodes_it():
    """Spec: docs/spec/stage2.md#bucket-size"""
    record = cropped()

    assert tuple(record) == (*RECORD_FIELDS, CROP_BOX)
    assert record[CROP_BOX] == list(bucket_crop(1024, 768))
    assert violations(record) == []
    assert CROP_BOX not in cropped(record, wanted=False)
    assert cropped(record, size=(768, 1024))[CROP_BOX] == list(bucket_crop(768, 1024))


def test_extra_field_called_crop_box_keeps_its_value_until_the_feature_writes_it():
    """Spec: docs/spec/stage2.md#record-fields"""
    assert cropped({CROP_BOX: "mine"}, wanted=False)[CROP_BOX] == "mine"
    assert cropped({CROP_BOX: "mine"})[CROP_BOX] == list(bucket_crop(1024, 768))


def test_complete_record_has_no_problem():
    assert violations(record()) == []
    assert violations({k: v for k, v in record().items() if k != "format_version"}) == []


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("image_id", "a/b"), ("image_id", ""), ("image_id", 7), ("image_id", "a\x07"),
        ("caption", "  "), ("caption", None), ("image_path", ""),
        ("height", 0), ("height", True), ("width", 1.0), ("width", "8"),
        ("aspect_bucket", "../1024x1024"), ("aspect_bucket", "512x512"),
        ("format_version", 1), ("format_version", 2.0),
        ("dinov3_embedding", [0.1]),
    ],
)  # fmt: skip
def test_record_with_a_bad_field_is_named_by_it(field, value):
    (problem,) = violations(record(**{field: value}))

    assert problem.field == field
    assert problem.remedy


@pytest.mark.parametrize(
    "mask", [None, [], [1] * 76, [1] * 78, [0] * 77, [2] + [0] * 76, [True] * 77, [1.0] * 77, ["1"] * 77]
)
def test_mask_is_77_ints_of_0_and_1_with_a_1(mask):
    """`true` and `1.0` pass naive checks."""
    assert mask_problem(mask)
    assert mask_problem(MASK) is None
