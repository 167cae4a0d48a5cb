"""Arithmetic of sizes, boxes and polygons.

Spec: docs/spec/presets.md#target-size, docs/spec/presets.md#geometry, docs/spec/presets.md#quantisation
"""

from fractions import Fraction
from math import ceil, floor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from imagemill.domain.geometry import (
    LAST_BIN,
    MAX_ASPECT,
    MAX_PIXELS,
    MIN_PIXELS,
    check_limits,
    in_top_left_order,
    quantise_box,
    quantise_objects,
    quantise_polygon,
    scale_box,
    scale_objects,
    scale_polygon,
    target_size,
)
from imagemill.errors import Refused, WrongUsage

sides = st.integers(1, 20_000)
sizes = st.tuples(st.integers(2, 3000), st.integers(2, 3000))
numbers = st.integers(-500, 5000) | st.floats(-500, 5000, allow_nan=False)


def near(value, size):
    """Return a value mapped into (0, size - 1)."""
    return min(max(value, 0), size - 1)


# ---- target size


@pytest.mark.parametrize(
    ("source", "target"),
    [((1920, 1080), (1152, 640)), ((640, 427), (640, 416)), ((4032, 3024), (1024, 768)),
     ((33, 33), (64, 64)), ((42, 41), (64, 64))],
)  # fmt: skip
def test_target_size_of_the_contracts_examples(source, target):
    assert target_size(*source) == target


def test_side_half_way_between_two_multiples_goes_to_the_even_one():
    assert target_size(272, 240) == (256, 256)  # 8.5 and 7.5 factors


@given(sides, sides, st.sampled_from([1, 2, 14, 28, 32]))
def test_target_keeps_factor_and_limits(width, height, factor):
    """Every size is a multiple within the limits, or refused with the reason."""
    try:
        w, h = target_size(width, height, image_factor=factor)
    except Refused as refusal:
        assert refusal.reason in {"aspect", "too_large"}
        return
    assert (w % factor, h % factor) == (0, 0)
    assert MIN_PIXELS * (1 - 2 / min(w, h)) <= w * h <= MAX_PIXELS


@given(sides, sides)
def test_target_of_a_target_is_itself(width, height):
    """A preset of a preset copies its images; only rounding beyond the largest aspect is an exception."""
    try:
        size = target_size(width, height)
    except Refused:
        return
    if max(size) <= MAX_ASPECT * min(size):
        assert target_size(*size) == size


@pytest.mark.parametrize(
    ("size", "limits", "reason"),
    [((2001, 10), {}, "aspect"), ((10, 2001), {}, "aspect"),
     ((2000, 10), {"max_pixels": 1024}, "too_large"), ((100, 10), {"max_pixels": 4096}, "too_large")],
)  # fmt: skip
def test_image_no_size_fits_is_refused(size, limits, reason):
    with pytest.raises(Refused) as refusal:
        target_size(*size, **limits)
    assert refusal.value.reason == reason
    assert refusal.value.do


def test_aspect_of_exactly_200_is_taken():
    assert target_size(2000, 10) == (1984, 32)  # 62.5 factors


@pytest.mark.parametrize("limits", [(0, 4096, 1), (32, 1000, 1), (32, 5000, 6000), (32, 5000, 0)])
def test_limits_no_image_can_keep_are_wrong_usage(limits):
    with pytest.raises(WrongUsage):
        check_limits(*limits)


def test_usual_limits_pass():
    check_limits(32, 1024, 1024)


# ---- scaling


@given(numbers, sizes, sizes)
def test_scaled_value_is_the_exact_product_rounded_half_to_even(value, source, target):
    exact = near(round(Fraction(value) * target[0] / source[0]), target[0])

    scaled = scale_polygon([value, 0], source, target)[0]

    assert scaled == exact if isinstance(value, int) else abs(scaled - exact) <= 1


@pytest.mark.parametrize("huge", [10**400, 1e308])
def test_number_beyond_any_float_is_clamped_like_another(huge):
    assert scale_polygon([huge, -huge], (20, 20), (40, 40)) == [39, 0]
    assert quantise_polygon([huge, -huge], 20, 20) == [999, 0]
    assert quantise_box([-huge, -huge, huge, huge], 20, 20) == [0, 0, 999, 999]


def test_half_goes_to_the_even_pixel_and_both_axes_have_their_own_scale():
    assert scale_polygon([1, 1, 3, 3, 5, 2], (20, 40), (10, 80)) == [0, 2, 2, 6, 2, 4]


@given(st.lists(numbers, min_size=4, max_size=4), sizes, sizes)
def test_scaled_box_lies_inside_and_has_an_extent(box, source, target):
    x1, y1, x2, y2 = scale_box([min(box[0::2]), min(box[1::2]), max(box[0::2]), max(box[1::2])], source, target)

    assert 0 <= x1 < x2 <= target[0] - 1
    assert 0 <= y1 < y2 <= target[1] - 1


