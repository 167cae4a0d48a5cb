"""Images that a dead rank leaves behind, and their order. Spec: docs/spec/conventions.md#refused-and-failed"""

import pytest

from imagemill.pipeline.stage_a.rank_files import InFlight, forget, in_flight, left_behind


def dies_at(store, rank, *places):
    """A process that ends without a word."""
    hands = InFlight(store, rank)
    for place in places:
        hands.begin(place)
    hands._file.close()


def test_rank_that_ends_well_leaves_nothing(tmp_path):
    with InFlight(tmp_path, 0) as hands:
        hands.begin("审核通过/a/1.jpg")
        hands.done()
        hands.begin("审核通过/a/2.jpg")

    assert list(tmp_path.iterdir()) == []


def test_rank_that_an_exception_ends_has_killed_nothing(tmp_path):
    with pytest.raises(KeyError), InFlight(tmp_path, 0) as hands:
        hands.begin("a")
        raise KeyError

    assert left_behind(tmp_path) == []


def test_model_that_exits_has_killed_its_process(tmp_path):
    with pytest.raises(SystemExit), InFlight(tmp_path, 0) as hands:
        hands.begin("a")
        raise SystemExit(3)

    assert left_behind(tmp_path) == ["a"]


def test_dead_rank_leaves_what_it_had_in_its_hands(tmp_path):
    hands = InFlight(tmp_path, 1)
    hands.begin("done\nwith this")
    hands.done()
    hands.begin("a\nb")
    hands.begin("c")
    hands._file.close()

    assert in_flight(tmp_path, 1) == left_behind(tmp_path) == ["a\nb", "c"]
    assert in_flight(tmp_path, 0) == []


def test_image_that_kills_again_goes_to_the_end(tmp_path):
    dies_at(tmp_path, 0, "a", "b", "c")
    dies_at(tmp_path, 0, "a")

    assert in_flight(tmp_path, 0) == ["a"]
    assert left_behind(tmp_path) == ["b", "c", "a"]


def test_what_was_left_outlives_a_rank_that_ends_well(tmp_path):
    """Until a merge says what became of it: it may be another rank's by now."""
    dies_at(tmp_path, 0, "a")
    with InFlight(tmp_path, 0) as hands:
        hands.begin("b")

    assert left_behind(tmp_path) == ["a"]


def test_place_cut_short_by_the_death_is_passed_over(tmp_path):
    dies_at(tmp_path, 0, "a", "b")
    path = tmp_path / "rank0.at_work"
    path.write_bytes(path.read_bytes()[:-2])

    assert left_behind(tmp_path) == ["a"]
    dies_at(tmp_path, 0, "c")
    assert left_behind(tmp_path) == ["a", "c"]


def test_what_was_overcome_is_forgotten_and_the_rest_stays_in_order(tmp_path):
    dies_at(tmp_path, 0, "a", "b")
    dies_at(tmp_path, 3, "c", "d")

    forget(tmp_path, but={"d", "a"})
    assert left_behind(tmp_path) == ["a", "d"]

    forget(tmp_path, but={"elsewhere"})
    assert list(tmp_path.iterdir()) == []
