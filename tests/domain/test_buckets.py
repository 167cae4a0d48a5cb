"""The seven buckets and the nearest one. Expected values are computed with exact fractions instead of floats."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from imagemill.domain.buckets import (
    BUCKETS,
    assign_bucket,
    bucket_crop,
    bucket_size,
    is_unusual_ratio,
    use_of_crop,
    use_of_window,
)

sides = st.integers(8, 20_000)


def nearest_exactly(width: int, height: int) -> str:
    """Return the bucket with the least |w/h - W/H| in exact arithmetic; `min` returns the first on a tie."""
    return min(BUCKETS, key=lambda bucket: abs(Fraction(width, height) - Fraction(*map(int, bucket.split("x")))))


def test_buckets_are_the_seven_of_the_seed_in_its_order():
    """Spec: docs/spec/stage2.md#buckets"""
    assert BUCKETS == ("1024x1024", "832x1216", "1216x832", "768x1280", "1280x768", "704x1344", "1344x704")


@pytest.mark.parametrize("bucket", BUCKETS)
def test_bucket_sides_are_divisible_by_64(bucket):
    """Spec: docs/spec/stage2.md#buckets"""
    assert [side % 64 for side in bucket_size(bucket)] == [0, 0]


@pytest.mark.parametrize("bucket", BUCKETS)
def test_image_of_a_bucket_s_own_size_gets_that_bucket(bucket):
    assert assign_bucket(*bucket_size(bucket)) == bucket


@pytest.mark.parametrize(
    ("width", "height", "bucket"),
    [
        (1000, 1000, "1024x1024"),
        (640, 480, "1216x832"),
        (480, 640, "832x1216"),
        (1920, 1080, "1280x768"),
        (1080, 1920, "768x1280"),
        (10_000, 10, "1344x704"),
        (10, 10_000, "704x1344"),
    ],
)
def test_common_size_gets_the_bucket_of_nearest_ratio(width, height, bucket):
    """1920/1080 = 1.78 differs by 0.11 from 1280/768 and by 0.13 from 1344/704. Spec: docs/spec/stage2.md#buckets"""
    assert assign_bucket(width, height) == bucket


@given(sides, sides)
def test_bucket_is_the_nearest_in_exact_arithmetic(width, height):
    """Spec: docs/spec/stage2.md#buckets"""
    distances = sorted(abs(Fraction(width, height) - Fraction(*bucket_size(bucket))) for bucket in BUCKETS)
    if distances[0] != distances[1]:  # ties have a separate test
        assert assign_bucket(width, height) == nearest_exactly(width, height)


# The ratio halfway between two neighbouring buckets, as integers.
TIES = [
    pytest.param(59, 105, "768x1280", id="between 704x1344 and 768x1280"),
    pytest.param(61, 95, "832x1216", id="between 768x1280 and 832x1216"),
    pytest.param(16, 19, "1024x1024", id="between 832x1216 and 1024x1024"),
    pytest.param(16, 13, "1024x1024", id="between 1024x1024 and 1216x832"),
    pytest.param(61, 39, "1216x832", id="between 1216x832 and 1280x768"),
    pytest.param(59, 33, "1280x768", id="between 1280x768 and 1344x704"),
]


@pytest.mark.parametrize("scale", [1, 100])
@pytest.mark.parametrize(("width", "height", "bucket"), TIES)
def test_first_bucket_in_the_seed_s_order_wins_a_tie(width, height, bucket, scale):
    """Spec: docs/spec/stage2.md#buckets"""
    assert nearest_exactly(width * scale, height * scale) == bucket
    assert assign_bucket(width * scale, height * scale) == bucket


@pytest.mark.parametrize(
    ("width", "height", "unusual"),
    [(400, 1000, False), (399, 1000, True), (2500, 1000, False), (2501, 1000, True), (1000, 1000, False)],
)
def test_ratio_is_unusual_only_outside_its_limits(width, height, unusual):
    """Spec: docs/spec/stage2.md#buckets"""
    assert is_unusual_ratio(width, height) is unusual


# ---- the crop of a bucket


@pytest.mark.parametrize(
    ("size", "box"),
    [
        ((1024, 1024), (0, 0, 1024, 1024)),
        ((640, 426), (8, 0, 631, 426)),  # 1216x832: round(426 * 1216 / 832) = 623 columns, the odd one at the right
        ((640, 480), (0, 21, 640, 459)),  # 1216x832: round(640 * 832 / 1216) = 438 rows
        ((4000, 3000), (0, 131, 4000, 2868)),
        ((480, 640), (21, 0, 459, 640)),
    ],
)
def test_crop_is_centred_with_the_smaller_margin_at_left_and_top(size, box):
    """Spec: docs/spec/stage2.md#bucket-size"""
    assert bucket_crop(*size) == box


@given(width=sides, height=sides)
def test_crop_has_the_ratio_of_the_bucket_and_all_of_one_side(width, height):
    """Spec: docs/spec/stage2.md#bucket-size"""
    wide, high = bucket_size(assign_bucket(width, height))
    left, top, right, bottom = bucket_crop(width, height)

    assert 0 <= left < right <= width
    assert 0 <= top < bottom <= height
    assert 0 <= (width - right) - left <= 1
    assert 0 <= (height - bottom) - top <= 1
    assert right - left == width or bottom - top == height
    assert abs((right - left) * high - (bottom - top) * wide) <= max(wide, high)


@given(width=sides, height=sides)
def test_use_of_a_picture_is_a_share_of_it(width, height):
    for use in (use_of_crop(width, height), use_of_window(width, height)):
        assert 0 < use.coverage <= 1 + 1e-9
        assert use.enlargement > 0
    assert use_of_crop(width, height).coverage >= use_of_window(width, height).coverage - 1 / min(width, height)


def test_window_of_a_large_photo_shows_little_of_it_and_its_crop_most():
    """A photo of 12 megapixels."""
    assert use_of_window(4032, 3024).coverage == pytest.approx(0.083, abs=0.001)
    assert use_of_crop(4032, 3024).coverage == pytest.approx(0.912, abs=0.001)
