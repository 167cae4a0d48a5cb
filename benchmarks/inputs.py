"""Cost of folders and captions: `imagemill scan`, metadata files, and sub-folders.

    limit of scan      os.scandir of the folders, and Image.open of each image
    limit of a run     scandir and stat of the files of each image, and decoding of the records

CPU seconds, user and system, children included; those of `scan` and its limit are medians of rounds. Kinds of 16 bytes
(benchmarks/tiny_kinds), without models.

    python -m benchmarks.inputs --images 60000
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

from PIL import Image

from benchmarks.common.inputs import noise_photos, scratch
from benchmarks.scale import (
    NOTHING_RATIO,
    TICK_SECONDS,
    TINY_KINDS,
    command,
    limit_seconds,
    line_of,
    look_up_all,
    tick_seconds,
    use_tiny_kinds,
)
from imagemill.domain.layout import DataRoot
from imagemill.formats.jsonl import read_jsonl

SIDE = 64
PER_FOLDER = 100
FULL = 60_000
SCAN_RATIO, SCAN_ROUNDS, ROWS, ROWS_MB = 3.0, 5, 1_000_000, 500.0
NAMES, LISTED_SECONDS = 1_000_000, 25.0
BYTES_PER_IMAGE = 60_000


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--images", type=int, default=6000)
    parser.add_argument("--rows", type=int, default=ROWS, help="rows of the largest metadata file")
    parser.add_argument("--names", type=int, default=NAMES, help="names of images in the folder that a sensor lists")
    arguments = parser.parse_args()
    with scratch(in_memory_bytes=BYTES_PER_IMAGE * arguments.images + 4096 * arguments.names) as folder:
        reached = [
            *_scanned(folder, arguments.images // 2),
            *_run(folder, arguments.images),
            *_long(folder, arguments.rows),
            *_listed(folder, arguments.names),
        ]
    return 0 if all(reached) else 1


# ---- scan


def _scanned(folder: Path, images: int) -> Iterator[bool]:
    photos = folder / "photos"
    noise_photos(photos, images, width=SIDE, height=SIDE, smooth=8)
    print(f"{images:,} images and {images:,} texts in one folder", flush=True)
    noise_photos(folder / "one_photo", 1, width=SIDE, height=SIDE)
    rounds = [(_scan_seconds(folder, photos), _open_seconds(photos)) for _ in range(SCAN_ROUNDS)]
    seconds, limit = (median(column) for column in zip(*rounds, strict=True))
    line_of("scandir and Image.open", limit)
    yield line_of("scan, beyond that of one image", seconds, SCAN_RATIO * limit)


def _scan_seconds(folder: Path, photos: Path) -> float:
    one, all_of_them = (
        command("scan", each, "--data-root", folder / "none") for each in (folder / "one_photo", photos)
    )
    return all_of_them.cpu_seconds - one.cpu_seconds


def _open_seconds(photos: Path) -> float:
    began = time.process_time()
    with os.scandir(photos) as entries:
        for entry in entries:
            if entry.name.endswith(".jpg"):
                Image.open(entry.path).close()
    return time.process_time() - began


# ---- a run on images in sub-folders, with one metadata file


def _run(folder: Path, images: int) -> Iterator[bool]:
    root = DataRoot(folder / "whole")
    root.path.mkdir()
    use_tiny_kinds(root)
    noise_photos(folder / "made", images, width=SIDE, height=SIDE, smooth=8)
    texts = _move_to_folders(folder / "made", root.approved)
    _write_rows(root.approved / "metadata.jsonl", texts)
    print(f"\n{images:,} images in {-(-images // PER_FOLDER):,} folders, {len(texts):,} rows of captions", flush=True)
    home = {"DAGSTER_HOME": str(root.path / ".dagster")}
    first = command("run", "--data-root", root.path, **home).cpu_seconds
    line_of("first run", first)
    folders = [root.approved, *sorted(each for each in root.approved.iterdir() if each.is_dir())]
    limit = limit_seconds(root, [*folders, *(root.derived / kind for kind in TINY_KINDS)])
    start = command("--help").cpu_seconds
    line_of("limit", limit)
    nothing = command("run", "--data-root", root.path, **home).cpu_seconds
    yield line_of("run, nothing to do", nothing, NOTHING_RATIO * limit + start)
    yield line_of("sensor tick, nothing new", tick_seconds(root), TICK_SECONDS) or images < FULL
    before = _edited(root)
    path = sorted(texts)[images // 2]
    _write_rows(root.approved / "metadata.jsonl", {**texts, path: "an edited caption"})
    line_of("run, one edited row", command("run", "--data-root", root.path, **home).cpu_seconds)
    yield line_of("  records changed", _edited(root) - before, 1)


def _move_to_folders(made: Path, approved: Path) -> dict[str, str]:
    """Move images to folders of `PER_FOLDER`; return the captions by path, whose files are removed."""
    texts = {}
    for number, image in enumerate(sorted(made.glob("*.jpg"))):
        target = approved / f"{number // PER_FOLDER:05d}" / image.name
        target.parent.mkdir(parents=True, exist_ok=True)
        image.rename(target)
        texts[f"{target.parent.name}/{image.name}"] = image.with_suffix(".txt").read_text()
    return texts


def _write_rows(path: Path, texts: dict[str, str]) -> None:
    path.write_text("".join(json.dumps({"file_name": name, "text": text}) + "\n" for name, text in texts.items()))


def _edited(root: DataRoot) -> int:
    """Return the number of records with the edited caption."""
    return sum(line.value["caption"] == "an edited caption" for line in read_jsonl(root.stage2_jsonl) if line.value)


# ---- a long metadata file


def _listed(folder: Path, count: int) -> Iterator[bool]:
    """Measure a tick of the sensor that lists many names and finds no news. The files are empty, because it opens none."""
    root = DataRoot(folder / "listed")
    root.approved.mkdir(parents=True)
    for number in range(count):
        os.close(os.open(root.approved / f"photo{number:07d}.jpg", os.O_CREAT | os.O_WRONLY))
    print(f"\n{count:,} names of images", flush=True)
    began = time.process_time()
    look_up_all(root.approved)
    line_of("scandir and stat", time.process_time() - began)
    yield line_of("sensor tick, nothing new", tick_seconds(root, "--idle"), LISTED_SECONDS)


def _long(folder: Path, rows: int) -> Iterator[bool]:
    peaks = []
    for count in (1000, rows):
        images = folder / f"rows{count}"
        noise_photos(images, 1000, width=SIDE, height=SIDE, smooth=8)
        for text in images.glob("*.txt"):
            text.unlink()
        with open(images / "metadata.jsonl", "w") as file:
            for number in range(count):
                file.write(
                    json.dumps({"file_name": f"photo{number:06d}.jpg", "text": f"noise, number {number}"}) + "\n"
                )
        peaks.append(command("scan", images, "--data-root", folder / "none").peak_bytes)
    print(f"\n{rows:,} rows in one metadata file", flush=True)
    yield line_of("memory beyond that of 1,000 rows, MB", (peaks[1] - peaks[0]) / 1e6, ROWS_MB)


if __name__ == "__main__":
    sys.exit(main())
