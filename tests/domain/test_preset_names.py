"""Preset names: one suffix, one source of N, and the commands that accept it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from imagemill.domain.preset_names import (
    MAX_OBJECTS_VARIABLE,
    PresetName,
    derived_name,
    effective_preset,
    max_objects_of,
    parse_preset,
    refuse_derived,
    resolve_max_objects,
)
from imagemill.errors import WrongUsage

bases = st.text("abcxyz0123456789_-", min_size=1).filter(lambda name: "_max" not in name)
numbers = st.integers(1, 10**9)


@pytest.mark.parametrize(
    ("name", "base", "max_objects"),
    [
        ("rescale_32_768_bbox", "rescale_32_768_bbox", None),
        ("rescale_32_768_bbox_max60", "rescale_32_768_bbox", 60),
        ("x_max1", "x", 1),
        ("x_max100", "x", 100),
        ("x_maximum", "x_maximum", None),
        ("x_max", "x_max", None),
        ("max60", "max60", None),
        ("x_max1024_boxes", "x_max1024_boxes", None),
        ("x_max_side", "x_max_side", None),
        ("x_max٦", "x_max٦", None),
    ],
)
def test_suffix_is_max_and_digits_at_the_end(name, base, max_objects):
    """Spec: docs/spec/presets.md#names-of-derived-presets"""
    assert parse_preset(name) == PresetName(base, max_objects)
    assert parse_preset(name).effective == name


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("x_max_60", "rename it to x_max60"),
        ("x_max_060", "rename it to x_max60"),
        ("x_max_60_boxes", "rename it to x_boxes_max60"),
        ("x_max060", "rename it to x_max60"),
        ("x_max60_max10", "rename it to x_max10"),
        ("x_max10_max60", "rename it to x_max10"),
        ("x_max0", "use x, or x_max{N}"),
        ("_max60", "<base preset>_max{N}"),
    ],
)
def test_other_suffix_is_refused_with_the_rename(name, remedy):
    """Spec: docs/spec/presets.md#names-of-derived-presets"""
    with pytest.raises(WrongUsage) as caught:
        parse_preset(name)
    assert remedy in str(caught.value)


@given(bases, numbers)
def test_derived_name_is_read_back(base, max_objects):
    """Spec: docs/spec/presets.md#names-of-derived-presets"""
    assert parse_preset(derived_name(base, max_objects)) == (base, max_objects)


@given(st.text())
def test_any_name_is_read_back_or_refused(name):
    """Two names never mean one folder, and only WrongUsage is raised."""
    try:
        parsed = parse_preset(name)
    except WrongUsage:
        return
    assert parsed.effective == name


def test_nothing_is_derived_of_a_derived_preset():
    with pytest.raises(WrongUsage, match="x_max60"):
        derived_name("x_max60", 10)
    refuse_derived("x", "only a base preset")


@pytest.mark.parametrize("value", [0, -1, "0", "-3", "many", "1.5", "", True, "٦", "1_000"])
def test_number_below_one_or_no_number_is_wrong_usage(value):
    """Spec: docs/spec/presets.md#maximum-number-of-objects"""
    with pytest.raises(WrongUsage, match="PUBLIC_DATA"):
        max_objects_of(value, MAX_OBJECTS_VARIABLE)


def test_number_may_come_as_text():
    assert max_objects_of(" 60 ", MAX_OBJECTS_VARIABLE) == 60


@pytest.mark.parametrize(
    ("sources", "expected"),
    [
        ({}, None),
        ({"flag": None, MAX_OBJECTS_VARIABLE: ""}, None),
        ({"flag": 60}, 60),
        ({MAX_OBJECTS_VARIABLE: "60"}, 60),
        ({"suffix": 60, "flag": 60, "config": 60, MAX_OBJECTS_VARIABLE: "60"}, 60),
    ],
)
def test_equal_values_pass(sources, expected):
    """Spec: docs/spec/presets.md#maximum-number-of-objects"""
    assert resolve_max_objects(**sources) == expected


@pytest.mark.parametrize(
    ("sources", "named"),
    [
        ({"suffix": 60, "flag": 10}, ["60 by the preset's name", "10 by --max-objects"]),
        ({"suffix": 60, "config": 10}, ["60 by the preset's name", "10 by presets.yaml"]),
        ({"flag": 60, "config": 10}, ["60 by --max-objects", "10 by presets.yaml"]),
        ({"config": 60, MAX_OBJECTS_VARIABLE: "10"}, ["60 by presets.yaml", "10 by PUBLIC_DATA_MAX_OBJECTS"]),
        ({"flag": 60, MAX_OBJECTS_VARIABLE: "10"}, ["60 by --max-objects", "10 by PUBLIC_DATA_MAX_OBJECTS"]),
        ({"suffix": 60, "flag": 60, MAX_OBJECTS_VARIABLE: "10"}, ["60 by the", "10 by PUBLIC_DATA_MAX_OBJECTS"]),
    ],
)
def test_conflict_names_both_sources_and_values(sources, named):
    """Spec: docs/spec/presets.md#maximum-number-of-objects"""
    with pytest.raises(WrongUsage) as caught:
        resolve_max_objects(**sources)
    assert [text for text in named if text not in str(caught.value)] == []


def test_coord_takes_every_source():
    """Spec: docs/spec/presets.md#names-of-derived-presets"""
    assert effective_preset("coord", "x") == ("x", None)
    assert effective_preset("coord", "x_max60") == ("x", 60)
    assert effective_preset("coord", "x", flag=60) == ("x", 60)
    assert effective_preset("coord", "x", environment="60").effective == "x_max60"
    assert effective_preset("coord", "x", config=60, flag=60, environment="60") == ("x", 60)
    with pytest.raises(WrongUsage, match="differs"):
        effective_preset("coord", "x_max60", environment="10")


@pytest.mark.parametrize("command", ["rescale", "validate", "all"])
@pytest.mark.parametrize("given", [{"flag": 60}, {"environment": "60"}])
def test_other_command_refuses_max_objects_with_the_two_steps(command, given):
    """Spec: docs/spec/presets.md#maximum-number-of-objects"""
    with pytest.raises(WrongUsage) as caught:
        effective_preset(command, "x", **given)
    assert "rescale … --preset x`" in str(caught.value)
    assert "coord … --preset x --max-objects 60`" in str(caught.value)
    assert effective_preset(command, "x", config=60, environment="") == ("x", None)


@pytest.mark.parametrize("command", ["rescale", "all"])
def test_rescale_refuses_a_derived_name(command):
    """Derived presets do not rescale images. Spec: docs/spec/presets.md#hardlinks"""
    with pytest.raises(WrongUsage) as caught:
        effective_preset(command, "x_max60")
    assert "--preset x --max-objects 60" in str(caught.value)
    assert effective_preset("validate", "x_max60") == ("x", 60)
