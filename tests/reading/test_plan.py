"""Assignment of samples to batches and ranks. Reference: the docstrings of `Plan`."""

from collections import Counter
from itertools import islice

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from imagemill.reading.plan import BucketLayout, Plan

layouts = st.lists(st.lists(st.integers(1, 6), max_size=6), min_size=1, max_size=4)


def plan_of(samples_per_shard, batch_size=2, **settings):
    """Return a plan of buckets given as the sample counts of their tars."""
    buckets = [
        BucketLayout(f"b{n}", np.repeat(np.arange(len(counts)), np.array(counts, int)))
        for n, counts in enumerate(samples_per_shard)
    ]
    return Plan(buckets, batch_size, **settings)


def everything(plan):
    return Counter((n, row) for n, bucket in enumerate(plan.buckets) for row in range(len(bucket.shards)))


def delivered(pieces):
    return Counter((piece.bucket, int(row)) for piece in pieces for row in piece.rows)


def places(plan, epoch=0, rank=0):
    return [(piece.step, piece.bucket, piece.rows.tolist()) for piece in plan.pieces(epoch, rank)]


# ---- exactly once


@given(layouts, st.integers(1, 4), st.integers(1, 5), st.integers(1, 4), st.sampled_from(["stream", "permutation"]))
def test_every_sample_comes_exactly_once_over_ranks_and_workers(counts, batch_size, world, workers, order):
    plan = plan_of(counts, batch_size, world_size=world, order=order, seed=7)

    pieces = [
        piece
        for rank in range(world)
        for worker in range(workers)
        for piece in islice(plan.pieces(3, rank), worker, None, workers)
    ]

    assert delivered(pieces) == everything(plan)
    assert all(1 <= len(piece.rows) <= batch_size for piece in pieces)


@given(layouts, st.integers(1, 4), st.integers(1, 5), st.sampled_from(["short", "drop", "pad"]))
def test_lengths_reported_are_the_lengths_delivered(counts, batch_size, world, tail):
    plan = plan_of(counts, batch_size, world_size=world, tail=tail)

    per_rank = [list(plan.pieces(0, rank)) for rank in range(world)]

    assert [plan.batches(rank) for rank in range(world)] == [len(pieces) for pieces in per_rank]
    assert plan.steps == len({piece.step for pieces in per_rank for piece in pieces})


@given(layouts, st.integers(1, 4), st.integers(1, 5))
def test_dropped_tails_leave_full_batches_and_fewer_samples_than_a_step_of_each_bucket(counts, batch_size, world):
    plan = plan_of(counts, batch_size, world_size=world, tail="drop")

    pieces = [piece for rank in range(world) for piece in plan.pieces(0, rank)]

    assert all(len(piece.rows) == batch_size for piece in pieces)
    missing = Counter(bucket for bucket, _ in everything(plan) - delivered(pieces))
    assert missing == Counter({n: left for n, c in enumerate(counts) if (left := sum(c) % (batch_size * world))})


@given(layouts, st.integers(1, 4), st.integers(1, 5))
def test_padded_tails_give_every_rank_equally_many_full_batches_and_every_sample(counts, batch_size, world):
    plan = plan_of(counts, batch_size, world_size=world, tail="pad")

    per_rank = [list(plan.pieces(0, rank)) for rank in range(world)]

    assert all([p.step for p in pieces] == list(range(plan.steps)) for pieces in per_rank)
    assert all(len(piece.rows) == batch_size for pieces in per_rank for piece in pieces)
    assert delivered(piece for pieces in per_rank for piece in pieces) >= everything(plan)


def test_dropped_samples_are_others_in_another_epoch():
    plan = plan_of([[7]], batch_size=4, tail="drop")

    seen = [set(delivered(plan.pieces(epoch, 0))) for epoch in range(20)]

    assert len(set.union(*seen)) == 7


def test_short_tail_is_shared_evenly():
    """10 samples on 4 ranks of 4: 3, 2, 3, 2 rather than 4, 4, 2 and 0."""
    plan = plan_of([[10]], batch_size=4, world_size=4)

    sizes = [[len(piece.rows) for piece in plan.pieces(0, rank)] for rank in range(4)]

    assert sorted(sizes) == [[2], [2], [3], [3]]


@given(layouts, st.integers(1, 3), st.integers(2, 4))
def test_all_ranks_have_the_same_bucket_at_the_same_step(counts, batch_size, world):
    plan = plan_of(counts, batch_size, world_size=world)

    buckets = {}
    for rank in range(world):
        for piece in plan.pieces(0, rank):
            assert buckets.setdefault(piece.step, piece.bucket) == piece.bucket


# ---- order


def test_buckets_are_drawn_by_samples_and_not_by_shards():
    """Ninety samples in one tar and ten in ten tars: the first batch comes from the large bucket with probability 0.9."""
    plan = plan_of([[90], [1] * 10], batch_size=1)

    first = Counter(next(iter(plan.pieces(epoch, 0))).bucket for epoch in range(1000))

    assert 850 < first[0] < 950


