"""Listing of folders with file signatures, in this process or in another one."""

import os
from pathlib import Path

import pytest

from imagemill.fs.fingerprints import posix_signature
from imagemill.fs.listing import list_files, start_listing


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A file of ours, an odd name, a link, and four things that are not listed."""
    (tmp_path / "a.b.npy").write_bytes(b"four")
    (tmp_path / "a.npy").touch()
    (tmp_path / "日本 語.npy").touch()
    (tmp_path / "link.npy").symlink_to(tmp_path / "a.b.npy")
    (tmp_path / "dangling.npy").symlink_to(tmp_path / "nowhere")
    (tmp_path / "folder.npy").mkdir()
    (tmp_path / "a.txt").touch()
    os.mkfifo(tmp_path / "pipe.npy")
    return tmp_path


def test_files_are_listed_by_name_without_suffix(folder: Path) -> None:
    """Regular files and links to them are listed with their signatures."""
    found = list_files(folder, ".npy")
    assert list(found) == ["a", "a.b", "link", "日本 語"], "in order of the names without suffix"
    status = (folder / "a.b.npy").stat()
    assert posix_signature(4, status.st_mtime_ns, status.st_ino) == found["a.b"] == found["link"]


def test_no_folder_has_no_files(tmp_path: Path) -> None:
    """A kind that was never made has no folder; a path below a file is not a folder either."""
    (tmp_path / "file").touch()

    assert list_files(tmp_path / "nowhere", ".npy") == list_files(tmp_path / "file" / "dinov3", ".npy") == {}


def test_folder_is_listed_alike_by_another_process(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The child process lists; this process must not."""
    expected = list_files(folder, ".npy")
    listings = start_listing([folder, folder / "nowhere"], ".npy")
    monkeypatch.setattr("imagemill.fs.listing.list_files", None)

    first, second = listings()
    assert list(first.items()) == list(expected.items())
    assert second == {}


def test_process_that_fails_is_replaced_by_this_one(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/bin/false")

    assert start_listing([folder], ".npy")() == [list_files(folder, ".npy")]


def test_symlink_that_leads_back_to_itself_is_no_file(tmp_path):
    (tmp_path / "a.npy").touch()
    (tmp_path / "loop.npy").symlink_to("loop.npy")

    assert list(list_files(tmp_path, ".npy")) == ["a"]
