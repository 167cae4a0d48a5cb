"""Parts of a photograph that a latent contains. The window is compared with the one that readers cut."""

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from imagemill.domain.buckets import BUCKETS, bucket_crop, bucket_size
from imagemill.domain.latent_boxes import encoded_box, window_box
from imagemill.reading.latents import fit_latent

sides = st.integers(8, 3000)


def places(width, height):
    """Return a latent whose two channels are the pixel row and column of the middle of each place."""
    y, x = np.mgrid[: height // 8, : width // 8] * 8.0 + 4
    return np.stack([y, x]).astype(np.float32)


@example(472, 696, "832x1216")  # an enlarged latent with 153 rows, of which the window has the first 152
@given(sides, sides, st.sampled_from(BUCKETS))
@settings(deadline=None)
def test_window_is_the_part_that_readers_cut(width, height, bucket):
    """Spec: docs/spec/stage2.md#bucket-size"""
    wide, high = bucket_size(bucket)
    rows, columns = fit_latent(places(width, height), (high // 8, wide // 8), "crop")

    left, top, right, bottom = window_box(width, height, bucket)

    # Pairs of places at a quarter of the window, because an enlarged latent is flat at its edges.
    row, column = (count // 4 for count in rows.shape)
    assert abs((columns[0, column] + columns[0, -1 - column]) / 2 - (left + right) / 2) <= 1
    assert abs((rows[row, 0] + rows[-1 - row, 0]) / 2 - (top + bottom) / 2) <= 1
    middle = slice(columns.shape[1] // 4, columns.shape[1] * 3 // 4)
    step = np.diff(columns[0, middle]).mean()
    if columns[0, 0] > 4 and columns[0, -1] < width // 8 * 8 - 4:
        assert right - left == pytest.approx(step * columns.shape[1], abs=1.01)


@given(sides, sides, st.sampled_from(BUCKETS))
def test_window_is_inside_the_photograph_and_has_the_ratio_of_its_bucket(width, height, bucket):
    wide, high = bucket_size(bucket)
    left, top, right, bottom = window_box(width, height, bucket)

    assert 0 <= left < right <= width
    assert 0 <= top < bottom <= height
    assert abs((right - left) * high - (bottom - top) * wide) <= 8 * max(wide, high)


@pytest.mark.parametrize(
    ("size", "bucket", "box"),
    [
        ((1024, 1024), "1024x1024", (0, 0, 1024, 1024)),
        ((1100, 1033), "1024x1024", (32, 0, 1056, 1024)),  # latent 137 x 129: 4 places left of the window, none above
        ((512, 512), "1024x1024", (0, 0, 512, 512)),
        ((640, 480), "1216x832", (0, 21, 640, 459)),  # latent 80 x 60 becomes 152 x 114, of which 104 rows are kept
    ],
)
def test_window_of_common_sizes(size, bucket, box):
    assert window_box(*size, bucket) == box


def test_stored_latent_contains_the_crop_of_its_bucket_or_whole_places():
    assert encoded_box(4000, 3000, "bucket", "1216x832") == bucket_crop(4000, 3000, "1216x832")
    assert encoded_box(4000, 3000, "bucket") == bucket_crop(4000, 3000)
    assert encoded_box(1023, 770, "original") == (0, 0, 1016, 768)
    assert encoded_box(1023, 770, "original", cell=14) == (0, 0, 1022, 770)
