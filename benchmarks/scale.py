"""Cost of commands on a data root that is already complete: it should follow the change, not the size of the root.

    limit   scandir and stat of the five files of each image, and decoding of the records
    start   `imagemill --help`

CPU seconds, user and system, children included, with encoders without cost on images of 64 x 64 pixels. The files
are in memory if there is room, because the CPU time of a disk is noisy.

The speed of a machine that is shared varies by a quarter within minutes. So the first runs that are compared run in turns of
two seconds, while the others are stopped, and find it equally fast: the whole, two halves of it one after the other, four
quarters, and data roots of 1,000 and 2,000 images again and again. Of two equal runs in turns with a large one, the first
took 3 % more CPU time than the second; so each size is the first of every other pair, and each large one the first of every
third round. Memory is in use beforehand (benchmarks/common/memory.py).

The goals of `status`, `explain` and a sensor tick are those of 60,000 images, and of more in proportion; the other goals
hold at any number.

`--tiny`: three kinds of 16 bytes instead of the shipped ones (benchmarks/tiny_kinds), for a million images on one disk.
`--alone`: without the runs of a half and a quarter of the images, for a million images in an hour.
Without arguments, 2,000 images of the shipped kinds are measured, then 60,000 and 200,000 with `--tiny`.
"""

import argparse
import contextlib
import functools
import itertools
import math
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from benchmarks.common.inputs import noise_photos, scratch
from benchmarks.common.memory import memory_in_use
from benchmarks.common.processes import PROJECT, Cost, cost, turns_of
from imagemill.domain.embedding_specs import embedding_specs
from imagemill.domain.layout import DataRoot
from imagemill.formats.jsonl import read_jsonl

OURS = ("-m", "benchmarks.common.ours")
SIDE = 64
TINY = PROJECT / "benchmarks" / "tiny_kinds"
TINY_KINDS = ("tiny_a", "tiny_b", "tiny_c")
# PYTHONPATH of processes that may use these kinds.
TINY_PATH = os.pathsep.join(map(str, (PROJECT, TINY)))
BYTES_PER_IMAGE, BYTES_PER_TINY = (
    550_000,
    60_000,
)  # npy files, their copies in the tars of two sets while one replaces the other, the history
SHIPPED, MANY, FULL = 2_000, 200_000, 60_000
STATUS_SECONDS, EXPLAIN_SECONDS, TICK_SECONDS = 1.5, 0.7, 1.0
NOTHING_RATIO, NEW_RATIO, MARGINAL_MS, HISTORY_KB = 2.5, 3.0, 3.0, 10.0
GROWTH_RATIO, PEAK_GB, CHECKS_SHARE, SHARD_SIZE = 1.1, 1.5, 0.15, 1000
ROUNDS, PAIRS = 4, 6
# The smaller the whole, the more turns small data roots have in each round: 40 or more pairs.
IMAGES_PER_TURN = 240_000


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--images", type=int)
    parser.add_argument("--new", type=int, default=100, help="images that are added")
    parser.add_argument("--tiny", action="store_true", help="three kinds of 16 bytes")
    parser.add_argument("--alone", action="store_true", help="compare the first run with no other")
    arguments = parser.parse_args()
    given = [(arguments.images or SHIPPED, arguments.tiny)]
    numbers = given if arguments.images or arguments.tiny else [(SHIPPED, False), (FULL, True), (MANY, True)]
    met = []
    for images, tiny in numbers:
        size = (1 if arguments.alone else 2) * images * (BYTES_PER_TINY if tiny else BYTES_PER_IMAGE)
        with scratch(in_memory_bytes=size) as folder, memory_in_use(size):
            met += _measured(folder, images, arguments.new, tiny=tiny, alone=arguments.alone)
    return 0 if all(met) else 1


