"""Reading speed for training: `imagemill.reading` against bare `webdataset` over the same tars.

    bare         webdataset.WebDataset(tars).decode(): every sample decoded, in tar order, without batches
    imagemill    ShardDataset, streaming: shuffled, every member decoded, in batches of tensors
    by workers   both again behind a DataLoader with the requested number of processes

Samples have the sizes of 1 MP images and are noise. Rounds are interleaved. The tars stay in memory, so that the reader's own
work is measured instead of the disk's.

Goal: at least 0.95 of bare webdataset.
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import median
from typing import Any

from webdataset.compat import WebDataset, WebLoader

from benchmarks.common.inputs import scratch
from benchmarks.common.samples import make_samples, pack
from imagemill.domain.embedding_specs import embedding_specs
from imagemill.domain.layout import DataRoot
from imagemill.reading import ShardDataset
from imagemill.reading.samples import short_name

GOAL_RATIO = 0.95
MEMBERS = ["json", *(spec.member for spec in embedding_specs()), "t5m.npy"]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--samples", type=int, default=1000)
    parser.add_argument("--shard-size", type=int, default=250)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--workers", type=int, default=2)
    arguments = parser.parse_args()

    with scratch(in_memory_bytes=2_000_000 * arguments.samples) as folder:
        root = DataRoot(folder)
        pack(root, make_samples(root, arguments.samples, sizes=[(1024, 1024)]), per_tar=arguments.shard_size)
        ratio = _compare(root.shards, arguments, 0)
        if arguments.workers:
            _compare(root.shards, arguments, arguments.workers)
    print(f"goal, without workers: at least {GOAL_RATIO:g}")
    return 0 if ratio >= GOAL_RATIO else 1


def _compare(folder: Path, arguments: argparse.Namespace, workers: int) -> float:
    """Run interleaved rounds of both, of which the first is discarded; print and return the median ratio."""
    ways = [lambda: bare(folder, workers), lambda: ours(folder, arguments.batch_size, workers)]
    rounds = [[_rate(way, arguments.samples) for way in ways] for _ in range(arguments.rounds + 1)][1:]
    plain, imagemill = (median(column) for column in zip(*rounds, strict=True))
    ratio = median(ours / bare for bare, ours in rounds)
    print(
        f"{workers} workers: bare webdataset {plain:.0f}, imagemill {imagemill:.0f} samples/s; "
        f"ratio {ratio:.2f}, median over {arguments.rounds} rounds"
    )
    return ratio


def bare(folder: Path, workers: int) -> int:
    tars = [str(tar) for tar in sorted(folder.glob("bucket_*/*.tar"))]
    samples: Any = WebDataset(tars, shardshuffle=False, empty_check=False).decode()
    if workers:
        # The library's own loader, which does not convert every number of a record to a tensor.
        samples = WebLoader(samples, batch_size=None, num_workers=workers, collate_fn=_unchanged)
    return sum(1 for _ in samples)


def ours(folder: Path, batch_size: int, workers: int) -> int:
    dataset = ShardDataset(folder, batch_size, latents="crop", members=list(map(short_name, MEMBERS)))
    batches: Iterable = dataset.loader(num_workers=workers) if workers else dataset
    return sum(len(batch["image_id"]) for batch in batches)


def _unchanged(sample: dict) -> dict:
    return sample


def _rate(way: Callable[[], int], samples: int) -> float:
    began = time.perf_counter()
    delivered = way()
    took = time.perf_counter() - began
    assert delivered == samples
    return samples / took


if __name__ == "__main__":
    sys.exit(main())
