"""imagemill/fs/fingerprints.py: bytes of whole files."""

import os
import threading

import pytest

from imagemill.fs.fingerprints import read_whole


@pytest.mark.parametrize("size", [0, 1, 4096, (1 << 20) + 1])
def test_bytes_of_a_file_are_read_whole(tmp_path, size):
    path = tmp_path / "file"
    path.write_bytes(os.urandom(size))

    assert read_whole(path) == path.read_bytes()


def test_file_whose_size_the_system_does_not_state_is_read_to_its_end(tmp_path):
    """Files of /proc and named pipes have the size 0, and a file may grow while it is read."""
    os.mkfifo(tmp_path / "pipe")
    content = os.urandom(3 << 20)
    writer = threading.Thread(target=(tmp_path / "pipe").write_bytes, args=(content,))
    writer.start()

    assert read_whole(tmp_path / "pipe") == content
    writer.join()


def test_missing_file_raises(tmp_path):
    with pytest.raises(FileNotFoundError):
        read_whole(tmp_path / "none")
