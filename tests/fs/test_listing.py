"""Listing of folders with file signatures, in this process or in another one."""

import itertools
import os
import sys
from collections import namedtuple
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from imagemill.fs.fingerprints import FileSignature, posix_signature, signature_bytes
from imagemill.fs.listing import FileListing, _states, list_files, list_folders, start_listing


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
    listings = start_listing([folder / "nowhere", folder], ".npy")
    monkeypatch.setattr("imagemill.fs.listing._states", None)

    first, second = listings
    assert first == {}
    assert list(second.items()) == list(expected.items())


def test_process_that_fails_is_replaced_by_this_one(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/bin/false")

    assert list(start_listing([folder], ".npy")) == [list_files(folder, ".npy")]


def test_process_that_ends_early_leaves_the_other_folders_to_this_one(
    folder: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folders that it has listed are not listed again."""
    own, here = tmp_path_factory.mktemp("own"), list[Path]()
    (own / "python").write_text(
        f'#!/bin/sh\nexec {sys.executable} "$1" "$2" "$3" "$4" "$5" "$6"\n'
    )  # without the last folder
    (own / "python").chmod(0o755)
    monkeypatch.setattr("sys.executable", str(own / "python"))
    monkeypatch.setattr("imagemill.fs.listing._states", lambda at, suffix: here.append(at) or _states(at, suffix))

    first, second = start_listing([folder, own], ".npy")

    assert list(first) == ["a", "a.b", "link", "日本 語"]
    assert second == {}
    assert here == [own]


def test_files_are_listed_where_no_temporary_file_can_be_made(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise FileNotFoundError(2, "No usable temporary directory found")

    monkeypatch.setattr("tempfile.TemporaryFile", refuse)

    assert list(start_listing([folder, folder], ".npy")) == [list_files(folder, ".npy")] * 2


def test_symlink_that_leads_back_to_itself_is_no_file(tmp_path):
    (tmp_path / "a.npy").touch()
    (tmp_path / "loop.npy").symlink_to("loop.npy")

    assert list(list_files(tmp_path, ".npy")) == ["a"]


def test_folders_with_equal_names_share_them(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Three kinds have files of the same images; their names are in memory once, also if another process listed them."""
    other = tmp_path_factory.mktemp("other")
    for name in list_files(folder, ".npy"):
        (other / f"{name}.npy").write_bytes(b"another size")
    for first, second in (list_folders([folder, other], ".npy"), start_listing([folder, other], ".npy")):
        assert first != second
        assert all(mine is theirs for mine, theirs in zip(first, second, strict=True))
        assert second["a"].startswith("posix:12:")


_STATES = st.tuples(st.integers(0, 2**63 - 1), st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**64 - 1))
_FILES = st.dictionaries(st.text(max_size=3), _STATES.map(lambda state: posix_signature(*state)), max_size=6)


@given(files=_FILES, again=st.sets(st.text(max_size=3), max_size=4), found=_FILES)
def test_listing_is_the_dict_of_signatures(
    files: dict[str, FileSignature], again: set[str], found: dict[str, FileSignature]
) -> None:
    """Any size, time (also before 1970) and inode; sorted by name, also after some files are looked up again."""
    found = {name: signature for name, signature in found.items() if name in again}
    listing = FileListing.of(files)
    assert list(listing.items()) == sorted(files.items())
    assert listing.get("a file with a longer name") is None
    assert {name: listing.size(name) for name in files} == {n: signature_bytes(s) for n, s in files.items()}
    state = namedtuple("state", "image_id stat")
    states = [*itertools.starmap(state, files.items()), *(state(name, posix_signature(7, 7, 7)) for name in again)]
    assert listing.unchanged(states) == {
        each.image_id: each for each in states if files.get(each.image_id) == each.stat
    }
    renewed = listing.renewed(again, found)
    expected = {name: signature for name, signature in files.items() if name not in again} | found
    assert list(renewed.items()) == sorted(expected.items())
    again_the_same = listing.renewed(again, found, [renewed])
    assert all(mine is theirs for mine, theirs in zip(renewed, again_the_same, strict=True))
    assert again_the_same == renewed
    assert len(renewed) == len(expected)
    assert FileListing.received(renewed.sent(None), None) == renewed
    assert FileListing.received(renewed.sent(renewed), renewed) == renewed
