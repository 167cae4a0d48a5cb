"""The division of images among ranks. Spec: docs/spec/stage-a.md#sharding-modes"""

import os
from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from imagemill.domain.ranks import ImageJob, Ranks, launch_of, plan_ranks, processes_here, ranks_of
from imagemill.errors import WrongUsage

sizes = st.lists(st.integers(1, 9), max_size=12)
modes = st.sampled_from(["per_group", "per_image"])
worlds = st.integers(1, 6)


def all_jobs(sizes):
    return [ImageJob(seq, index) for seq, size in enumerate(sizes) for index in range(1, size + 1)]


@given(sizes, modes, worlds)
def test_every_image_is_on_exactly_one_rank(sizes, mode, world):
    plan = plan_ranks(sizes, mode, world)

    assert all_jobs(sizes) == sorted(chain.from_iterable(plan.jobs(rank) for rank in range(world)))


@given(sizes, worlds)
def test_per_image_takes_every_nth_image(sizes, world):
    plan = plan_ranks(sizes, "per_image", world)

    assert [all_jobs(sizes)[rank::world] for rank in range(world)] == [list(plan.jobs(rank)) for rank in range(world)]


@given(sizes, worlds)
def test_per_group_takes_every_nth_group_whole(sizes, world):
    plan = plan_ranks(sizes, "per_group", world)

    for rank in range(world):
        jobs = list(plan.jobs(rank))
        assert list(range(len(sizes)))[rank::world] == list(dict.fromkeys(job.group_seq for job in jobs))
        assert jobs == [job for job in all_jobs(sizes) if job.group_seq % world == rank]


def test_images_of_a_large_group_are_on_both_ranks_in_per_image_mode():
    """Scenario: per_image sharding improves balance without changing group contract."""
    by_image, by_group = (plan_ranks([20, 1], mode, 2) for mode in ("per_image", "per_group"))

    assert [len(list(by_image.jobs(rank))) for rank in range(2)] == [11, 10]
    assert [len(list(by_group.jobs(rank))) for rank in range(2)] == [20, 1]
    assert {0} == {job.group_seq for job in by_image.jobs(1)}


def test_default_mode_is_per_group():
    """Scenario: Default behavior remains per_group."""
    assert plan_ranks([2]).mode == "per_group"


@pytest.mark.parametrize(("mode", "world"), [("per_batch", 1), ("per_group", 0), ("per_group", -1)])
def test_unknown_mode_or_world_is_refused(mode, world):
    with pytest.raises(WrongUsage):
        plan_ranks([1], mode, world)


@pytest.mark.parametrize("rank", [-1, 2])
def test_rank_outside_the_world_is_refused(rank):
    with pytest.raises(WrongUsage, match=f"rank {rank} of 2"):
        plan_ranks([1], "per_image", 2).jobs(rank)


@pytest.mark.parametrize(
    ("environment", "flag", "expected"),
    [
        ({}, None, Ranks(None, 1)),
        ({}, 3, Ranks(None, 3)),
        ({"WORLD_SIZE": "4"}, None, Ranks(None, 4)),
        ({"WORLD_SIZE": "4"}, 4, Ranks(None, 4)),
        ({"RANK": "0", "WORLD_SIZE": "1"}, None, Ranks(0, 1)),
        ({"RANK": "3", "WORLD_SIZE": "4"}, 4, Ranks(3, 4)),
        ({"RANK": "", "WORLD_SIZE": " "}, 2, Ranks(None, 2)),
    ],
)
def test_rank_is_that_of_the_environment(environment, flag, expected):
    """Spec: docs/spec/stage-a.md#torchrun"""
    assert expected == ranks_of(environment, flag)


@pytest.mark.parametrize(
    ("environment", "flag", "message"),
    [
        ({"RANK": "0"}, None, "WORLD_SIZE is not"),
        ({"RANK": "0"}, 2, "WORLD_SIZE is not"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, None, "RANK is 2, and WORLD_SIZE 2"),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, None, "RANK is '-1'"),
        ({"RANK": "٣", "WORLD_SIZE": "9"}, None, "RANK is"),
        ({"WORLD_SIZE": "two"}, None, "WORLD_SIZE is 'two'"),
        ({"WORLD_SIZE": "0"}, None, "WORLD_SIZE is 0"),
        ({"WORLD_SIZE": "2"}, 3, "two world sizes: 2 by WORLD_SIZE, 3 by --world-size"),
        ({}, 0, "--world-size is 0"),
    ],
)
def test_contradiction_in_the_environment_is_refused(environment, flag, message):
    with pytest.raises(WrongUsage, match=message):
        ranks_of(environment, flag)


def test_ranks_of_one_start_share_its_name_and_a_restart_has_another():
    one = {"MASTER_PORT": "29500", "LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "2", "TORCHELASTIC_RESTART_COUNT": "0"}

    assert launch_of({**one, "RANK": "0"}) == launch_of({**one, "RANK": "1"})
    assert launch_of(one) != launch_of({**one, "TORCHELASTIC_RESTART_COUNT": "1"})
    assert str(os.getppid()) in launch_of(one)
    assert str(os.getppid()) not in launch_of({**one, "WORLD_SIZE": "4"}).split("/")[-1]


@pytest.mark.parametrize(
    ("environment", "expected"),
    [({}, 1), ({"LOCAL_WORLD_SIZE": "4", "WORLD_SIZE": "8"}, 4), ({"LOCAL_WORLD_SIZE": "0"}, 1)],
)
def test_torchrun_says_how_many_ranks_share_a_machine(environment, expected):
    assert processes_here(environment) == expected
