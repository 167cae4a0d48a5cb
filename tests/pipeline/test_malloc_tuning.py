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


# Bytes in memory before and after freed blocks are returned, of which one that is in use lies behind all others.
RETURN = """
from pathlib import Path
from imagemill.pipeline.malloc_tuning import return_freed_memory, reuse_freed_memory

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

reuse_freed_memory()
blocks = [bytearray(100_000) for _ in range(2000)]
last = blocks.pop()
del blocks
kept = resident()
return_freed_memory()
print(kept - resident())
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="no glibc here")
def test_freed_blocks_are_returned_before_records_and_shards_are_made():
    """They were kept for the arrays of images. Reference: malloc_trim(3)."""
    shown = subprocess.run([sys.executable, "-c", RETURN], capture_output=True, text=True, check=True).stdout

    assert int(shown) > 100_000_000


def test_another_c_library_is_left_alone(monkeypatch):
    """musl and others have no such switch."""
    monkeypatch.setattr(memory.ctypes, "CDLL", lambda name: object())
    memory.reuse_freed_memory.cache_clear()

    assert memory.reuse_freed_memory() is None
    assert memory.return_freed_memory() is None