def test_collapsed_box_is_widened_to_the_right_and_at_the_edge_to_the_left():
    assert scale_box([100, 100, 101, 101], (1000, 1000), (100, 100)) == [10, 10, 11, 11]
    assert scale_box([998, 998, 1000, 1000], (1000, 1000), (100, 100)) == [98, 98, 99, 99]


def test_image_one_pixel_wide_has_no_box():
    with pytest.raises(Refused):
        scale_box([0, 0, 10, 10], (10, 10), (1, 10))


def test_objects_keep_order_and_unknown_keys():
    objects = [
        {"desc": "a", "poly": [0, 0, 10, 0, 10, 10], "poly_points": 3, "x": 1},
        {"bbox_2d": [0, 0, 5, 5], "desc": "b"},
    ]

    scaled = scale_objects(objects, (20, 20), (40, 40))

    assert scaled == [
        {"desc": "a", "poly": [0, 0, 20, 0, 20, 20], "poly_points": 3, "x": 1},
        {"bbox_2d": [0, 0, 10, 10], "desc": "b"},
    ]
    assert list(scaled[1]) == ["bbox_2d", "desc"]


def test_equal_sizes_leave_geometry_as_it_is_written():
    objects = [{"desc": "a", "bbox_2d": [0.5, 0, 900, 12.25]}]
    assert scale_objects(objects, (64, 64), (64, 64)) == objects


# ---- quantising


@pytest.mark.parametrize(
    ("box", "bins"),
    [([10, 12, 80, 60], [78, 126, 630, 631]), ([0, 0, 128, 96], [0, 0, 999, 999]),
     ([127, 95, 127, 95], [998, 998, 999, 999])],
)  # fmt: skip
def test_bins_of_the_contracts_goldens(box, bins):
    assert quantise_box(box, 128, 96) == bins


@given(st.lists(st.integers(-50, 3100), min_size=4, max_size=4), sizes)
def test_bins_cover_the_box(box, size):
    """Floor and ceil of the exact quotient, clamped, and never without an extent."""
    x1, x2 = min(box[:2]), max(box[:2])
    y1, y2 = min(box[2:]), max(box[2:])

    left, top, right, bottom = quantise_box([x1, y1, x2, y2], *size)

    assert 0 <= left < right <= LAST_BIN
    assert 0 <= top < bottom <= LAST_BIN
    exact = near(floor(Fraction(x1 * 999, size[0] - 1)), 1000), near(ceil(Fraction(x2 * 999, size[0] - 1)), 1000)
    assert (left, right) == exact or exact[0] == exact[1]


@given(st.lists(st.tuples(numbers, numbers), min_size=3, max_size=9), sizes)
def test_vertices_keep_their_walk(vertices, size):
    """The first vertex may change, the order may not: each vertex is quantised separately."""
    flat = [value for vertex in vertices for value in vertex]

    bins = quantise_polygon(flat, *size)

    assert bins == [bin_ for x, y in vertices for bin_ in quantise_polygon([x, y], *size)]
    assert all(type(value) is int and 0 <= value <= LAST_BIN for value in bins)


def test_vertices_are_rounded_half_to_even_and_floats_become_ints():
    assert quantise_polygon([1, 3, 0.5, 1.0], 1999, 1999) == [0, 2, 0, 0]
    assert all(type(value) is int for value in quantise_box([0.5, 1.5, 9.5, 9.0], 11, 11))


def test_image_one_pixel_wide_is_quantised_too():
    """Values are clamped; nothing is raised."""
    assert quantise_box([0, 0, 1, 1], 1, 1) == [0, 0, 999, 999]
    assert quantise_polygon([0, 0, 1, 1], 1, 1) == [0, 0, 999, 999]


# ---- order of objects


def test_top_left_order_is_by_min_y_then_min_x_and_stable():
    """Objects are ordered by (min y, min x) of the quantised values; ties keep their order."""
    shapes = {
        "low": [0, 900, 5, 950],
        "right": [500, 10, 600, 20],
        "left": [4, 10, 600, 20],
        "left again": [4, 10, 9, 900],
        "polygon": [300, 40, 2, 10, 300, 11],
    }

    ordered = in_top_left_order(list(shapes), list(shapes.values()))

    assert ordered == ["polygon", "left", "left again", "right", "low"]
    assert in_top_left_order([], []) == []


def test_object_is_quantised_as_its_kind_is():
    assert quantise_objects([{"bbox_2d": [10, 12, 80, 60]}], 128, 96) == [[78, 126, 630, 631]]
    assert quantise_objects([{"poly": [0, 0, 127, 0, 127, 95]}], 128, 96) == [[0, 0, 999, 0, 999, 999]]


@given(
    st.lists(st.integers(-3, 70) | st.floats(-3, 70), min_size=6, max_size=12).filter(
        lambda points: len(points) % 2 == 0
    ),
    st.integers(1, 64),
    st.sampled_from([1, 48, 1 << 15]),
)
def test_polygon_by_tables_is_the_polygon_by_the_rule(points, width, height):
    """This holds outside the image, between pixels, and along a side without a table."""
    assert quantise_objects([{"poly": points}], width, height) == [quantise_polygon(points, width, height)]
