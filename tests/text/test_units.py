"""Counts, sizes, durations and rates as text."""

import pytest

from imagemill.text.units import as_duration, as_rate, as_size, counted


@pytest.mark.parametrize(
    ("count", "noun", "text"),
    [
        (0, "image", "0 images"),
        (1, "image", "1 image"),
        (1200, "image", "1,200 images"),
        (2, "entry", "2 entries"),
        (2, "batch", "2 batches"),
        (2, "unsupported file", "2 unsupported files"),
        (1, "unsupported file", "1 unsupported file"),
    ],
)
def test_counted_noun_is_singular_only_for_one(count, noun, text):
    assert counted(count, noun) == text


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (41_234_567_890, "41.2 GB"),
        (12_300_000, "12.3 MB"),
        (4096, "4.1 kB"),
        (1_234_000_000_000, "1.2 TB"),
        (12, "12 B"),
    ],
)
def test_size_is_decimal(size, text):
    assert as_size(size) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (7.2, "8 s"), (125, "2 min 05 s"), (12_000, "3 h 20 min"), (187_200, "2 d 04 h")],
)
def test_duration_has_two_units(seconds, text):
    assert as_duration(seconds) == text


@pytest.mark.parametrize(
    ("amount", "seconds", "text"),
    [
        (250, 2, "125 images/s"),
        (25, 2, "12.5 images/s"),
        (1, 4, "4.0 s per image"),
        (1, 125, "2 min 05 s per image"),
        (0, 10, "0 images/s"),
        (3, 0, "0 images/s"),
    ],
)
def test_slow_rate_is_not_rounded_to_zero(amount, seconds, text):
    assert as_rate(amount, seconds, "image") == text
