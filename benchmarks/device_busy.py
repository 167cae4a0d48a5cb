"""Busy share of a simulated device, with ledger, events and flushed files, around the command `imagemill stage2`.

    prepared inputs    images are neither read nor decoded: the device, or the bookkeeping, is the limit
    with decoding      photographs of 1 MP: the device, or decoding on all cores, is the limit

The device takes a fixed time per item and no processor, and computes while the processor does other work. The same command with
a device that takes no time is the speed of the bookkeeping alone, until the last file is published. Its CPU time includes that
of making the arrays and writing them to flushed files, which a bare loop measures. Plain loops around the same device, in the
same run: torch's DataLoader with a process per core, with one flushed file per batch, and with `torch.save` of each item.

Goals: with a VAE's 15 ms per item, prepared, busy at least 95 %. DINOv3 (0.4 ms, batches of 64) and T5 (1 ms, batches of 128)
at least 90 % of the smaller of device and bookkeeping, which takes at most 0.35 ms of CPU time per image besides its file. With
decoding, at least 90 % of the smaller of device and decoding.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from benchmarks.common.inputs import noise_photos, scratch
from benchmarks.common.processes import cost
from imagemill.domain.embedding_specs import DINOV3, T5, VAE, EmbeddingSpec
from imagemill.formats.images import open_rgb
from imagemill.pipeline.malloc_tuning import reuse_freed_memory
from tests.helpers.stage2 import picture

GOAL_VAE, GOAL_SHARE, GOAL_CPU_MS = 0.95, 0.90, 0.35
SIDE = 1024
BYTES_PER_IMAGE = 1_200_000
CORES = os.cpu_count() or 1
# Fewer files do not show what one takes.
FEWEST_FILES = 256


class Case(NamedTuple):
    """A kind with its time per item in milliseconds, batch size, pass and part of the images."""

    spec: EmbeddingSpec
    ms: float
    batch: int
    name: str
    part: float


CASES = [
    Case(VAE, 15, 8, "vae", 0.05),
    Case(DINOV3, 0.4, 64, "dinov3", 1.0),
    Case(T5, 1.0, 128, "t5", 0.5),
]


class Figures(NamedTuple):
    """Items per second until the last one is computed, the device's busy share, CPU milliseconds per item, items per second
    until the last one is published, and items per batch.
    """

    rate: float
    busy: float
    cpu_ms: float
    published: float = 0.0
    batch: float = 0.0


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--images", type=int, default=6400, help="prepared images of the fastest kind")
    parser.add_argument("--photos", type=int, default=128, help="photographs of 1 MP that are decoded")
    parser.add_argument("--rounds", type=int, default=3, help="the median of this many")
    arguments = parser.parse_args()
    with scratch(in_memory_bytes=BYTES_PER_IMAGE * arguments.images // 10) as folder:
        print(f"simulated device, {CORES} cores, median of {arguments.rounds} rounds; CPU ms per image and asset")
        met = [_prepared(case, arguments.images, arguments.rounds, folder) for case in CASES]
        noise_photos(folder / "photos", arguments.photos, width=1152, height=896, smooth=8)
        met += [_decoding(case, arguments.photos, arguments.rounds, folder) for case in CASES if case.spec is not T5]
    print("goals reached" if all(met) else "goals missed")
    return 0 if all(met) else 1


def _prepared(case: Case, images: int, rounds: int, folder: Path) -> bool:
    """Print the figures of one kind with prepared inputs; return whether its goals are reached."""
    count = max(2, round(images * case.part))
    with TemporaryDirectory(dir=folder) as name:
        approved = Path(name, "approved")
        approved.mkdir()
        picture(approved / "000000.png", size=(16, 16))
        data = (approved / "000000.png").read_bytes()
        for n in range(count):
            (approved / f"{n:06d}.png").write_bytes(data)
            (approved / f"{n:06d}.txt").write_text(f"photograph {n}")
        measured = [
            (
                _command(case, case.ms, approved, prepared=True),
                _command(case, 0.0, approved, prepared=True),
                _loader(case, [None] * count, folder),
                _loader(case, [None] * count, folder, each=True),
                _files_only(case, max(count, FEWEST_FILES), folder),
            )
            for _ in range(rounds)
        ]
    ours, free, loader, saved, files = map(_median, zip(*measured, strict=True))
    bookkeeping = free.cpu_ms - files.cpu_ms
    limit = min(1.0, free.published * case.ms / 1000)
    goal = GOAL_VAE if case.spec is VAE else GOAL_SHARE * limit
    # A VAE's few images share the cost of a small batch, which is nothing beside their time on the device.
    most = None if case.spec is VAE else GOAL_CPU_MS
    print(
        f"{case.spec.kind}, prepared, {ours.batch:.0f} per batch: busy {ours.busy:.1%} "
        f"(goal: at least {goal:.1%}; bookkeeping alone allows {limit:.1%}), "
        f"bookkeeping {bookkeeping:.2f} ms besides {files.cpu_ms:.2f} ms for its file"
        f"{'' if most is None else f' (goal: at most {most:g} ms)'}; "
        f"DataLoader {loader.busy:.1%}, with torch.save {saved.busy:.1%}",
        flush=True,
    )
    return ours.busy >= goal and (most is None or bookkeeping <= most)


def _decoding(case: Case, photos: int, rounds: int, folder: Path) -> bool:
    """Print the figures of one kind with decoding; return whether its goal is reached."""
    approved = folder / "photos"
    paths = sorted(approved.glob("*.jpg"))
    measured = [
        (_command(case, case.ms, approved, prepared=False), _decode_only(paths), _loader(case, paths, folder))
        for _ in range(rounds)
    ]
    ours, decode, loader = map(_median, zip(*measured, strict=True))
    limit = min(1000 / case.ms, decode.rate)
    print(
        f"{case.spec.kind}, decoding: {ours.rate:.0f} images/s, busy {ours.busy:.1%}; {ours.rate / limit:.2f} of the smaller "
        f"of device and decoding on all cores (goal: at least {GOAL_SHARE:g}); DataLoader {loader.rate / limit:.2f}",
        flush=True,
    )
    return ours.rate >= GOAL_SHARE * limit


def _median(column: Sequence[Figures]) -> Figures:
    return Figures(*(median(values) for values in zip(*column, strict=True)))


def _command(case: Case, ms: float, approved: Path, *, prepared: bool) -> Figures:
    """Run the pass over a new data root."""
    with TemporaryDirectory(dir=approved.parent) as name:
        Path(name, "approved").symlink_to(approved)
        Path(name, "imagemill.yaml").write_text(f"encoders: {{{case.spec.kind}: {{batch_size: {case.batch}}}}}\n")
        report = Path(name, "device.jsonl")
        command = ["-m", "benchmarks.common.simulated", ms, int(prepared), report]
        cost([*command, "stage2", "--pass", case.name, "--data-root", name], DAGSTER_HOME=f"{name}/.dagster")
        lines = [json.loads(line) for line in report.read_text().splitlines()]
    sums = {key: sum(line[key] for line in lines) for key in lines[0]}
    items, wall = sums["items"], max(sums["wall"], 1e-9)
    cpu_ms, published = 1000 * sums["cpu"] / items, items / sums["published"]
    return Figures(items / wall, sums["busy"] / wall, cpu_ms, published, items / sums["batches"])


def _decode_only(paths: Sequence[Path]) -> Figures:
    reuse_freed_memory()
    with ThreadPoolExecutor(CORES) as pool:
        began, cpu = time.monotonic(), time.process_time()
        for _ in pool.map(lambda path: open_rgb(path).shape, paths):
            pass
        wall = time.monotonic() - began
    return Figures(len(paths) / wall, 0.0, 1000 * (time.process_time() - cpu) / len(paths))


def _files_only(case: Case, count: int, folder: Path) -> Figures:
    """Make an array per item and write it to a flushed file, without anything else."""
    with TemporaryDirectory(dir=folder) as name:
        began, cpu = time.monotonic(), time.process_time()
        for number in range(count):
            array = np.full(case.spec.shape(SIDE, SIDE), number, case.spec.dtype)
            with open(f"{name}/{number}.npy", "wb") as file:
                np.save(file, array)
                file.flush()
                os.fsync(file.fileno())
        cpu_ms = 1000 * (time.process_time() - cpu) / count
    return Figures(count / (time.monotonic() - began), 0.0, cpu_ms)


class Inputs(Dataset):
    """Pixels of images, or a small tensor for an input that is already prepared."""

    def __init__(self, paths: Sequence[Path | None]) -> None:
        self.paths = paths

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> torch.Tensor:
        path = self.paths[index]
        return torch.zeros(16) if path is None else torch.from_numpy(open_rgb(path))[::64, ::64].clone()


def _loader(case: Case, paths: Sequence[Path | None], folder: Path, *, each: bool = False) -> Figures:
    """Measure the loop that a script contains: load a batch, wait for the device, save."""
    array = np.zeros(case.spec.shape(SIDE, SIDE), case.spec.dtype)
    with TemporaryDirectory(dir=folder) as name:
        loader = DataLoader(Inputs(paths), batch_size=case.batch, num_workers=CORES, collate_fn=list)
        batches, busy, done = iter(loader), 0.0, 0
        began, cpu = time.monotonic(), time.process_time()
        for number, batch in enumerate(batches):
            seconds = len(batch) * case.ms / 1000
            time.sleep(seconds)
            busy, done = busy + seconds, done + len(batch)
            if each:
                for item in range(len(batch)):
                    torch.save(torch.from_numpy(array), f"{name}/{number}-{item}.pt")
            else:
                with open(f"{name}/{number}.npy", "wb") as file:
                    np.save(file, np.broadcast_to(array, (len(batch), *array.shape)))
                    file.flush()
                    os.fsync(file.fileno())
        wall = time.monotonic() - began
    return Figures(done / wall, busy / wall, 1000 * (time.process_time() - cpu) / done)


if __name__ == "__main__":
    sys.exit(main())
