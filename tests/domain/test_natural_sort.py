"""The order of file names. Spec: docs/spec/stage-a.md#order-of-groups-and-images"""

import random

from hypothesis import given
from hypothesis import strategies as st

from imagemill.domain.natural_sort import natural_key

names = st.text("ab01٣².-", max_size=8)


def ordered(*given):
    return sorted(random.sample(given, len(given)), key=natural_key)


def test_numbers_are_ordered_by_value():
    assert ordered("-10.jpeg", "-002.jpeg", "-001.jpeg") == ["-001.jpeg", "-002.jpeg", "-10.jpeg"]


def test_equal_numbers_are_ordered_by_raw_name():
    assert ordered("1.jpg", "01.jpg", "001.jpg", "0.jpg", "00.jpg") == ["0.jpg", "00.jpg", "001.jpg", "01.jpg", "1.jpg"]


def test_other_alphabets_digits_are_text():
    """`²` and `٣` are digits for `isdigit`, but `int` does not accept `²`."""
    assert ordered("a²", "a٣", "a10", "a9") == ["a9", "a10", "a²", "a٣"]


def test_number_of_thousands_of_digits_is_ordered():
    assert ordered("9" * 6000, "1" + "0" * 6000) == ["9" * 6000, "1" + "0" * 6000]


@given(st.lists(names, unique=True))
def test_order_is_total_and_keeps_every_name(given):
    result = sorted(given, key=natural_key)

    assert sorted(result) == sorted(given)
    assert result == sorted(sorted(given), key=natural_key)
    assert len({natural_key(name) for name in given}) == len(given)


@given(st.text("ab", max_size=3), st.integers(0, 10**9), st.integers(0, 10**9), st.text("xy", max_size=3))
def test_smaller_number_comes_first_between_equal_texts(before, first, second, after):
    one, other = (natural_key(f"{before}{number}{after}") for number in (first, second))
    assert (one < other) == (first < second)
