"""A folder takes another's place in one step."""

import os
import threading

from imagemill.swap import replace_folder


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


def test_reader_never_finds_a_mixture(tmp_path):
    """The complete old set or the complete new one, never files of both. Source: CONTRACTS section 2, `--overwrite`."""

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
