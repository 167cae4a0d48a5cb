"""Memory of the machine that is in use before a measurement begins.

In a virtual machine, the first use of memory that it has not used for a while is served by its host, and counts as system time
of the process that uses it: 1.5 to 3.5 seconds per GB, where otherwise it is 0.4 to 0.6. What a large data root
costs then depends on what ran before.
"""

import mmap
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.common.processes import PROJECT

_STATE = Path("/proc/meminfo")
CHUNK, LEFT = 64 << 20, 1_500_000_000


@contextmanager
def memory_in_use(size: int) -> Iterator[None]:
    """Let another process use up to `size` bytes of free memory, and give them back as they are needed; on Linux only."""
    if not _STATE.exists():
        yield
        return
    with subprocess.Popen([sys.executable, "-m", __name__, str(size)], cwd=PROJECT, stdout=subprocess.PIPE) as holder:
        assert holder.stdout
        holder.stdout.readline()
        try:
            yield
        finally:
            holder.kill()


def free_bytes() -> int:
    """Return the memory that nothing uses, not even for copies of files."""
    line = next(line for line in _STATE.read_text().splitlines() if line.startswith("MemFree:"))
    return int(line.split()[1]) * 1024


def _hold(size: int) -> None:
    parent, held = os.getppid(), list[mmap.mmap]()
    while len(held) * CHUNK < size and free_bytes() > LEFT + CHUNK:
        held.append(mmap.mmap(-1, CHUNK))
        held[-1].write(bytes(CHUNK))
    print("ready", flush=True)
    while held and os.getppid() == parent:
        while held and free_bytes() < LEFT:
            held.pop().close()
        time.sleep(0.05)


if __name__ == "__main__":
    _hold(int(sys.argv[1]))
