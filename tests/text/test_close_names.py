"""Names similar to a mistyped one."""

import time

import pytest

from imagemill.text.close_names import MOST, close_names, name_hint


def test_most_similar_name_comes_first():
    assert close_names("photo006", ["photo1111", "photo006x", "cat"])[0] == "photo006x"


@pytest.mark.parametrize("given", ["Movie.GIF", "movie.gif", "MOVIE"])
def test_file_name_and_other_case_match_the_id(given):
    assert close_names(given, ["movies", "movie", "other"])[0] == "movie"


def test_at_most_five_names_are_returned():
    assert len(close_names("photo0", [f"photo{n}" for n in range(1, 9)])) == MOST == 5


def test_name_like_no_other_has_no_close_names():
    assert close_names("zebra", ["photo0001", "photo0002"]) == []


def test_hint_without_similar_names_gives_the_first_ones():
    assert name_hint("zebra", [f"photo{n}" for n in range(8)]) == (
        "existing names: photo0, photo1, photo2, photo3, photo4 and 3 more"
    )
    assert name_hint("zebra", ["photo1"]) == "existing names: photo1"
    assert name_hint("zebra", []) is None


def test_hundreds_of_thousands_of_names_are_searched_in_seconds():
    names = [f"{n:012d}" for n in range(300_000)]

    began = time.monotonic()

    assert close_names("000000123456x", names)[0] == "000000123456"
    assert time.monotonic() - began < 20
