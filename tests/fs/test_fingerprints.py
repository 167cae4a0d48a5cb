"""imagemill/fs/fingerprints.py: bytes of whole files, and tables of fingerprints."""

import os
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from imagemill.fs.fingerprints import FingerprintTable, fingerprint, read_whole

_KEYS = st.text(max_size=2)
_FINGERPRINTS = st.binary(max_size=3).map(fingerprint) | st.sampled_from(["xxh3:" + "0" * 32, "xxh3:" + "f" * 32])


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


@given(st.dictionaries(_KEYS, _FINGERPRINTS), st.lists(st.tuples(_KEYS, st.none() | _FINGERPRINTS)))
def test_table_of_fingerprints_is_a_dict(first, then):
    table, expected, taken = FingerprintTable(first.items()), dict(first), FingerprintTable()
    for key, value in then:
        if value is None:
            assert table.pop(key, None) == expected.pop(key, None)
        else:
            table[key] = expected[key] = value
    for key in [*expected, "no such key"]:
        taken.take(key, table)

    assert list(table.items()) == list(taken.items()) == list(expected.items())
