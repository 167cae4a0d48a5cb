"""Ranges cover the wanted keys, in order of registration, and at most the requested number per run."""

from hypothesis import given
from hypothesis import strategies as st

from imagemill.pipeline.stage2.ranges import KeyRange, plan_ranges


def test_scattered_keys_make_one_range():
    """One wide range is faster than many narrow ones, because the asset filters."""
    assert plan_ranges(list("abcdef"), {"b", "e"}, 100) == [KeyRange("b", "e", 2)]


def test_no_wanted_keys_give_no_range():
    assert plan_ranges(list("abc"), set(), 10) == []


@given(st.lists(st.text(min_size=1), unique=True, max_size=60), st.data(), st.integers(1, 7))
def test_every_wanted_key_is_in_exactly_one_range(keys, data, size):
    wanted = set(data.draw(st.lists(st.sampled_from(keys), unique=True))) if keys else set()
    position = {key: n for n, key in enumerate(keys)}

    ranges = plan_ranges(keys, wanted, size)

    hits = [key for r in ranges for key in keys[position[r.first] : position[r.last] + 1] if key in wanted]
    assert sorted(hits) == sorted(wanted)
    assert all(1 <= r.wanted <= size for r in ranges)