def test_buckets_are_mixed_to_the_end_of_the_epoch():
    """The probability follows the remaining samples, so that neither bucket is used up early."""
    plan = plan_of([[300], [100]], batch_size=1)

    last_places = [[step for step, bucket, _ in places(plan, epoch) if bucket == 1][-1] for epoch in range(20)]

    assert all(place > 350 for place in last_places)


@pytest.mark.parametrize("order", ["stream", "permutation"])
def test_order_is_that_of_seed_and_epoch(order):
    counts = [[20, 20], [30]]
    plan = plan_of(counts, order=order, seed=1)

    assert places(plan, 4) == places(plan_of(counts, order=order, seed=1), 4)
    assert places(plan, 4) != places(plan, 5)
    assert places(plan, 4) != places(plan_of(counts, order=order, seed=2), 4)


def test_order_is_the_same_on_every_machine():
    """A saved position remains valid after an upgrade: only raw bits and `random.random` are used, which never change."""
    plan = plan_of([[4, 3], [3]], batch_size=2, seed=11, order="stream")

    assert places(plan, 2) == [
        (0, 0, [2, 0]), (1, 0, [5, 1]), (2, 0, [6, 4]), (3, 0, [3]), (4, 1, [1, 2]), (5, 1, [0]),
    ]  # fmt: skip


def test_default_order_is_the_same_on_every_machine():
    plan = plan_of([[4, 3], [3]], batch_size=2, seed=11)

    assert places(plan, 2) == [
        (0, 0, [2, 0]), (1, 0, [5, 1]), (2, 0, [6, 4]), (3, 0, [3]), (4, 1, [1, 2]), (5, 1, [0]),
    ]  # fmt: skip
    assert places(plan, 2) != places(plan_of([[4, 3], [3]], batch_size=2, seed=11, order="stream", buffer=0), 2)


def test_default_order_mixes_classes_that_are_sorted_over_the_tars():
    """60,000 samples of 1,000 classes: 256 random samples have 227 distinct classes on average."""
    plan = plan_of([[1000] * 60], batch_size=256)

    classes = [len({int(row) // 60 for row in piece.rows}) for piece in plan.pieces(0, 0)][:-1]

    assert np.mean(classes) >= 225
    assert min(classes) >= 200


@given(layouts, st.integers(0, 12), st.integers(0, 100))
def test_stream_moves_a_sample_no_further_than_the_buffer(counts, buffer, seed):
    plan = plan_of(counts, order="stream", buffer=buffer, seed=seed)
    for bucket in plan.buckets:
        order = plan._samples_in_order(bucket, 0)
        # Without a buffer, tars are read one after the other, in the same order of tars.
        streamed = plan_of(counts, order="stream", buffer=0, seed=seed)._samples_in_order(bucket, 0)

        places = {int(row): place for place, row in enumerate(streamed)}
        assert all(abs(places[int(row)] - place) <= buffer for place, row in enumerate(order))


@given(st.lists(st.integers(1, 6), min_size=1, max_size=6), st.integers(0, 100))
def test_stream_without_buffer_reads_each_tar_once_from_its_beginning(counts, seed):
    plan = plan_of([counts], order="stream", buffer=0, seed=seed)

    shards = [int(plan.buckets[0].shards[row]) for row in plan._samples_in_order(plan.buckets[0], 0)]

    tars = list(dict.fromkeys(shards))
    assert shards == [tar for tar in tars for _ in range(counts[tar])]


def test_permutation_lets_every_sample_stand_anywhere():
    plan = plan_of([[50] * 4], order="permutation")
    first = {int(plan._samples_in_order(plan.buckets[0], epoch)[0]) for epoch in range(400)}

    assert len(first) > 150  # 173 of 200 expected


def test_order_within_a_bucket_does_not_depend_on_the_other_buckets():
    """Training first on one bucket and later on all sees the same order."""
    alone, together = plan_of([[9, 9]]), plan_of([[9, 9], [5]])

    expected = [rows for _, _, rows in places(alone)]

    assert [rows for _, bucket, rows in places(together) if bucket == 0] == expected


# ---- going on


@given(layouts, st.integers(1, 3), st.integers(1, 3), st.integers(0, 20))
def test_going_on_from_a_step_gives_the_rest(counts, batch_size, world, step):
    plan = plan_of(counts, batch_size, world_size=world)
    for rank in range(world):
        expected = [place for place in places(plan, rank=rank) if place[0] >= step]

        rest = [(piece.step, piece.bucket, piece.rows.tolist()) for piece in plan.pieces(0, rank, step)]

        assert rest == expected


@given(layouts, st.integers(1, 4))
def test_steps_hold_the_same_samples_on_other_numbers_of_ranks(counts, half):
    """So the state of two ranks can be loaded by one with twice the batch size."""
    one, two = plan_of(counts, 2 * half, world_size=1), plan_of(counts, half, world_size=2)

    together = sorted((*piece_key(p), i, row) for r in (0, 1) for p in two.pieces(0, r) for i, row in enumerate(p.rows))

    assert sorted(row[:2] + row[3:] for row in together) == sorted(
        (*piece_key(p), row) for p in one.pieces(0, 0) for row in p.rows
    )


def piece_key(piece):
    return piece.step, piece.bucket
