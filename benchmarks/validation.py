"""Validation of record files by every rule that needs no other file, against parsing alone.

Stage 2: `validate` of lines as the product writes them; as the limit `orjson.loads` of every line, its result dropped; and a
plain validator, a loop of `json.loads` with the same rules written out. Presets: the same in pixels, norm and coord, some objects
per image, a few of them polygons. Neither validator opens an image.

Goals (medians of interleaved rounds, in CPU seconds of this one thread, which other programs on the machine affect least; wall
seconds are also printed): every file at least 3 times as fast as the plain validator; Stage 2 at most 1.4 of orjson.
"""

import argparse
import json
import math
import re
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import orjson

from benchmarks.common.inputs import mixed_captions, scratch
from imagemill.domain.buckets import BUCKETS, bucket_size
from imagemill.domain.geometry import LAST_BIN, quantise_box, quantise_polygon
from imagemill.domain.ids import id_problem
from imagemill.domain.preset_records import PresetRules
from imagemill.domain.stage2_records import build_record
from imagemill.formats.jsonl import write_jsonl
from imagemill.validation.validator import Options, validate

PLAIN_GOAL, LIMIT_GOAL = 3.0, 1.4
SIZES = ((1024, 1024), (832, 1216), (1216, 832), (768, 1024), (1280, 768), (704, 1344))
LIMITS = PresetRules(1024 * 1024, 32)
WORDS = ("person", "traffic light", "bowl", "broccoli", "orange", "dining table", "potted plant", "sports ball")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--records", type=int, default=60_000, help="records of Stage 2")
    parser.add_argument("--presets", type=int, default=20_000, help="records of a preset, in each space")
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    with scratch(in_memory_bytes=1 << 30) as folder:
        files = {"stage2": make_stage2(folder / "records.jsonl", arguments.records)}
        files |= make_presets(folder, arguments.presets)
        met = [compared(kind, path, arguments.rounds) for kind, path in files.items()]
        return 0 if all(met) else 1


def compared(kind: str, path: Path, rounds: int) -> bool:
    plain = partial(plain_stage2, path) if kind == "stage2" else partial(plain_preset, path, kind)
    ways = {"orjson.loads": partial(parse, path), "imagemill": partial(ours, path), "json.loads and rules": plain}
    lines = path.read_bytes().count(b"\n")
    print(f"{kind}: {lines} lines, {path.stat().st_size / 1e6:.0f} MB, medians of {rounds} rounds")
    cpu, wall = interleaved(ways, rounds)
    for name in ways:
        per_line = f"{1e6 * median(cpu[name]) / lines:>8.2f} µs/line"
        print(f"  {name:<24}{median(cpu[name]):>8.3f} s CPU{median(wall[name]):>8.3f} s{per_line}")
    least, mine, slow = (median(seconds) for seconds in cpu.values())
    goal = f" (goal: at most {LIMIT_GOAL})" if kind == "stage2" else ""
    print(f"  of orjson: {mine / least:.2f}{goal}; the plain validator takes {slow / mine:.2f} times as long "
          f"(goal: at least {PLAIN_GOAL})", flush=True)  # fmt: skip
    return slow / mine >= PLAIN_GOAL and (kind != "stage2" or mine / least <= LIMIT_GOAL)


