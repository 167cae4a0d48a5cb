"""Records of a derived preset: one pass over the base's records against one stage per step.

    imagemill     read once; norm, coord, kept lines and statistics in one pass; every line validated, every file flushed
    stages        normalise, tokens, filter each of three files, alias copies: each reads and writes whole files with json

The stages are those of the original system, written plainly; they neither validate nor flush. Images are left out on both
sides: `benchmarks.hardlinks` measures them. Both sides give the same records, which is checked first.

Goal: at least 5 times faster than the stages (median over interleaved rounds).
"""

import argparse
import json
import math
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.common.inputs import scratch
from imagemill.pipeline.presets.coord_files import draft_split
from imagemill.store.public_data import PresetDir

GOAL = 5.0
MAX_OBJECTS = 20


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--records", type=int, default=30_000)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    ways: list[Callable[[Path, Path], None]] = [stages, imagemill]
    with scratch() as folder:
        base = _base(folder / "rescale_32_768", arguments.records)
        _check_equal(base, folder)
        rounds = [[_timed(way, base, folder) for way in ways] for _ in range(arguments.rounds)]
        megabytes = (base / "train.jsonl").stat().st_size / 1e6
    print(f"{arguments.records} records, {megabytes:.0f} MB, medians of {arguments.rounds} rounds")
    print(f"{'':<14}{'seconds':>10}{'CPU':>8}{'times faster':>14}")
    for n, way in enumerate(ways):
        seconds, cpu = zip(*(costs[n] for costs in rounds), strict=True)
        faster = median(costs[0][0] / costs[n][0] for costs in rounds)
        print(f"{way.__name__.replace('_', ' '):<14}{median(seconds):>10.2f}{median(cpu):>8.2f}{faster:>14.2f}")
    ratio = median(costs[0][0] / costs[1][0] for costs in rounds)
    print(f"imagemill is {ratio:.2f} times faster than the stages (goal: at least {GOAL:g})")
    return 0 if ratio >= GOAL else 1


def _timed(way: Callable[[Path, Path], None], base: Path, folder: Path) -> tuple[float, float]:
    derived = Path(tempfile.mkdtemp(dir=folder))
    began, busy = time.perf_counter(), time.process_time()
    way(base, derived)
    took = time.perf_counter() - began, time.process_time() - busy
    shutil.rmtree(derived)
    return took


def imagemill(base: Path, derived: Path) -> None:
    made = draft_split(PresetDir(base), "train", derived, max_objects=MAX_OBJECTS)
    assert not made.problems
    made.publish()


# ---- the stages


def stages(base: Path, derived: Path) -> None:
    raw, norm, coord = (derived / f"base.{name}.jsonl" for name in ("raw", "norm", "coord"))
    shutil.copyfile(base / "train.jsonl", raw)
    normalise(raw, norm)
    tokens(norm, coord)
    for source in (raw, norm, coord):
        keep_small(source, derived / source.name.replace("base", "train"))
    shutil.copyfile(derived / "train.raw.jsonl", derived / "train.jsonl")


def _each_record(source: Path, target: Path, change: Callable[[dict[str, Any]], dict[str, Any] | None]) -> None:
    with source.open(encoding="utf-8") as lines, target.open("w", encoding="utf-8") as out:
        for line in lines:
            record = change(json.loads(line))
            if record is not None:
                out.write(json.dumps(record, ensure_ascii=False) + "\n")


def normalise(source: Path, target: Path) -> None:
    def change(record: dict[str, Any]) -> dict[str, Any]:
        across, down = record["width"] - 1, record["height"] - 1
        for item in record["objects"]:
            if "bbox_2d" in item:
                x1, y1, x2, y2 = item["bbox_2d"]
                item["bbox_2d"] = [
                    min(max(math.floor(x1 * 999 / across), 0), 999),
                    min(max(math.floor(y1 * 999 / down), 0), 999),
                    min(max(math.ceil(x2 * 999 / across), 0), 999),
                    min(max(math.ceil(y2 * 999 / down), 0), 999),
                ]
            else:
                sides = [across, down] * (len(item["poly"]) // 2)
                item["poly"] = [
                    min(max(round(value * 999 / side), 0), 999) for value, side in zip(item["poly"], sides, strict=True)
                ]
        return record

    _each_record(source, target, change)


def tokens(source: Path, target: Path) -> None:
    def change(record: dict[str, Any]) -> dict[str, Any]:
        for item in record["objects"]:
            key = "bbox_2d" if "bbox_2d" in item else "poly"
            item[key] = [f"<|coord_{value}|>" for value in item[key]]
        return record

    _each_record(source, target, change)


def keep_small(source: Path, target: Path) -> None:
    _each_record(source, target, lambda record: record if len(record["objects"]) <= MAX_OBJECTS else None)


# ---- records


def _check_equal(base: Path, folder: Path) -> None:
    one, other = Path(tempfile.mkdtemp(dir=folder)), Path(tempfile.mkdtemp(dir=folder))
    imagemill(base, one)
    stages(base, other)
    for name in ("train.jsonl", "train.norm.jsonl", "train.coord.jsonl"):
        ours, theirs = ([json.loads(line) for line in (way / name).open()] for way in (one, other))
        assert ours == theirs, name


def _base(base: Path, records: int) -> Path:
    """Write records like COCO's after rescale: seven objects on average, one in eight a polygon."""
    chance = random.Random(0)
    base.mkdir()
    with (base / "train.jsonl").open("w", encoding="utf-8") as out:
        for number in range(records):
            width, height = chance.choice([(640, 416), (640, 480), (416, 640), (512, 512), (640, 448)])
            objects = [_object(chance, width, height) for _ in range(min(int(chance.expovariate(1 / 7)) + 1, 60))]
            record = {"images": [f"images/train2017/{number:012d}.jpg"], "objects": objects}
            out.write(json.dumps({**record, "width": width, "height": height, "image_id": number}) + "\n")
    return base


def _object(chance: random.Random, width: int, height: int) -> dict[str, Any]:
    desc = chance.choice(["person", "traffic light", "bowl", "dining table", "sports ball"])
    if chance.random() < 1 / 8:
        poly = [chance.randrange(side) for _ in range(12) for side in (width, height)]
        return {"desc": desc, "poly": poly, "poly_points": 12}
    x1, y1 = chance.randrange(width - 2), chance.randrange(height - 2)
    return {"desc": desc, "bbox_2d": [x1, y1, chance.randrange(x1 + 1, width), chance.randrange(y1 + 1, height)]}


if __name__ == "__main__":
    sys.exit(main())
