"""Atomic replacement of a folder."""

import os
import threading

import pytest

from imagemill.errors import ImagemillError
from imagemill.fs import swap
from imagemill.fs.swap import read_unswapped, remove_folder, replace_folder


def make(folder, content):
    folder.mkdir()
    for n in range(3):
        (folder / f"shard-{n}").write_text(content)
    return folder


def test_new_folder_takes_the_place_and_the_old_one_is_gone(tmp_path):
    place = make(tmp_path / "place", "old")

    replace_folder(make(tmp_path / "new", "new"), place)

    assert {p.read_text() for p in place.iterdir()} == {"new"}
    assert os.listdir(tmp_path) == ["place"]


@pytest.mark.parametrize("exchanges", [True, False])
def test_link_to_a_folder_is_replaced_and_its_target_left_alone(tmp_path, monkeypatch, exchanges):
    """The target of the link belongs to the user and must not be deleted."""
    if not exchanges:
        monkeypatch.setattr(swap, "_exchange", lambda one, other: False)
    elsewhere, place = make(tmp_path / "elsewhere", "old"), tmp_path / "place"
    place.symlink_to(elsewhere)

    replace_folder(make(tmp_path / "new", "new"), place)

    assert not place.is_symlink()
    assert {p.read_text() for p in place.iterdir()} == {"new"}
    assert {p.read_text() for p in elsewhere.iterdir()} == {"old"}
    assert sorted(os.listdir(tmp_path)) == ["elsewhere", "place"]


def test_folder_is_removed_whole_and_of_a_link_only_the_link(tmp_path):
    folder, link = make(tmp_path / "folder", "x"), tmp_path / "link"
    (folder / "sub").mkdir()
    link.symlink_to(folder)

    remove_folder(link)
    assert os.listdir(tmp_path) == ["folder"]
    assert len(os.listdir(folder)) == 4

    remove_folder(folder)
    assert os.listdir(tmp_path) == []


def test_reader_never_finds_a_mixture(tmp_path):
    """A reader finds the complete old set or the complete new one. Spec: docs/spec/shards.md#replacement"""

    def generation(number):
        folder = tmp_path / f"new{number}"
        folder.mkdir()
        for n in range(3):
            (folder / f"{number}-{n}").touch()
        return folder

    place = tmp_path / "place"
    replace_folder(generation(0), place)
    seen, stop = [], threading.Event()

    def read():
        while not stop.is_set():
            seen.append({name.split("-")[0] for name in os.listdir(place)})

    reader = threading.Thread(target=read)
    reader.start()
    for number in range(1, 40):
        replace_folder(generation(number), place)
    stop.set()
    reader.join()

    assert len(seen) > 10
    assert all(len(generations) <= 1 for generations in seen)


def test_reading_begins_again_where_another_folder_took_the_place(tmp_path):
    """The first read may have found a mixture, or a missing file."""
    place, looks = make(tmp_path / "place", "old"), []

    def look():
        looks.append((place / "shard-0").read_text())
        if len(looks) < 3:
            replace_folder(make(tmp_path / "new", f"new {len(looks)}"), place)
        if len(looks) == 2:
            raise FileNotFoundError("a tar of the old set")
        return looks[-1], (place / "shard-1").read_text()

    assert read_unswapped(place, look) == ("new 2", "new 2")
    assert len(looks) == 3


def test_file_that_comes_beside_changes_no_place(tmp_path):
    """A user's notes in the folder do not count as a replacement."""
    place, looks = make(tmp_path / "place", "old"), []

    def look():
        looks.append(1)
        (place / f"notes-{len(looks)}").write_text("mine")

    read_unswapped(place, look)

    assert len(looks) == 1


def test_folder_that_never_stays_is_reported(tmp_path):
    place = make(tmp_path / "place", "old")

    with pytest.raises(ImagemillError, match="place was replaced 10 times"):
        read_unswapped(place, lambda: replace_folder(make(tmp_path / "new", "new"), place))


def test_error_of_a_folder_that_stayed_is_its_own(tmp_path):
    with pytest.raises(FileNotFoundError):
        read_unswapped(make(tmp_path / "place", "old"), (tmp_path / "nowhere").read_bytes)
