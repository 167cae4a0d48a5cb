"""What the embedding stream makes of the host: images per second around a model that costs nothing.

The stream decodes ahead on threads, writes behind on others, and keeps its ledger; against it a plain loop does the same work
in one thread: open, decode, encode, `np.save`, fsync. Both write real files on the disk of the temporary folder. Rounds are
interleaved. The stream lives on cores that a loop leaves idle; where other programs take those, both are equally slow, so the
goal is judged by the fastest round of each and the median stands beside it.

Goal: at least as fast as the plain loop, for every kind made from pixels.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import numpy as np

from benchmarks.common.encoders import use_free_encoders
from benchmarks.common.inputs import noise_photos, scratch
from benchmarks.common.pure import embed
from imagemill.config import EncoderSettings
from imagemill.embedding_specs import EmbeddingSpec, embedding_specs
from imagemill.layout import DataRoot
from imagemill.ledger import Ledger
from imagemill.pipeline.scan import survey
from imagemill.pixels import open_rgb

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
        print(f"{'':<14}{'stream':>10}{'plain loop':>14}{'ratio':>10}{'median ratio':>16}")
        kinds = [spec for spec in embedding_specs() if spec.source == "pixels"]
        ratios = [_compare(spec, folder, arguments.images, arguments.rounds) for spec in kinds]
    print(f"smallest ratio: {min(ratios):.2f} (goal: at least {GOAL_RATIO:g})")
    return 0 if min(ratios) >= GOAL_RATIO else 1


def _compare(spec: EmbeddingSpec, folder: Path, images: int, rounds: int) -> float:
    """How many times as fast the stream is; one line of the table."""
    seconds = [(_timed(stream, spec, folder), _timed(plain_loop, spec, folder)) for _ in range(rounds)]
    streamed, plain = (min(column) for column in zip(*seconds, strict=True))
    usual = median(theirs / ours for ours, theirs in seconds)
    rates = f"{images / streamed:>10.1f}{images / plain:>14.1f}"
    print(f"{spec.kind:<14}{rates}{plain / streamed:>10.2f}{usual:>16.2f}", flush=True)
    return plain / streamed


def _timed(way: Callable[[EmbeddingSpec, DataRoot], None], spec: EmbeddingSpec, folder: Path) -> float:
    with TemporaryDirectory(dir=folder) as name:
        root = DataRoot(Path(name))
        root.approved.symlink_to(folder / "approved")
        began = time.perf_counter()
        way(spec, root)
        return time.perf_counter() - began


def stream(spec: EmbeddingSpec, root: DataRoot) -> None:
    with Ledger(root.ledger) as ledger:
        embed(spec, root, survey(root.approved, ledger), ledger)


def plain_loop(spec: EmbeddingSpec, root: DataRoot) -> None:
    output = root.derived / spec.folder
    output.mkdir(parents=True)
    encoder = spec.encoder_class().load(EncoderSettings(), spec=spec, threads=1, preview_root=root.preview_models)
    for image in sorted(root.approved.glob("*.jpg")):
        (array,) = encoder.encode([encoder.prepare(open_rgb(image))])
        with open(output / f"{image.stem}.npy", "wb") as file:
            np.save(file, array)
            file.flush()
            os.fsync(file.fileno())


if __name__ == "__main__":
    sys.exit(main())
