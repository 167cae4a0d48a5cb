"""Cost and quality of a rescaled preset's images.

    limit        the same JPEGs decoded, and as many pixels as the preset has encoded: nothing is resized
    plain        Pillow alone: open, resize with its LANCZOS filter, save with quality 95
    imagemill    a worker as in a real run: read, fingerprint, check, resize, flush, rename
    copies       images that already have their size: checked to the last byte and copied

One core each, CPU seconds, rounds interleaved; files in memory. Then two worker processes against one, with the time that
other programs took from their cores subtracted. Quality: PSNR of the files that plain and imagemill wrote, against LANCZOS in
floating point.

Goals: at least 1.9 times plain, at most 1.9 times the limit, at most 0.5 dB below plain; two workers at least 1.7 times one.
"""

import argparse
import io
import os
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from statistics import mean, median
from typing import NamedTuple

import numpy as np
import psutil
from PIL import Image

from benchmarks.common.inputs import noise_photos, scratch
from imagemill.domain.geometry import target_size
from imagemill.formats.resize import QUALITY
from imagemill.pipeline.presets.rescale_worker import RescaleJob, RescaleWorker
from resources.local_pool import run_on_processes

PLAIN_GOAL, LIMIT_GOAL, PSNR_GOAL, WORKERS_GOAL = 1.9, 1.9, -0.5, 1.7
SIZE = (1632, 1224)  # 2 MP
BATCH = 8
BYTES_PER_IMAGE = 8_000_000


def main() -> int:
    arguments = _arguments()
    with scratch(in_memory_bytes=BYTES_PER_IMAGE * arguments.images) as folder:
        jobs = _inputs(folder, arguments)
        print(f"{len(jobs)} JPEGs, {SIZE[0]}x{SIZE[1]} to {jobs[0].target[0]}x{jobs[0].target[1]}, in {folder.parent}")
        seconds = _one_core(folder, jobs, arguments)
        quality = _psnr(folder, jobs[: arguments.compared])
        speedup = _two_workers(folder, jobs, arguments)
    plain, limit = seconds["plain"] / seconds["imagemill"], seconds["imagemill"] / seconds["limit"]
    print(
        f"imagemill: {plain:.2f} times plain (goal: at least {PLAIN_GOAL}), {limit:.2f} of the limit (goal: at most {LIMIT_GOAL})"
    )
    print(f"PSNR: {quality:+.2f} dB against plain (goal: at least {PSNR_GOAL})")
    print(f"two workers: {speedup:.2f} times one (goal: at least {WORKERS_GOAL})")
    met = [plain >= PLAIN_GOAL, limit <= LIMIT_GOAL, quality >= PSNR_GOAL, speedup >= WORKERS_GOAL]
    return 0 if all(met) else 1


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--images", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--compared", type=int, default=16, help="images of which the quality is measured")
    parser.add_argument("--worker-rounds", type=int, default=5, help="rounds of two workers against one")
    parser.add_argument("--repeat", type=int, default=4, help="times the images, for two workers against one")
    parser.add_argument("--library", default="torch", choices=["torch", "pillow"])
    parser.add_argument("--photos", type=Path, help="a folder of photographs, enlarged to 2 MP, instead of noise")
    return parser.parse_args()


def _inputs(folder: Path, arguments: argparse.Namespace) -> list[RescaleJob]:
    images = folder / "raw" / "images"
    if arguments.photos:
        images.mkdir(parents=True)
        paths = sorted(arguments.photos.rglob("*.jpg"))[: arguments.images]
        for path in paths:
            Image.open(path).convert("RGB").resize(SIZE, Image.Resampling.BICUBIC).save(images / path.name, quality=90)
    else:
        noise_photos(images, arguments.images, width=SIZE[0], height=SIZE[1], smooth=4)
    target = target_size(*SIZE)
    return [RescaleJob(f"images/{path.name}", SIZE, target) for path in sorted(images.glob("*.jpg"))]


# ---- one core


def _one_core(folder: Path, jobs: Sequence[RescaleJob], arguments: argparse.Namespace) -> dict[str, float]:
    """Return the CPU seconds of each way, medians over rounds."""
    ways: dict[str, Callable[[], None]] = {
        "limit": lambda: _limit(folder, jobs),
        "plain": lambda: _plain(folder, jobs),
        "imagemill": lambda: _imagemill(folder, jobs, arguments.library),
        "copies": lambda: _imagemill(folder, [job._replace(target=job.size) for job in jobs], arguments.library),
    }
    rounds = [{name: _processor_seconds(way) for name, way in ways.items()} for _ in range(arguments.rounds + 1)][1:]
    print(f"{'':<12}{'ms per image':>14}{'fastest':>10}{'of plain':>10}   medians of {len(rounds)} rounds")
    for name in ways:
        column = [1000 * took[name] / len(jobs) for took in rounds]
        ratio = median(took["plain"] / took[name] for took in rounds)
        print(f"{name:<12}{median(column):>14.2f}{min(column):>10.2f}{ratio:>10.2f}")
    return {name: median(took[name] for took in rounds) for name in ways}


def _processor_seconds(way: Callable[[], None]) -> float:
    began = time.process_time()
    way()
    return time.process_time() - began


