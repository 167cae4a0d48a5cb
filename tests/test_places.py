"""Folders elsewhere, remembered. Source: CONTRACTS, first table."""

from imagemill.layout import DataRoot
from imagemill.places import locate, put


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
    """Stage 1 records hold captions and vectors that cost hours."""
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
