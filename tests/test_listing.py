"""Listing folders: what the files are, in this process or in another one."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from imagemill.files import FileSignature, posix_signature
from imagemill.listing import Listing, begin_listing, list_files


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


def stats(listing: Listing) -> dict[str, FileSignature]:
    return {name: listing.stat(n) for n, name in enumerate(listing.names.values)}


def test_files_are_listed_by_name_without_suffix(folder: Path) -> None:
    """Regular files, links to them too, with what the file system says of them."""
    found = list_files(folder, ".npy")
    assert list(found) == ["a", "a.b", "link", "日本 語"], "in order of the names without suffix"
    status = (folder / "a.b.npy").stat()
    assert posix_signature(4, status.st_mtime_ns, status.st_ino) == found["a.b"] == found["link"]


def test_no_folder_has_no_files(tmp_path: Path) -> None:
    """A kind that was never made has no folder; nor has one below a file."""
    (tmp_path / "file").touch()

    assert list_files(tmp_path / "nowhere", ".npy") == list_files(tmp_path / "file" / "dinov3", ".npy") == {}


@pytest.mark.parametrize("aside", [True, False])
def test_folders_are_listed_alike_by_another_interpreter(folder: Path, aside: bool) -> None:
    """The same outcome, in the order asked for."""
    with ThreadPoolExecutor(2) as pool:
        first, second = begin_listing(pool, [folder, folder / "nowhere"], ".npy", aside=aside)
    assert (list_files(folder, ".npy"), {}) == (stats(first.result()), stats(second.result()))
    assert first.result().names.values == ["a", "a.b", "link", "日本 語"]


def test_an_interpreter_that_fails_is_stood_in_for(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no interpreter can be started this one does the work."""
    monkeypatch.setattr("sys.executable", "/bin/false")
    with ThreadPoolExecutor(1) as pool:
        (found,) = begin_listing(pool, [folder], ".npy", aside=True)
    assert list_files(folder, ".npy") == stats(found.result())


def test_symlink_that_leads_back_to_itself_is_no_file(tmp_path):
    (tmp_path / "a.npy").touch()
    (tmp_path / "loop.npy").symlink_to("loop.npy")

    assert list(list_files(tmp_path, ".npy")) == ["a"]
