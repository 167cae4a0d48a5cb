"""Gain of each call through ctypes over the plain way, in the same run.

    mallopt    photographs of a megapixel decoded by a process that keeps freed memory; plain: glibc's defaults
    syncfs     npy files of a whole pass as in npy_writes.py; plain: fdatasync of each file, on threads

Rounds are interleaved. TMPDIR must name a folder on a disk, because files in memory need no flush.

Goal: each at least 1.2 times plain.
"""

import argparse
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from unittest import mock

from benchmarks import npy_writes
from benchmarks.common.inputs import noise_photos, scratch
from imagemill.config import Config

GOAL = 1.2
DECODE = """
import sys, time
from pathlib import Path
from imagemill.pipeline.malloc_tuning import reuse_freed_memory
from imagemill.formats.images import decode_rgb

if sys.argv[1] == "mallopt":
    reuse_freed_memory()
photos = [path.read_bytes() for path in Path(sys.argv[2]).glob("*.jpg")]
decode_rgb(photos[0], "photo")
began = time.process_time()
for photo in photos * 4:
    decode_rgb(photo, "photo")
print(time.process_time() - began)
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--samples", type=int, default=300, help="images of 1 MP")
    parser.add_argument("--rounds", type=int, default=11)
    arguments = parser.parse_args()
    arrays = npy_writes._arrays(arguments.samples)

    def decode(way: str) -> float:
        command = [sys.executable, "-c", DECODE, way, str(folder / "photos")]
        return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)

    def flush(way: str) -> float:
        def write(arrays: npy_writes.Arrays, place: Path) -> None:
            npy_writes.passes(arrays, place, write_threads=Config().write_threads)

        # More files than any batch has, so that each is flushed separately.
        with mock.patch("imagemill.fs.durable.TOGETHER_FROM", 1 << 30) if way == "plain" else mock.MagicMock():
            return npy_writes._timed(write, arrays, folder)

    with scratch() as folder:
        noise_photos(folder / "photos", max(1, arguments.samples // 30), width=1024, height=1024, smooth=8)
        return (
            0
            if min(_gain("mallopt", decode, arguments.rounds), _gain("syncfs", flush, arguments.rounds)) >= GOAL
            else 1
        )


def _gain(name: str, seconds: Callable[[str], float], count: int) -> float:
    """Return plain seconds over ours, the median over rounds without the first one."""
    rounds = [(seconds("plain"), seconds(name)) for _ in range(count + 1)][1:]
    plain, ours = (median(column) for column in zip(*rounds, strict=True))
    gain = median(plain / ours for plain, ours in rounds)
    print(f"{name:<8} {ours:.3f} s, plain {plain:.3f} s: {gain:.2f} times plain (goal: at least {GOAL})")
    return gain


if __name__ == "__main__":
    sys.exit(main())
