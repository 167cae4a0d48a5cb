"""imagemill/pipeline/batch_size.py: the fastest power of two is found, within memory, and kept.

Spec: docs/spec/stage2.md#batch-size
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from imagemill.pipeline.batch_size import FIRST, LARGEST, BatchSize


def settled(seconds_of, **options):
    """The size found for a device that computes `items` in `seconds_of(items)`."""
    size = BatchSize("auto", **options)
    for _ in range(100):
        size.note(size.size, seconds_of(size.size))
    assert size.settled
    return size.size


@pytest.mark.parametrize("best", [8, 16, 32, 64, 128, 256])
def test_size_from_which_on_nothing_is_gained(best):
    """A device that computes `best` items in the time of one."""
    assert settled(lambda items: max(1, items / best)) == best


def test_device_that_gains_with_every_size_gets_the_largest():
    assert settled(lambda items: 1) == LARGEST


def test_slow_batch_among_fast_ones_does_not_count():
    """A batch that waited for its images, or in which a library prepared for a shape."""
    size = BatchSize("auto")
    for seconds in (60, 1, 1, 60, 1, 1, 3, 2.5, 2):
        size.note(size.size, seconds)

    assert (size.size, size.settled) == (16, True)


def test_incomplete_batches_are_not_compared():
    size = BatchSize("auto")
    for _ in range(10):
        size.note(FIRST - 1, 1)

    assert (size.size, size.settled) == (FIRST, False)


def test_size_that_does_not_fit_is_the_limit():
    size = BatchSize("auto")
    for _ in range(3):
        size.note(FIRST, 1)
    size.does_not_fit(2 * FIRST)

    assert (size.size, size.settled) == (FIRST, True)


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (BatchSize(5), 5),
        (BatchSize(5, 64), 5),
        (BatchSize("auto", 64), 64),
        (BatchSize("auto", fixed=True), FIRST),
    ],
)
def test_known_size_stays(size, expected):
    for _ in range(10):
        size.note(expected, 1)

    assert (size.size, size.settled) == (expected, True)


@given(st.lists(st.tuples(st.integers(1, LARGEST), st.floats(0, 10), st.booleans())))
def test_size_is_always_a_power_of_two_up_to_the_largest(batches):
    size = BatchSize("auto")
    for items, seconds, fits in batches:
        if fits:
            size.note(items, seconds)
        else:
            size.does_not_fit(min(items, size.size))
        assert 1 <= size.size <= LARGEST