def interleaved(
    ways: dict[str, Callable[[], Any]], rounds: int
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    cpu: dict[str, list[float]] = {name: [] for name in ways}
    wall: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            began = time.process_time(), time.perf_counter()
            way()
            cpu[name].append(time.process_time() - began[0])
            wall[name].append(time.perf_counter() - began[1])
    return cpu, wall


# ---- files


def make_stage2(path: Path, count: int) -> Path:
    random, captions = Random(0), mixed_captions(count)
    write_jsonl(path, (_record(n, captions[n], random) for n in range(count)))
    return path


def _record(n: int, caption: str, random: Random) -> dict[str, Any]:
    (width, height), tokens = random.choice(SIZES), min(77, 2 + len(caption.split()))
    return build_record(
        image_id=f"{random.randrange(16**8):08x}-{n:07d}", image_path=f"data/approved/{n:07d}.jpg", caption=caption,
        mask=[1] * tokens + [0] * (77 - tokens), height=height, width=width,
    )  # fmt: skip


def make_presets(folder: Path, count: int) -> dict[str, Path]:
    """Write the same records in each space; about seven objects per image, as in COCO."""
    random = Random(1)
    pixel = [_preset_record(n, random) for n in range(count)]
    files = {
        "pixel": folder / "train.jsonl",
        "norm": folder / "train.norm.jsonl",
        "coord": folder / "train.coord.jsonl",
    }
    write_jsonl(files["pixel"], pixel)
    norm = [{**record, "objects": [_normed(item, record) for item in record["objects"]]} for record in pixel]
    write_jsonl(files["norm"], norm)
    write_jsonl(files["coord"], ({**r, "objects": [_spelled(item) for item in r["objects"]]} for r in norm))
    return files


def _preset_record(n: int, random: Random) -> dict[str, Any]:
    width, height = random.choice(((1152, 640), (640, 416), (1024, 768), (640, 480)))
    objects = [_object(width, height, random) for _ in range(1 + int(random.expovariate(1 / 6)))]
    return {"images": [f"images/train2017/{n:012d}.jpg"], "objects": objects, "width": width, "height": height}


def _object(width: int, height: int, random: Random) -> dict[str, Any]:
    desc = random.choice(WORDS)
    if random.random() < 0.15:
        points = [round(random.uniform(0, side), 2) for _ in range(random.randint(3, 12)) for side in (width, height)]
        return {"desc": desc, "poly": points, "poly_points": len(points) // 2}
    x, y = random.randrange(width - 20), random.randrange(height - 20)
    return {"desc": desc, "bbox_2d": [x, y, random.randint(x + 10, width), random.randint(y + 10, height)]}


def _normed(item: dict[str, Any], record: dict[str, Any]) -> dict[str, Any]:
    name, of = ("poly", quantise_polygon) if "poly" in item else ("bbox_2d", quantise_box)
    return {**item, name: list(of(item[name], record["width"], record["height"]))}


def _spelled(item: dict[str, Any]) -> dict[str, Any]:
    return {
        name: [f"<|coord_{v}|>" for v in value] if isinstance(value, list) else value for name, value in item.items()
    }


# ---- the limit, ours, and the plain way


def parse(path: Path) -> None:
    with open(path, "rb") as lines:
        for line in lines:
            orjson.loads(line)


def ours(path: Path) -> None:
    report = validate(path, options=Options(limits=LIMITS, image_mode="none"))
    assert report.checked
    assert not report.rules, report.findings[0]


def plain_stage2(path: Path) -> None:
    seen, warnings = {}, 0
    for number, record in _objects_of(path):
        assert id_problem(record["image_id"]) is None
        assert record["image_id"] not in seen
        seen[record["image_id"]] = number
        for name in ("image_path", "caption"):
            assert isinstance(record[name], str)
            assert record[name].strip()
        mask = record["t5_attention_mask"]
        assert isinstance(mask, list)
        assert len(mask) == 77
        assert all(type(bit) is int and bit in (0, 1) for bit in mask)
        assert any(mask)
        width, height = record["width"], record["height"]
        assert type(width) is int
        assert type(height) is int
        assert width > 0
        assert height > 0
        assert record["aspect_bucket"] in BUCKETS
        assert record.get("format_version", 2) == 2
        assert "dinov3_embedding" not in record
        nearest = min(BUCKETS, key=lambda bucket: abs(width / height - bucket_size(bucket)[0] / bucket_size(bucket)[1]))
        warnings += nearest != record["aspect_bucket"] or not 0.4 <= width / height <= 2.5
    assert not warnings


_TOKEN = re.compile(r"<\|coord_(0|[1-9][0-9]{0,2})\|>")


def plain_preset(path: Path, space: str) -> None:
    sizes: dict[str, tuple[int, int]] = {}
    warnings = 0
    for _, record in _objects_of(path):
        (name,) = record["images"]
        assert isinstance(name, str)
        assert name.strip()
        assert not name.startswith("/")
        assert "\\" not in name
        assert ".." not in name.split("/")
        width, height = record["width"], record["height"]
        assert type(width) is int
        assert type(height) is int
        assert 0 < width * height <= (LIMITS.max_pixels or 0)
        assert width % (LIMITS.multiple_of or 1) == 0
        assert height % (LIMITS.multiple_of or 1) == 0
        assert sizes.setdefault(name, (width, height)) == (width, height)
        for item in record["objects"]:
            assert item["desc"].strip()
            assert not any(key in item for key in ("bbox", "polygon", "line", "line_points"))
            assert ("bbox_2d" in item) != ("poly" in item)
            values = [_value(value, space) for value in item.get("bbox_2d") or item["poly"]]
            if "bbox_2d" in item:
                x1, y1, x2, y2 = values
                assert x2 > x1
                assert y2 > y1
            else:
                assert len(values) >= 6
                assert len(values) % 2 == 0
                assert item.get("poly_points", len(values) // 2) == len(values) // 2
            if space == "pixel":
                warnings += min(values) < 0 or max(values[::2]) > width or max(values[1::2]) > height
    assert not warnings


def _value(value: Any, space: str) -> float:
    if space == "coord":
        match = _TOKEN.fullmatch(value)
        assert match
        return int(match[1])
    assert type(value) is int or (space == "pixel" and type(value) is float and math.isfinite(value))
    assert space == "pixel" or 0 <= value <= LAST_BIN
    return value


def _objects_of(path: Path):
    """Yield every line as `json.loads` reads it, strictly: no NaN, no duplicate key."""
    with open(path, encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            record = json.loads(line, parse_constant=_refused, object_pairs_hook=_once)
            assert isinstance(record, dict)
            yield number, record


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    assert len(found) == len(pairs)
    return found


def _refused(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


if __name__ == "__main__":
    sys.exit(main())
