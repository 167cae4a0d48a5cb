"""How this process treats the memory of large arrays.

By default glibc gives every freed array back to the system, which clears each page anew for the next one: half of the time
that a photo of a megapixel takes to open. Blocks that are kept cost nothing that was not in use a moment before.

How much it gains: benchmarks/system_calls.py.
Reference: mallopt(3).
"""

import ctypes
import functools

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3

# The largest that glibc takes; an array above it goes back to the system at once, as all do by default.
KEPT_BLOCK_BYTES = 32 * 1024 * 1024
# What a thread keeps for its next arrays, at most.
KEPT_BYTES = 64 * 1024 * 1024


@functools.cache
def reuse_freed_memory() -> None:
    """Keep freed blocks for the next array, from now on and in the whole process. Where there is no glibc: nothing."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # another C library, or another system
        return
    mallopt(_M_MMAP_THRESHOLD, KEPT_BLOCK_BYTES)
    mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES)