def _limit(folder: Path, jobs: Sequence[RescaleJob]) -> None:
    for job in jobs:
        with Image.open(folder / "raw" / job.name) as image:
            image.load()
            image.crop((0, 0, *job.target)).save(io.BytesIO(), "JPEG", quality=QUALITY)


def _plain(folder: Path, jobs: Sequence[RescaleJob]) -> None:
    (folder / "plain/images").mkdir(parents=True, exist_ok=True)
    for job in jobs:
        with Image.open(folder / "raw" / job.name) as image:
            image.convert("RGB").resize(job.target, Image.Resampling.LANCZOS).save(
                folder / "plain" / job.name, quality=QUALITY
            )


def _imagemill(folder: Path, jobs: Sequence[RescaleJob], library: str) -> None:
    preset = _empty_preset(folder)
    with closing(RescaleWorker(raw=folder / "raw", preset=preset, library=library)) as worker:
        statuses = {row.status for row in worker.stream(jobs)}
    if not statuses <= {"resized", "copied"}:
        raise SystemExit(f"images were not made: {statuses}")


def _empty_preset(folder: Path) -> Path:
    shutil.rmtree(folder / "preset", ignore_errors=True)
    (folder / "preset/images").mkdir(parents=True)
    return folder / "preset"


# ---- quality


def _psnr(folder: Path, jobs: Sequence[RescaleJob]) -> float:
    """Return by how many decibels imagemill's files are closer to the reference than plain's: means over images."""
    _imagemill(folder, jobs, "torch")
    gains = []
    for job in jobs:
        reference = _reference(folder / "raw" / job.name, job.target)
        ours, plain = (_decibels(folder / way / job.name, reference) for way in ("preset", "plain"))
        gains.append(ours - plain)
    return mean(gains)


def _reference(path: Path, target: tuple[int, int]) -> np.ndarray:
    pixels = np.asarray(Image.open(path).convert("RGB"), np.float32)
    planes = [Image.fromarray(pixels[..., n]).resize(target, Image.Resampling.LANCZOS) for n in range(3)]
    return np.clip(np.stack([np.asarray(plane) for plane in planes], axis=-1), 0, 255)


def _decibels(path: Path, reference: np.ndarray) -> float:
    error = np.asarray(Image.open(path).convert("RGB"), np.float32) - reference
    return float(10 * np.log10(255**2 / np.mean(error**2)))


# ---- workers


def _two_workers(folder: Path, jobs: Sequence[RescaleJob], arguments: argparse.Namespace) -> float:
    """Return the speed-up of two processes over one, on cores that no other program uses: the median of interleaved rounds."""
    many = []
    for n in range(arguments.repeat):
        (folder / f"raw/images/{n}").symlink_to(folder / "raw/images", target_is_directory=True)
        many += [job._replace(name=f"images/{n}/{Path(job.name).name}") for job in jobs]
    speedups = []
    for _ in range(arguments.worker_rounds):
        one, two = (_rate(folder, many, workers, arguments.library) for workers in (1, 2))
        speedups.append(two.undisturbed / one.undisturbed)
        print(
            f"images/s of one worker and of two: by the clock {one.by_the_clock:.1f} and {two.by_the_clock:.1f}, "
            f"undisturbed {one.undisturbed:.1f} and {two.undisturbed:.1f}"
        )
    return median(speedups)


class _Rate(NamedTuple):
    """Images per second. `undisturbed` is the rate if the workers had not shared their cores with other programs."""

    by_the_clock: float
    undisturbed: float


class _Moment(NamedTuple):
    clock: float
    workers: float
    idle: float


def _rate(folder: Path, jobs: Sequence[RescaleJob], workers: int, library: str) -> _Rate:
    """Measure from the first batches of the last worker until the first worker runs out of work, without start-up."""
    options = {"raw": folder / "raw", "preset": _empty_preset(folder), "library": library}
    begin, end = 2 * workers * BATCH, len(jobs) - 2 * workers * BATCH
    if begin >= end:
        raise SystemExit(
            f"{len(jobs)} images are too few for {workers} workers: give more --images, or a larger --repeat"
        )
    seen = {}
    rows = run_on_processes(RescaleWorker, jobs, workers=workers, batch_size=BATCH, options=options)
    for done, _ in enumerate(rows, start=1):
        if done in {begin, end}:
            seen[done] = _moment()
    took = _Moment(*(after - before for before, after in zip(seen[begin], seen[end], strict=True)))
    # Idle time of cores that a worker could have used counts as waiting time of the workers (for each other, or a disk).
    waited = max(0.0, took.idle / took.clock - ((os.cpu_count() or workers) - workers))
    images = end - begin
    return _Rate(images / took.clock, (workers - waited) * images / took.workers)


def _moment() -> _Moment:
    """Return seconds so far: by the clock, of the workers' processors, and of idle cores."""
    times = [child.cpu_times() for child in psutil.Process().children()]
    machine = psutil.cpu_times()
    idle = machine.idle + getattr(machine, "iowait", 0.0)
    return _Moment(time.perf_counter(), sum(each.user + each.system for each in times), idle)


if __name__ == "__main__":
    sys.exit(main())
