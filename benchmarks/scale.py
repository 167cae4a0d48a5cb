"""Cost of commands on a data root that is already complete: it should follow the change, not the size of the root.

    limit   scandir and stat of the five files of each image, and decoding of the records
    start   `imagemill --help`

CPU seconds, user and system, children included, with encoders without cost on images of 64 x 64 pixels. The files
are in memory if there is room, because the CPU time of a disk is noisy.

Goals at 60,000 images; a run with nothing to do is compared with the limit at any number.
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from PIL import Image

from benchmarks.common.inputs import noise_photos, scratch
from benchmarks.common.processes import PROJECT, cpu_seconds
from imagemill.domain.embedding_specs import embedding_specs
from imagemill.domain.layout import DataRoot
from imagemill.formats.jsonl import read_jsonl

OURS = ("-m", "benchmarks.common.ours")
SIDE = 64
BYTES_PER_IMAGE = 550_000  # npy files, their copies in the tars of two sets while one replaces the other, the history
FULL = 60_000
STATUS_SECONDS, EXPLAIN_SECONDS, TICK_SECONDS = 1.5, 0.7, 1.0
NOTHING_RATIO, NEW_RATIO, MARGINAL_MS, HISTORY_KB = 2.5, 3.0, 3.0, 10.0


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--images", type=int, default=2000)
    parser.add_argument("--new", type=int, default=100, help="images that are added")
    arguments = parser.parse_args()
    with scratch(in_memory_bytes=BYTES_PER_IMAGE * arguments.images * 3 // 2) as folder:
        return 0 if all(list(_measured(folder, arguments.images, arguments.new))) else 1


def _measured(folder: Path, images: int, new: int) -> Iterator[bool]:
    """Print each figure with its goal; yield whether the goals that hold at this number of images are reached."""
    few, half, root = (DataRoot(folder / name) for name in ("few", "half", "whole"))
    for place, count in ((few, new), (half, images // 2), (root, images)):
        _fill(place, 0, count)
    print(
        f"{images:,} images of {SIDE} x {SIDE} pixels, {len(embedding_specs())} kinds, in {folder.parent}; CPU seconds",
        flush=True,
    )
    start = cpu_seconds([*OURS, "--help"])
    first_few, first_half, first = (_run(place) for place in (few, half, root))
    history = _bytes_below(root.path / ".dagster") / images / 1000
    limit = _limit(root)
    _line("limit", limit)
    _line("start", start)
    _line("first run", first)
    marginal = 1000 * (first - first_half) / (images - images // 2)
    yield _line("  marginal cost per image, ms", marginal, MARGINAL_MS)
    yield _line("  history per image, kB", history, HISTORY_KB)
    _run(root)  # the first run after the one that made files may still record what it made
    nothing = _run(root)
    yield _line("run, nothing to do", nothing, NOTHING_RATIO * limit + start)
    at_full = images >= FULL
    yield _line("status", cpu_seconds([*OURS, "status", "--data-root", root.path]), STATUS_SECONDS) or not at_full
    one = f"photo{images // 2:06d}"
    yield (
        _line("explain", cpu_seconds([*OURS, "explain", one, "--data-root", root.path]), EXPLAIN_SECONDS) or not at_full
    )
    yield _line("sensor tick, nothing new", _tick(root), TICK_SECONDS) or not at_full
    for name, count, change in (
        (f"{new} new images", new, lambda: _fill(root, images, new)),
        ("one edited caption", 1, lambda: (root.approved / f"{one}.txt").write_text("an edited caption")),
    ):
        seconds, written = _changed(root, change)
        _line(f"  {name}: MB written to shards", written / 1e6)
        yield _line(name, seconds, nothing + NEW_RATIO * (first_few if count == new else start))


def _line(name: str, value: float, goal: float | None = None) -> bool:
    """Print one figure; return whether the goal is reached."""
    ends = "" if goal is None else f"   (goal: at most {goal:.2f}{'' if value <= goal else ', missed'})"
    print(f"{name:<40}{value:>10.2f}{ends}", flush=True)
    return goal is None or value <= goal


def _fill(root: DataRoot, begin: int, count: int) -> None:
    """Add images and captions to `approved/`."""
    if not begin:
        noise_photos(root.approved, count, width=SIDE, height=SIDE, smooth=8)
        return
    for number in range(begin, begin + count):
        pixels = np.random.default_rng(number).integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(root.approved / f"photo{number:06d}.jpg")
        (root.approved / f"photo{number:06d}.txt").write_text(f"noise, number {number}")


def _run(root: DataRoot) -> float:
    return cpu_seconds([*OURS, "run", "--data-root", root.path], DAGSTER_HOME=str(root.path / ".dagster"))


def _changed(root: DataRoot, change: Callable[[], object]) -> tuple[float, int]:
    """Return the CPU seconds of a run after a change, and the bytes of the files of shards that it wrote."""
    before = _inodes(root.shards)
    change()
    seconds = _run(root)
    return seconds, sum(size for inode, size in _inodes(root.shards).items() if inode not in before)


def _inodes(folder: Path) -> dict[int, int]:
    return {stat.st_ino: stat.st_size for stat in (path.stat() for path in folder.rglob("*") if path.is_file())}


def _bytes_below(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _limit(root: DataRoot) -> float:
    """Return the CPU seconds of stat for every file of the images, and of decoding the records."""
    began = time.process_time()
    for folder in (root.approved, *(root.derived / spec.folder for spec in embedding_specs())):
        with os.scandir(folder) as entries:
            for entry in entries:
                entry.stat()
    for _ in read_jsonl(root.stage2_jsonl):
        pass
    return time.process_time() - began


def _tick(root: DataRoot) -> float:
    command = [sys.executable, "-m", "benchmarks.common.tick", str(root.path)]
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, check=True)
    return float(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    sys.exit(main())
