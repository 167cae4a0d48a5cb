"""Recorded folders outside the data root. Spec: docs/spec/conventions.md#locations"""

import shutil

import pytest

from imagemill.domain.layout import DataRoot
from imagemill.errors import WrongUsage
from imagemill.store.locations import gone, refuse_no_folder
from tests.helpers.sessions import locate, put


def test_root_without_a_ledger_has_its_own_folders(tmp_path):
    root = locate(tmp_path / "data")

    assert (root.derived, root.shards) == (root.path / "derived", root.path / "shards")
    assert not root.path.exists(), "looking makes nothing"


def test_folder_is_remembered_and_another_one_is_said(tmp_path, capsys):
    put(DataRoot(tmp_path / "data"), "shards", tmp_path / "disk2")
    assert f"shards: in {tmp_path / 'disk2'} from now on" in capsys.readouterr().err
    root = locate(tmp_path / "data")
    assert root.shards == tmp_path / "disk2"

    put(root, "shards", tmp_path / "disk2")
    assert capsys.readouterr().err == ""
    put(root, "shards", tmp_path / "disk3")
    assert f"until now in {tmp_path / 'disk2'}" in capsys.readouterr().err
    assert locate(root.path).shards == tmp_path / "disk3"


def test_records_come_along_to_another_disk_once_and_stay_where_they_were(tmp_path, capsys):
    """Stage 1 records contain captions and vectors that cost hours."""
    root = DataRoot(tmp_path / "data")
    root.derived.mkdir(parents=True)
    root.stage2_jsonl.write_bytes(b"expensive\n")

    moved = put(root, "derived", tmp_path / "disk2")

    assert moved.stage2_jsonl.read_bytes() == root.stage2_jsonl.read_bytes() == b"expensive\n"
    assert "copied from" in capsys.readouterr().err
    moved.stage2_jsonl.write_bytes(b"newer\n")
    put(moved, "derived", root.derived)
    put(root, "derived", tmp_path / "disk2")
    assert moved.stage2_jsonl.read_bytes() == b"newer\n", "what is there is never replaced"


@pytest.fixture
def no_folders(tmp_path):
    """Paths that are not and cannot become folders: a file, below a file, a dangling link, a name that is too long."""
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("nothing")
    return [tmp_path / "file", tmp_path / "file" / "below", tmp_path / "link", tmp_path / ("x" * 300)]


@pytest.mark.parametrize("name", ["derived", "shards", "public_data", "stage_a_input", "stage_a_output"])
def test_what_is_no_folder_is_refused_and_not_remembered(tmp_path, no_folders, name, capsys):
    """A user's mistake never gives a traceback, now or later. Spec: docs/spec/conventions.md#exit-codes"""
    root = DataRoot(tmp_path / "data")
    for place in no_folders:
        with pytest.raises(WrongUsage, match=f"{name}: ") as caught:
            put(root, name, place)
        assert caught.value.where == place

    assert locate(root.path) == root
    assert capsys.readouterr().err == "", "nothing was said to be in use"


def test_folder_that_is_not_there_is_made_but_not_by_a_look(tmp_path, no_folders):
    """So a folder that is missing later is detected."""
    for place in no_folders:
        with pytest.raises(WrongUsage):
            refuse_no_folder("shards", place)
    refuse_no_folder("shards", tmp_path / "a" / "b")
    assert not (tmp_path / "a").exists()

    put(DataRoot(tmp_path / "data"), "shards", tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").is_dir()


def test_remembered_folder_that_is_not_there_is_reported(tmp_path):
    root = DataRoot(tmp_path / "data")
    assert gone(root) == {}
    root = put(put(root, "shards", tmp_path / "disk"), "derived", tmp_path / "other")
    assert gone(root) == {}

    shutil.rmtree(tmp_path / "disk")
    shutil.rmtree(tmp_path / "other")
    (tmp_path / "other").touch()

    assert gone(locate(root.path)) == {"derived": tmp_path / "other", "shards": tmp_path / "disk"}
