"""A mistyped name: the message lists similar existing names, and nothing changes."""

import pytest

from imagemill.domain.layout import DataRoot
from tests.helpers.commands import called
from tests.helpers.product import imagemill, photos, snapshot


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Three images in shards, and two missions."""
    root = DataRoot(tmp_path_factory.mktemp("names") / "data")
    photos(root.approved, 3)
    done = imagemill("run", "--data-root", root.path, stub=True)
    assert done.returncode == 0, done.stdout + done.stderr
    for mission in ("shelf-2024", "counter-2024"):
        (root.stage_a_input / mission).mkdir(parents=True)
    return root


@pytest.mark.parametrize(
    ("arguments", "code", "expected"),
    [
        (["explain", "photo001"], 1, "why:   similar names: photo0001"),
        (["explain", "PHOTO0001.jpg"], 1, "why:   similar names: photo0001"),
        (["explain", "zebra"], 1, "why:   existing names: photo0000, photo0001, photo0002"),
        (["withdraw", "photo0000", "foto0001"], 1, "do:    check the ids; for 'foto0001', similar names: photo0001"),
        (["withdraw", "--restore", "foto0001.jpg"], 1, "for 'foto0001.jpg', similar names: photo0001"),
        (["stage-a", "--mission", "shelf2024"], 1, "why:   similar names: shelf-2024"),
        (["shards", "--bucket", "1024x1204"], 2, "why:   similar names: 1024x1024"),
        (["shards", "--bucket", "1024x1204", "--dry-run"], 2, "choose from 1024x1024, 832x1216, 1216x832"),
    ],
)
def test_error_for_a_mistyped_name_lists_similar_ones(root, arguments, code, expected):
    before = snapshot(root.derived, root.shards)

    done = called(root, *arguments)

    assert expected in done.text
    assert done.code == code
    assert snapshot(root.derived, root.shards) == before


def test_existing_name_is_accepted(root):
    """The suggested names are accepted."""
    assert called(root, "explain", "photo0001").code == 0
    assert called(root, "shards", "--bucket", "1024x1024", "--dry-run").code == 0
