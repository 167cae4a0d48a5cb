"""Statistics of a set's samples."""

import json
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from imagemill.pipeline.shards.shard_statistics import Measures, measures_of, statistics_of
from tests.helpers.stage2 import record_of

MEASURES = st.builds(Measures, st.integers(0, 5000), st.integers(0, 5000), st.integers(0, 77))


def test_measures_of_a_sample_are_its_image_and_its_text():
    record = record_of("a", size=(640, 480))

    measures = measures_of(json.dumps(record).encode(), [1, 1, 1, 0])

    assert measures == (640, 480, 3)


def test_samples_are_counted_by_tokens_ratio_and_size():
    counted = statistics_of([Measures(1024, 1024, 12), Measures(1024, 1024, 77), Measures(500, 250, 12)])

    assert counted == {
        "caption_tokens": {"12": 2, "77": 1},
        "aspect_ratios": {"1.0": 2, "2.0": 1},
        "megapixels": {"<0.25": 1, "<2": 2},
        "unmeasured": 0,
    }


def test_size_on_a_limit_belongs_to_the_class_above():
    sizes = [Measures(500, 500, 1), Measures(4000, 4000, 1), Measures(9999, 9999, 1)]

    assert statistics_of(sizes)["megapixels"] == {"<0.5": 1, ">=16": 2}


def test_sample_without_measures_is_counted_apart():
    """Sets written before samples were measured have zeros."""
    counted = statistics_of([Measures(0, 0, 0), Measures(10, 10, 1)])

    assert counted["unmeasured"] == 1
    assert counted["caption_tokens"] == {"1": 1}


def test_counts_go_up_by_size_not_by_spelling():
    counted = statistics_of([Measures(100, 100, 10), Measures(100, 100, 9), Measures(1200, 100, 1)])

    assert list(counted["caption_tokens"]) == ["1", "9", "10"]
    assert list(counted["aspect_ratios"]) == ["1.0", "12.0"]


@given(st.lists(MEASURES), st.lists(MEASURES))
def test_statistics_of_two_sets_add_up(one, two):
    """The card sums the manifests of all buckets."""
    parts, whole = [statistics_of(one), statistics_of(two)], statistics_of(one + two)

    for name in ("caption_tokens", "aspect_ratios", "megapixels"):
        assert whole[name] == sum((Counter(part[name]) for part in parts), Counter())
        assert sum(whole[name].values()) + whole["unmeasured"] == len(one) + len(two)
