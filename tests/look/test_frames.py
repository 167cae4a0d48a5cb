"""Frames: the part of a photograph that training sees, by the functions of readers and manifests."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from imagemill.domain.buckets import BUCKETS, bucket_crop, use_of_crop, use_of_window
from imagemill.domain.latent_boxes import window_box
from imagemill.look.frames import frame_of

sides = st.integers(8, 20_000)


@given(sides, sides, st.sampled_from(BUCKETS))
def test_frame_of_any_size_and_bucket_has_the_values_of_readers_and_manifests(width, height, bucket):
    cropped, window = (frame_of(width, height, bucket, size) for size in ("bucket", "original"))

    assert cropped == (bucket_crop(width, height, bucket), *use_of_crop(width, height, bucket))
    assert window == (window_box(width, height, bucket), *use_of_window(width, height, bucket))
    for (left, top, right, bottom), coverage, _ in (cropped, window):
        assert 0 <= left < right <= width
        assert 0 <= top < bottom <= height
        assert 0 < coverage <= 1 + 1e-9


@given(st.integers(200, 6000), st.integers(200, 6000), st.sampled_from(BUCKETS))
def test_coverage_is_the_area_of_the_box_but_for_places_at_the_edges(width, height, bucket):
    """Coverage counts the pixels of the image, a window whole places of 8 pixels."""
    for size in ("bucket", "original"):
        (left, top, right, bottom), coverage, _ = frame_of(width, height, bucket, size)
        assert (right - left) * (bottom - top) / (width * height) == pytest.approx(
            coverage, abs=20 / min(width, height)
        )


def test_photograph_of_a_phone_is_mostly_outside_the_window_and_inside_the_crop():
    assert frame_of(4032, 3024, "1216x832", "original").box == (1408, 1096, 2624, 1928)
    assert frame_of(4032, 3024, "1216x832", "bucket").box == (0, 132, 4032, 2891)
