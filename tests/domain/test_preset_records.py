"""Single preset records. Files of records are tested in tests/validation/test_presets.py.

Spec: docs/spec/presets.md#layout, docs/spec/validation.md#checks, docs/spec/presets.md#preset-records
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from imagemill.domain.preset_records import (
    PRESET_RULES,
    PresetRules,
    is_beyond_edge,
    outside_objects,
    path_problem,
    violations,
    warnings,
)

RECORD = {"images": ["images/a.jpg"], "objects": [{"desc": "a", "bbox_2d": [0, 0, 64, 32]}], "width": 64, "height": 32}


@pytest.mark.parametrize("path", ["a.jpg", "images/a.jpg", "./a.jpg", "a b/ü..jpg", "...jpg"])
def test_path_below_the_folder_is_none(path):
    assert path_problem(path) is None


@pytest.mark.parametrize(
    "path", ["", " ", None, 7, "/a", "../a", "a/../b", "a/..", "a/", ".", "a\\b", "C:a", "file:///a", "a\0"]
)
def test_path_that_leads_elsewhere_has_a_problem(path):
    assert path_problem(path)


@pytest.mark.parametrize(
    ("limits", "rules"),
    [
        ({}, []), ({"max_pixels": 2048, "multiple_of": 32}, []), ({"max_pixels": 2047}, ["max_pixels"]),
        ({"multiple_of": 64}, ["multiple_of"]), ({"multiple_of": 48}, ["multiple_of", "multiple_of"]),
    ],
)  # fmt: skip
def test_limits_are_kept_where_given(limits, rules):
    assert [problem.rule for problem in violations(RECORD, "pixel", PresetRules(**limits))] == rules


def test_everything_wrong_is_reported_at_once():
    record = {"images": [], "objects": [7, {"desc": "", "bbox": 1}], "width": 0, "height": True}

    assert [(problem.rule, problem.field) for problem in violations(record, "pixel")] == [
        ("images", "images"), ("image_size", "width"), ("image_size", "height"), ("objects", "objects[0]"),
        ("desc", "objects[1].desc"), ("legacy_key", "objects[1].bbox"), ("geometry", "objects[1]"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("values", "beyond"),
    [
        ([0, 0, 64, 32], False),
        ([-0.1, 0, 1, 1], True),
        ([0, 0, 64.1, 1], True),
        ([0, 0, 1, 33], True),
        ([40, 0, 1, 1, 1, 40], True),
    ],
)
def test_edge_belongs_to_the_image(values, beyond):
    assert is_beyond_edge(values, 64, 32) is beyond


@pytest.mark.parametrize(
    ("values", "outside"),
    [
        ([300, 300, 320, 320], True), ([64, 0, 70, 9], True), ([-9, 0, 0, 9], True), ([0, 32, 9, 40], True),
        ([63.9, 0, 70, 9], False), ([-9, -9, 0.1, 0.1], False), ([-9, -9, 99, 99], False),
    ],
)  # fmt: skip
def test_geometry_has_a_part_in_the_image_or_lies_outside(values, outside):
    record = {**RECORD, "objects": [{"desc": "a", "bbox_2d": values}, {"desc": "a", "poly": [*values, *values[:2]]}]}
    assert outside_objects(record) == ([0, 1] if outside else [])

    rules = {warning.rule for warning in warnings(record, "pixel")}
    assert rules == {"outside_image" if outside else "beyond_edge"}


def test_only_pixels_can_lie_beyond_the_edge():
    outside = {**RECORD, "objects": [{"desc": "a", "bbox_2d": [0, 0, 65, 32]}]}

    assert [warning.field for warning in warnings(outside, "pixel")] == ["objects[0]"]
    assert warnings(outside, "norm") == []


names = st.sampled_from(["desc", "bbox_2d", "poly", "poly_points"])
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(names, inner),
    max_leaves=12,
)


@given(st.dictionaries(st.sampled_from([*RECORD]), values), st.sampled_from(["pixel", "norm", "coord"]), st.booleans())
def test_any_value_gives_problems_of_the_table_and_no_traceback(record, space, whole):
    record = {**RECORD, **record} if whole else record
    problems = violations(record, space, PresetRules(4096, 32))

    assert {problem.rule for problem in problems} <= PRESET_RULES.keys()
    if not problems:
        warnings(record, space)
