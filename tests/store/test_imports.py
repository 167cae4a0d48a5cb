"""Folders of `approved/` are recognised as those of one archive. Spec: docs/spec/stage2.md#archives"""

import pytest

from imagemill.store.imports import OtherArchive, record_import


@pytest.fixture
def archive(tmp_path):
    (tmp_path / "a").mkdir()
    path = tmp_path / "a" / "0.tar"
    path.write_bytes(b"one" * 2_000_000)
    return path


def other(tmp_path, data):
    (tmp_path / "b").mkdir()
    path = tmp_path / "b" / "0.tar"
    path.write_bytes(data)
    return path


def test_other_archive_of_the_name_is_refused_while_the_folder_exists(data_root, archive, tmp_path):
    record_import(data_root, archive, "0")
    (data_root.approved / "0").mkdir()

    with pytest.raises(OtherArchive, match="unpacked from another archive") as error:
        record_import(data_root, other(tmp_path, b"two"), "0")
    assert str(archive) in str(error.value.why)

    record_import(data_root, tmp_path / "b" / "0.tar", "1")
    (data_root.approved / "0").rmdir()
    record_import(data_root, tmp_path / "b" / "0.tar", "0")


def test_moved_archive_and_a_completed_download_are_the_same(data_root, archive, tmp_path):
    (data_root.approved / "0").mkdir()
    record_import(data_root, archive, "0")

    moved = other(tmp_path, archive.read_bytes())
    record_import(data_root, moved, "0")
    moved.write_bytes(archive.read_bytes() + b"more")
    record_import(data_root, moved, "0")


def test_damaged_record_is_replaced(data_root, archive):
    record_import(data_root, archive, "0")
    (record,) = (data_root.state / "imports").iterdir()
    good = record.read_bytes()
    record.write_bytes(b"{")
    (data_root.approved / "0").mkdir()

    record_import(data_root, archive, "0")

    assert record.read_bytes() == good
