"""Cost of the entry with which the event of each image shows its picture in Dagster's UI: history and time of a first run.

    without    the same run, whose events lack the entry

Rounds are interleaved, each on new data roots; kinds as in scale.py with `--tiny`, ids of 12 characters. CPU seconds with
children.

Goals: history at most 1.1 times that without, from 60,000 images on at most 10 kB per image; CPU seconds at most 1.03 times.
"""

import argparse
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

from benchmarks.common.inputs import noise_photos, scratch
from benchmarks.scale import FULL, HISTORY_KB, OURS, SIDE, _bytes_below, command_of, line_of, use_tiny_kinds
from imagemill.domain.layout import DataRoot

HISTORY_RATIO, TIME_RATIO = 1.1, 1.03
WITHOUT = f"""
import runpy

import io_managers.npy

io_managers.npy.image_shown = lambda *_, **__: {{}}
runpy.run_module({OURS[-1]!r}, run_name="__main__")
"""
WAYS: Mapping[str, Sequence[str]] = {"with": OURS, "without": ("-c", WITHOUT)}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--images", type=int, default=2_000)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    seconds, history = ({way: [] for way in WAYS} for _ in range(2))
    with scratch(in_memory_bytes=100_000 * arguments.images) as folder:
        for _ in range(arguments.rounds):
            for way, words in WAYS.items():
                root = _new_root(folder / "data", arguments.images)
                cost = command_of(words, "run", "--data-root", root.path, DAGSTER_HOME=str(root.dagster_home))
                seconds[way].append(cost.cpu_seconds)
                history[way].append(_bytes_below(root.dagster_home) / arguments.images / 1000)
                shutil.rmtree(root.path)
    print(f"{arguments.images:,} images; medians of {arguments.rounds}", flush=True)
    sizes, times = ({way: median(values) for way, values in found.items()} for found in (history, seconds))
    reached = [
        line_of("history per image, kB", sizes["with"], HISTORY_KB if arguments.images >= FULL else None),
        line_of("  relative to that without", sizes["with"] / sizes["without"], HISTORY_RATIO),
        line_of("CPU seconds", times["with"]),
        line_of("  relative to those without", times["with"] / times["without"], TIME_RATIO),
    ]
    return 0 if all(reached) else 1


def _new_root(path: Path, images: int) -> DataRoot:
    root = DataRoot(path)
    noise_photos(root.approved, images, width=SIDE, height=SIDE, smooth=8)
    for photo in root.approved.iterdir():
        # photo000001.jpg has an id of 11 characters
        photo.rename(photo.with_name(f"x{photo.name}"))
    use_tiny_kinds(root)
    return root


if __name__ == "__main__":
    sys.exit(main())
