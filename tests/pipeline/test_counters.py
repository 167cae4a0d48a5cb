"""One counter per image, the first that fits. Source: seed 002, decision 8; CONTRACTS section 1, "counters"."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from imagemill.pipeline.counters import COUNTERS, count_images, progress_line

EXTRACTED, VAE = ("dinov3_npy", "extracted"), ("vae_latents", "computed")
ADDED, MIGRATED, CHANGED = (("stage2_jsonl", what) for what in ("added", "migrated", "changed"))


@pytest.mark.parametrize(
    ("made", "failed", "complete", "counter"),
    [
        (set(), False, False, "skipped"),
        (set(), True, False, "failed"),
        ({EXTRACTED, MIGRATED}, True, True, "failed"),
        ({EXTRACTED, MIGRATED}, False, True, "migrated_new"),
        ({ADDED, VAE}, False, True, "migrated_new"),
        ({EXTRACTED, MIGRATED}, False, False, "enriched"),
        ({EXTRACTED}, False, False, "extracted"),
        ({EXTRACTED, VAE}, False, False, "enriched"),
        ({EXTRACTED, CHANGED}, False, True, "enriched"),
        ({CHANGED}, False, True, "enriched"),
        ({VAE}, False, False, "enriched"),
    ],
)
def test_each_image_is_in_the_first_counter_that_fits(made, failed, complete, counter):
    counts = count_images(["a"], {"a": made}, {"a"} if failed else (), {"a"} if complete else ())

    assert counts == {**dict.fromkeys(COUNTERS, 0), counter: 1, "total": 1}


changes = st.sets(st.sampled_from([EXTRACTED, VAE, ADDED, MIGRATED, CHANGED]))
ids = st.lists(st.text(max_size=3), unique=True)


@given(ids, st.dictionaries(st.text(max_size=3), changes), st.sets(st.text(max_size=3)), st.sets(st.text(max_size=3)))
def test_counters_sum_to_the_total(items, made, failed, complete):
    counts = count_images(items, made, failed, complete)

    assert sum(counts[name] for name in COUNTERS) == counts["total"] == len(items)


def test_progress_line_is_the_one_of_the_seed():
    counts = {"migrated_new": 6, "enriched": 2, "extracted": 2, "skipped": 3, "failed": 1, "total": 14}

    line = "progress: 6 migrated, 2 enriched, 2 extracted, 3 skipped (total: 14) rate=2.5/s failed=1"
    assert progress_line(counts, 4.0) == line
    assert "rate=0.0/s" in progress_line(counts, 0.0)
