"""Which data roots may share a history, decided without one.

Spec: docs/spec/conventions.md#several-data-roots
"""

import pytest

from dagster_project.internals.shared_history import RegisteredRoot, joined
from imagemill.errors import WrongUsage

ANIMALS = RegisteredRoot("1", "animals", "/data/animals")
PLAIN = RegisteredRoot("2", None, "/data/plain")


def join(known, root_id, name, path, at=None):
    """Return the roots after one has joined. `at`: ids by path."""
    return joined(known, RegisteredRoot(root_id, name, path), (at or {}).get)


def test_roots_with_different_names_share_a_history():
    cars = RegisteredRoot("3", "cars", "/data/cars")

    assert join([], "1", "animals", "/data/animals") == [ANIMALS]
    assert join([ANIMALS], "2", None, "/data/plain") == [ANIMALS, PLAIN]
    assert join([ANIMALS, PLAIN], "3", "cars", "/data/cars") == [ANIMALS, PLAIN, cars]
    assert join([ANIMALS, PLAIN], "1", "animals", "/data/animals") == [ANIMALS, PLAIN]


@pytest.mark.parametrize("at", [{}, {"/data/animals": "9"}])
def test_root_that_was_moved_keeps_its_place(at):
    """Another root may be at its former path by now."""
    assert join([ANIMALS, PLAIN], "1", "animals", "/new", at) == [RegisteredRoot("1", "animals", "/new"), PLAIN]


def test_root_that_was_made_again_takes_its_own_place():
    """Its ledger and the second copies were lost, or it was deleted. The keys of a root with another name stay its own."""
    assert join([ANIMALS, PLAIN], "9", "animals", "/data/animals") == [
        RegisteredRoot("9", "animals", "/data/animals"),
        PLAIN,
    ]
    assert join([ANIMALS], "", "animals", "/data/animals") == [RegisteredRoot("", "animals", "/data/animals")]
    assert join([ANIMALS], "9", "cats", "/data/animals") == [ANIMALS, RegisteredRoot("9", "cats", "/data/animals")]


@pytest.mark.parametrize(
    ("new", "at", "what"),
    [
        (("3", None, "/data/other"), {}, "a second data root without a name"),
        (("3", "animals", "/data/other"), {}, "the name animals is in use"),
        (("", "animals", "/data/other"), {}, "the name animals is in use"),
        (("", None, "/data/other"), {}, "a second data root without a name"),
        (("1", "cats", "/data/animals"), {}, "the name of the data root was animals, and is now cats"),
        (("1", None, "/data/animals"), {}, "the name of the data root was animals, and is now no name"),
        (("2", "plain", "/data/plain"), {}, "the name of the data root was no name, and is now plain"),
        (("1", "animals", "/copy"), {"/data/animals": "1"}, "two data roots have the same id"),
        (("1", "other", "/copy"), {"/data/animals": "1"}, "two data roots have the same id"),
    ],
)
def test_root_is_refused(new, at, what):
    with pytest.raises(WrongUsage) as refused:
        join([ANIMALS, PLAIN], *new, at)
    assert refused.value.what == what
    assert refused.value.do
