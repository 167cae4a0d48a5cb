"""Freed memory is kept for the next array."""

import ctypes
import subprocess
import sys

import pytest

from imagemill.pipeline import malloc_tuning as memory

# Page faults of filling one array of 4 MB after another, before and after.
COUNT = """
import resource
import numpy as np
from imagemill.pipeline.malloc_tuning import reuse_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(50):
        np.full(4_000_000, 1, np.uint8)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

first = faults()
reuse_freed_memory()
faults()
print(first, faults())
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="no glibc here")
def test_large_arrays_take_the_pages_of_those_before():
    """Each page that the system clears again costs more than filling it. Reference: mallopt(3)."""
    shown = subprocess.run([sys.executable, "-c", COUNT], capture_output=True, text=True, check=True).stdout
    before, after = map(int, shown.split())

    assert after < before / 5


def test_another_c_library_is_left_alone(monkeypatch):
    """musl and others have no such switch."""
    monkeypatch.setattr(memory.ctypes, "CDLL", lambda name: object())
    memory.reuse_freed_memory.cache_clear()

    assert memory.reuse_freed_memory() is None
