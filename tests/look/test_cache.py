"""The cache of pictures: bounded, shared by processes, whole or absent, in memory if the disk cannot be written."""

import os
import stat
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from imagemill.fs.atomic import temporaries
from imagemill.look import cache as caches
from imagemill.look.cache import PictureCache
from tests.helpers.product import PROJECT

NEIGHBOUR = """
import sys
from pathlib import Path
from imagemill.look.cache import PictureCache
cache = PictureCache(Path(sys.argv[1]), int(sys.argv[2]))
for n in range(200):
    cache.put(f"{n % 50}", bytes([n % 50]) * 100)
    found = cache.get(f"{(n + 7) % 50}")
    assert found in (None, bytes([(n + 7) % 50]) * 100), found
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / ".imagemill").mkdir()
    return tmp_path / ".imagemill" / "look"


def used(path, seconds_ago):
    """Make a file look used so long ago."""
    os.utime(path, (time.time() - seconds_ago,) * 2)


def test_bytes_are_found_by_name_also_by_another_process(folder):
    PictureCache(folder).put("a", b"picture")

    assert PictureCache(folder).get("a") == b"picture"
    assert PictureCache(folder).get("b") is None


def test_folder_is_for_its_owner_alone_even_if_it_was_copied_with_other_modes(folder):
    cache = PictureCache(folder)
    cache.put("a", b"picture")
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700

    folder.chmod(0o755)
    PictureCache(folder).put("b", b"picture")
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_nothing_is_created_before_the_first_picture_or_without_a_state_folder(folder, tmp_path):
    PictureCache(folder).get("a")
    assert not folder.exists()

    cache = PictureCache(tmp_path / "mistyped" / ".imagemill" / "look")
    cache.put("a", b"picture")
    assert cache.get("a") == b"picture"
    assert not (tmp_path / "mistyped").exists()


@pytest.mark.parametrize("damage", [b"", b"picture", b"picturE" + bytes(16), bytes(5)])
def test_damaged_file_is_absent_and_made_again(folder, damage):
    cache = PictureCache(folder)
    cache.put("a", b"picture")
    (folder / "a").write_bytes(damage)

    assert cache.get("a") is None
    assert not (folder / "a").exists()
    cache.put("a", b"picture")
    assert cache.get("a") == b"picture"


def test_files_used_least_recently_are_removed_first(folder):
    cache = PictureCache(folder, limit_bytes=1000)
    for n in range(8):
        cache.put(str(n), bytes(84))  # 100 with the hash
        used(folder / str(n), 100 - n)
    assert cache.get("0") == bytes(84)

    for n in range(8, 14):
        cache.put(str(n), bytes(84))

    left = {path.name for path in folder.iterdir()}
    assert sum(path.stat().st_size for path in folder.iterdir()) <= 1000
    assert {"0", "13"} <= left
    assert not left & {"1", "2", "3", "4"}


def test_files_of_other_processes_count(folder):
    one, other = PictureCache(folder, 1600), PictureCache(folder, 1600)
    for n in range(100):
        (one, other)[n % 2].put(str(n), bytes(84))
        assert sum(path.stat().st_size for path in folder.iterdir()) <= 1600 + 200


def test_several_processes_and_threads_share_a_folder(folder):
    command = [sys.executable, "-c", NEIGHBOUR, str(folder), "3000"]
    children = [subprocess.Popen(command, cwd=PROJECT, stderr=subprocess.PIPE, text=True) for _ in range(3)]
    cache = PictureCache(folder, 3000)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda n: cache.put(f"{n % 50}", bytes([n % 50]) * 100), range(200)))
    ends = [child.communicate()[1] for child in children]

    assert [child.returncode for child in children] == [0, 0, 0], ends
    assert temporaries(folder) == []


def test_folder_that_cannot_be_written_is_replaced_by_memory(folder):
    folder.parent.rmdir()
    folder.parent.write_text("a file, so that no folder can be made in it")
    cache = PictureCache(folder)

    cache.put("a", b"picture")

    assert cache.get("a") == b"picture"


def test_full_disk_keeps_pictures_in_memory_and_no_part_of_a_file(folder, monkeypatch):
    cache = PictureCache(folder)
    cache.put("a", b"picture")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(caches.os, "replace", full)
    cache.put("b", b"another")

    assert cache.get("b") == b"another"
    assert [path.name for path in folder.iterdir()] == ["a"]


def test_memory_is_bounded_and_what_was_used_least_recently_goes_first(monkeypatch):
    monkeypatch.setattr(caches, "MEMORY_BYTES", 1000)
    cache = PictureCache(None)
    for n in range(10):
        cache.put(str(n), bytes(100))
    assert cache.get("0") == bytes(100)

    cache.put("10", bytes(100))
    cache.put("10", bytes(100))

    assert [name for name in map(str, range(11)) if cache.get(name)] == [
        "0",
        "2",
        "3",
        "4",
        "5",
        "6",
        "7",
        "8",
        "9",
        "10",
    ]


def test_picture_that_exceeds_the_limit_alone_is_not_kept(folder, monkeypatch):
    monkeypatch.setattr(caches, "MEMORY_BYTES", 10)
    for cache in (PictureCache(folder, 10), PictureCache(None)):
        cache.put("a", bytes(100))
        assert cache.get("a") is None
