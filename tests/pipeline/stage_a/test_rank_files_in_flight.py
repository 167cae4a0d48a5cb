"""Images in flight when a rank died, and their order. Spec: docs/spec/conventions.md#refused-and-failed"""

import pytest

from imagemill.pipeline.stage_a.rank_files import InFlight, forget, in_flight, left_behind


def dies_at(store, rank, *places):
    """Simulate a process that dies while it handles these images."""
    hands = InFlight(store, rank)
    for place in places:
        hands.begin(place)
    hands._file.close()


def test_rank_that_succeeds_leaves_nothing(tmp_path):
    with InFlight(tmp_path, 0) as hands:
        hands.begin("审核通过/a/1.jpg")
        hands.done()
        hands.begin("审核通过/a/2.jpg")

    assert list(tmp_path.iterdir()) == []


def test_rank_ended_by_an_exception_leaves_nothing(tmp_path):
    with pytest.raises(KeyError), InFlight(tmp_path, 0) as hands:
        hands.begin("a")
        raise KeyError

    assert left_behind(tmp_path) == []


def test_image_is_recorded_if_the_model_exits_the_process(tmp_path):
    with pytest.raises(SystemExit), InFlight(tmp_path, 0) as hands:
        hands.begin("a")
        raise SystemExit(3)

    assert left_behind(tmp_path) == ["a"]


def test_dead_rank_leaves_its_images_in_flight(tmp_path):
    hands = InFlight(tmp_path, 1)
    hands.begin("done\nwith this")
    hands.done()
    hands.begin("a\nb")
    hands.begin("c")
    hands._file.close()

    assert in_flight(tmp_path, 1) == left_behind(tmp_path) == ["a\nb", "c"]
    assert in_flight(tmp_path, 0) == []


def test_image_in_flight_at_a_second_death_comes_last(tmp_path):
    dies_at(tmp_path, 0, "a", "b", "c")
    dies_at(tmp_path, 0, "a")

    assert in_flight(tmp_path, 0) == ["a"]
    assert left_behind(tmp_path) == ["b", "c", "a"]


def test_images_left_by_a_dead_rank_remain_after_a_successful_rank(tmp_path):
    """They remain until a merge has settled them, because another rank may own them now."""
    dies_at(tmp_path, 0, "a")
    with InFlight(tmp_path, 0) as hands:
        hands.begin("b")

    assert left_behind(tmp_path) == ["a"]


def test_entry_truncated_by_the_death_is_skipped(tmp_path):
    dies_at(tmp_path, 0, "a", "b")
    path = tmp_path / "rank0.at_work"
    path.write_bytes(path.read_bytes()[:-2])

    assert left_behind(tmp_path) == ["a"]
    dies_at(tmp_path, 0, "c")
    assert left_behind(tmp_path) == ["a", "c"]


def test_finished_images_are_removed_and_the_rest_keeps_its_order(tmp_path):
    dies_at(tmp_path, 0, "a", "b")
    dies_at(tmp_path, 3, "c", "d")

    forget(tmp_path, but={"d", "a"})
    assert left_behind(tmp_path) == ["a", "d"]

    forget(tmp_path, but={"elsewhere"})
    assert list(tmp_path.iterdir()) == []
