"""Throughput of the embedding stream in images per second around a model that costs nothing.

The stream decodes ahead on threads, writes behind on others, and maintains its ledger. It is compared with:

    plain loop   one thread: open, decode, encode, `np.save`, fsync
    DataLoader   torch's, one process per core that opens and decodes; encode, `np.save`, and nothing is flushed

All write real files on the disk of the temporary folder. Rounds are interleaved. The stream uses cores that a loop leaves
idle. If other programs use those, both are equally slow, so the goal is judged by the fastest round of each; the medians are
also printed.

Goal: at least as fast as either, for every kind made from pixels.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from benchmarks.common.encoders import use_free_encoders
from benchmarks.common.inputs import noise_photos, scratch
from benchmarks.common.pure import embed
from imagemill.domain.embedding_specs import EmbeddingSpec, embedding_specs
from imagemill.domain.encoder_settings import EncoderSettings
from imagemill.domain.layout import DataRoot
from imagemill.formats.images import open_rgb
from imagemill.models import Encoder
from imagemill.pipeline.batch_size import FIRST
from imagemill.pipeline.stage2.inventory import Inventory
from imagemill.store.ledger import Ledger

GOAL_RATIO = 1.0
WIDTH, HEIGHT = 1152, 896


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--images", type=int, default=48, help="photographs of 1 MP")
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    use_free_encoders()
    with scratch() as folder:
        noise_photos(folder / "approved", arguments.images, width=WIDTH, height=HEIGHT, smooth=8)
        print(f"{arguments.images} JPEGs of {WIDTH}x{HEIGHT}, fastest of {arguments.rounds} rounds, images/s")
        print(f"{'':<14}{'stream':>10}{'plain loop':>14}{'DataLoader':>14}{'ratios':>14}{'of medians':>14}")
        kinds = [spec for spec in embedding_specs() if spec.source == "pixels"]
        ratios = [ratio for spec in kinds for ratio in _compare(spec, folder, arguments.images, arguments.rounds)]
    print(f"smallest ratio: {min(ratios):.2f} (goal: at least {GOAL_RATIO:g})")
    return 0 if min(ratios) >= GOAL_RATIO else 1


def _compare(spec: EmbeddingSpec, folder: Path, images: int, rounds: int) -> list[float]:
    """Print one line of the table; return the speed of the stream relative to each of the others."""
    ways = [stream, plain_loop, data_loader]
    seconds = [[_timed(way, spec, folder) for way in ways] for _ in range(rounds)]
    fastest, usual = ([pick(column) for column in zip(*seconds, strict=True)] for pick in (min, median))
    ratios = [[theirs / column[0] for theirs in column[1:]] for column in (fastest, usual)]
    rates = f"{images / fastest[0]:>10.1f}{images / fastest[1]:>14.1f}{images / fastest[2]:>14.1f}"
    shown = "".join(f"{one:>8.2f}{other:>6.2f}" for one, other in ratios)
    print(f"{spec.kind:<14}{rates}{shown}", flush=True)
    return ratios[0]


def _timed(way: Callable[[EmbeddingSpec, DataRoot], None], spec: EmbeddingSpec, folder: Path) -> float:
    with TemporaryDirectory(dir=folder) as name:
        root = DataRoot(Path(name))
        root.approved.symlink_to(folder / "approved")
        began = time.perf_counter()
        way(spec, root)
        return time.perf_counter() - began


def stream(spec: EmbeddingSpec, root: DataRoot) -> None:
    with Ledger(root.ledger) as ledger:
        inventory = Inventory(root)
        inventory.survey(ledger)
        embed(spec, inventory, ledger)


def plain_loop(spec: EmbeddingSpec, root: DataRoot) -> None:
    encoder, output = _encoder_and_folder(spec, root)
    for image in sorted(root.approved.glob("*.jpg")):
        (array,) = encoder.encode([encoder.prepare(open_rgb(image))])
        with open(output / f"{image.stem}.npy", "wb") as file:
            np.save(file, array)
            file.flush()
            os.fsync(file.fileno())


def data_loader(spec: EmbeddingSpec, root: DataRoot) -> None:
    encoder, output = _encoder_and_folder(spec, root)
    images = Images(sorted(root.approved.glob("*.jpg")))
    batch_size, workers = FIRST, os.cpu_count() or 2
    for batch in DataLoader(images, batch_size=batch_size, num_workers=workers, collate_fn=list):
        arrays = encoder.encode([encoder.prepare(pixels.numpy()) for _, pixels in batch])
        for (name, _), array in zip(batch, arrays, strict=True):
            np.save(output / f"{name}.npy", array)


class Images(Dataset):
    """Names and pixels of images, opened in the loader's processes."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = paths

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[str, torch.Tensor]:
        return self.paths[index].stem, torch.from_numpy(open_rgb(self.paths[index]))


def _encoder_and_folder(spec: EmbeddingSpec, root: DataRoot) -> tuple[Encoder, Path]:
    output = root.derived / spec.folder
    output.mkdir(parents=True)
    given = {"spec": spec, "threads": 1, "preview_root": root.preview_models}
    return spec.encoder_class().load(EncoderSettings(), **given), output


if __name__ == "__main__":
    sys.exit(main())