class _FirstRuns:
    """Cost of first runs over data roots of several sizes."""

    def __init__(self, folder: Path, sizes: Mapping[str, int], *, tiny: bool) -> None:
        self.roots = {name: DataRoot(folder / name) for name in sizes}
        self.costs: dict[str, list[Cost]] = {name: [] for name in sizes}
        self._sizes, self._tiny = sizes, tiny

    def measure(self, *names: str) -> None:
        """Make data roots and run over each."""
        for name in names:
            self.costs[name].append(_run(self._made(name)))

    def measure_in_turns(self) -> None:
        """Run over the whole in turns with two halves and four quarters, one after the other, and with small data roots."""
        large = [self._series([(name,)] * times) for name, times in (("whole", 1), ("half", 2), ("quarter", 4))]
        pairs = [("thousand", "thousands"), ("thousands", "thousand")]
        small = self._series(itertools.cycle([*(pairs * (PAIRS // 2)), ("one", "few")]))
        turns = max(1, math.ceil(IMAGES_PER_TURN / self._sizes["whole"]))
        with contextlib.closing(small):
            while large or not self.costs["thousands"]:
                large = [series for series in large if next(series, _ENDED) is not _ENDED]
                large = large[1:] + large[:1]
                for _ in range(turns):
                    next(small)

    def _series(self, groups: Iterable[Sequence[str]]) -> Generator[None, None, None]:
        """Make and run data roots, those of a group in turns. Yields after each turn."""
        for names in groups:
            found = yield from turns_of(map(_run_of, map(self._made, names)))
            for name, each in zip(names, found, strict=True):
                self.costs[name].append(each)

    def _made(self, name: str) -> DataRoot:
        """Return a data root of this name that nothing has run over."""
        root = self.roots[name]
        shutil.rmtree(root.path, ignore_errors=True)
        _fill(root, 0, self._sizes[name])
        if self._tiny:
            use_tiny_kinds(root)
        return root

    def cpu_seconds(self, name: str) -> float:
        """Return the mean, whose differences are those of all the time in which the runs had their turns."""
        return statistics.mean(cost.cpu_seconds for cost in self.costs[name])

    def typical_cpu_seconds(self, name: str) -> float:
        """Return the median, which the first run of the benchmark, in which Python compiles modules, does not raise."""
        return statistics.median(cost.cpu_seconds for cost in self.costs[name])

    def marginal_ms(self, few: str, many: str) -> float:
        """Return the milliseconds of each additional image."""
        return 1000 * (self.cpu_seconds(many) - self.cpu_seconds(few)) / (self._sizes[many] - self._sizes[few])

    def error_of_pairs_ms(self) -> float:
        """Return the standard error of `marginal_ms` of the pairs; NaN for fewer than two."""
        pairs = zip(self.costs["thousand"], self.costs["thousands"], strict=True)
        more = [1000 * (many.cpu_seconds - few.cpu_seconds) / SHARD_SIZE for few, many in pairs]
        return statistics.stdev(more) / math.sqrt(len(more)) if len(more) > 1 else math.nan


_ENDED = object()


def _measured(folder: Path, images: int, new: int, *, tiny: bool, alone: bool) -> Iterator[bool]:
    """Print each figure with its goal; yield whether the goals that hold at this number of images are reached."""
    kinds = TINY_KINDS if tiny else [spec.folder for spec in embedding_specs()]
    compared = images >= 4 * SHARD_SIZE and not alone
    small = {"one": 1, "few": new, "thousand": SHARD_SIZE, "thousands": 2 * SHARD_SIZE}
    large = {"quarter": images // 4, "half": images // 2, "whole": images}
    runs = _FirstRuns(folder, small | large, tiny=tiny)
    single, root = runs.roots["one"], runs.roots["whole"]
    print(
        f"{images:,} images of {SIDE} x {SIDE} pixels, {len(kinds)} kinds, in {folder.parent}; CPU seconds", flush=True
    )
    _, start = (command("--help").cpu_seconds for _ in range(2))  # Python compiles modules on their first import
    runs.measure("one", "few")  # as above
    if compared:
        runs.measure_in_turns()
    else:
        runs.measure(*(["whole"] if alone else ["thousand", "thousands", *large]))
    for words in (("status",), ("explain", "photo000000")):  # as above
        command(*words, "--data-root", single.path)
    tick_seconds(single)
    history = _bytes_below(root.path / ".dagster") / images / 1000
    limit = limit_seconds(root, [root.approved, *(root.derived / kind for kind in kinds)])
    line_of("limit", limit)
    line_of("start", start)
    line_of("first run", runs.cpu_seconds("whole"))
    if alone:
        yield line_of("  per image, ms", 1000 * runs.cpu_seconds("whole") / images, MARGINAL_MS)
    else:
        yield from _growth(runs, judged=compared)
    yield line_of("  peak memory, GB", runs.costs["whole"][0].peak_bytes / 1e9, PEAK_GB)
    yield line_of("  history per image, kB", history, HISTORY_KB)
    rounds = ROUNDS if compared else 1
    nothing = statistics.median(_run(root).cpu_seconds for _ in range(rounds))
    yield line_of("run, nothing to do", nothing, NOTHING_RATIO * limit + start)
    at_full, more = images >= FULL, max(1.0, images / FULL)
    seconds = command("status", "--data-root", root.path).cpu_seconds
    yield line_of("status", seconds, more * STATUS_SECONDS) or not at_full
    one = f"photo{images // 2:06d}"
    explained = command("explain", one, "--data-root", root.path).cpu_seconds
    yield line_of("explain", explained, more * EXPLAIN_SECONDS) or not at_full
    yield line_of("sensor tick, nothing new", tick_seconds(root), more * TICK_SECONDS) or not at_full
    of_sample = sum(_tars(root).values()) / images
    for name, added, change in (
        (f"{new} new images", new, lambda n: _fill(root, images + n * new, new)),
        ("one edited caption", 0, lambda n: (root.approved / f"{one}.txt").write_text(f"an edited caption, {n}")),
    ):
        changes = [_changed(root, functools.partial(change, n)) for n in range(rounds)]
        written = max(size for _, size in changes)
        seconds = statistics.median(each for each, _ in changes)
        yield line_of(name, seconds, nothing + NEW_RATIO * runs.typical_cpu_seconds("few" if added else "one"))
        # One tar of the bucket, the new samples, and the two blocks that end each tar.
        yield line_of("  MB written to tars", written / 1e6, ((SHARD_SIZE + added) * of_sample + 4 * 10_240) / 1e6)
    yield line_of("checks, share of writing all sets", _printed_by("benchmarks.common.repack", root), CHECKS_SHARE)


def _growth(runs: _FirstRuns, *, judged: bool) -> Iterator[bool]:
    """Print what an additional image costs at several sizes; yield whether it is equally much, where that is judged."""
    thousand = runs.marginal_ms("thousand", "thousands")
    half, whole = runs.marginal_ms("quarter", "half"), runs.marginal_ms("half", "whole")
    yield line_of("  marginal cost per image, ms", whole, MARGINAL_MS)
    line_of("  the same, of half as many", half)
    line_of("  the same, of 1,000", thousand)
    print(f"    mean of {len(runs.costs['thousands'])} pairs, with a standard error of {runs.error_of_pairs_ms():.2f}")
    yield line_of("  relative to half as many", whole / half, GROWTH_RATIO) or not judged
    yield line_of("  relative to 1,000", whole / thousand, GROWTH_RATIO) or not judged


def use_tiny_kinds(root: DataRoot) -> None:
    """Let a data root have the three kinds of 16 bytes."""
    root.config_file.write_text(f"kinds: [{', '.join(TINY_KINDS)}]\n")


def command(*words: object, **environment: str) -> Cost:
    return command_of(OURS, *words, **environment)


def command_of(ours: Sequence[str], *words: object, **environment: str) -> Cost:
    """Return the cost of a command of `imagemill`, which `python OURS…` is."""
    return cost([*ours, *words], PYTHONPATH=TINY_PATH, **environment)


def line_of(name: str, value: float, goal: float | None = None) -> bool:
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


def _run(root: DataRoot) -> Cost:
    arguments, environment = _run_of(root)
    return cost(arguments, **environment)


def _run_of(root: DataRoot) -> tuple[Sequence[object], Mapping[str, str]]:
    """Return arguments and environment of a run, as `turns_of` takes them."""
    environment = {"PYTHONPATH": TINY_PATH, "DAGSTER_HOME": str(root.path / ".dagster")}
    return (*OURS, "run", "--data-root", root.path), environment


def _changed(root: DataRoot, change: Callable[[], object]) -> tuple[float, int]:
    """Return the CPU seconds of a run after a change, and the bytes of the tars that it wrote."""
    before = _tars(root)
    change()
    seconds = _run(root).cpu_seconds
    return seconds, sum(size for inode, size in _tars(root).items() if inode not in before)


def _tars(root: DataRoot) -> dict[int, int]:
    return {stat.st_ino: stat.st_size for stat in (path.stat() for path in root.shards.rglob("*.tar"))}


def _bytes_below(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def limit_seconds(root: DataRoot, folders: Iterable[Path]) -> float:
    """Return the CPU seconds of stat for every file of these folders, and of decoding the records."""
    began = time.process_time()
    for folder in folders:
        look_up_all(folder)
    for _ in read_jsonl(root.stage2_jsonl):
        pass
    return time.process_time() - began


def look_up_all(folder: Path) -> None:
    """Look up every file of a folder, which is the least that it takes to see that nothing has changed."""
    with os.scandir(folder) as entries:
        for entry in entries:
            entry.stat()


def tick_seconds(root: DataRoot, *options: str) -> float:
    return _printed_by("benchmarks.common.tick", root, *options)


def _printed_by(module: str, root: DataRoot, *options: str) -> float:
    """Return the number that a module prints at its end."""
    words = [sys.executable, "-m", module, str(root.path), *options]
    paths = {**os.environ, "PYTHONPATH": TINY_PATH}
    done = subprocess.run(words, cwd=PROJECT, env=paths, capture_output=True, text=True, check=True)
    return float(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    sys.exit(main())
