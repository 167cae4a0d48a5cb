"""Tuning of glibc's malloc for large arrays.

By default glibc returns every freed array to the system, which then clears each page for the next one: half of the time that it
takes to open a photo of one megapixel. Keeping freed blocks needs no more memory than was in use a moment before.

The gain is measured in benchmarks/system_calls.py.
Reference: mallopt(3), malloc_trim(3).
"""

import ctypes
import functools

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3

# The largest value that glibc accepts; larger arrays are returned to the system at once, as all are by default.
KEPT_BLOCK_BYTES = 32 * 1024 * 1024
# Most bytes that a thread keeps for its next arrays.
KEPT_BYTES = 64 * 1024 * 1024


@functools.cache
def reuse_freed_memory() -> None:
    """Keep freed blocks for later arrays, in the whole process from now on. Does nothing without glibc."""
    _call("mallopt", _M_MMAP_THRESHOLD, KEPT_BLOCK_BYTES)
    _call("mallopt", _M_TRIM_THRESHOLD, KEPT_BYTES)


def return_freed_memory() -> None:
    """Return freed blocks of all threads to the system, once no more arrays are made. Does nothing without glibc."""
    _call("malloc_trim", 0)


def _call(name: str, *arguments: int) -> None:
    try:
        function = getattr(ctypes.CDLL(None), name)
    except (AttributeError, OSError, TypeError):  # another C library, or another system
        return
    function(*arguments)
