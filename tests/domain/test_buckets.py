"""The seven buckets and the nearest one. Expected values are computed with exact fractions instead of floats."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from imagemill.domain.buckets import BUCKETS, assign_bucket, bucket_size, is_unusual_ratio

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
