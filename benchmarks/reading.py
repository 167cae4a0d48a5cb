"""Reading for training: mixing and throughput of `imagemill.reading` and of the readers that trainers use otherwise.

    sequential      ShardDataset, order="stream", buffer=0: tar after tar, the reference of every ratio
    permutation     ShardDataset, its default order
    stream          ShardDataset, order="stream": a shuffle buffer of 1,000 samples
    bare            webdataset.WebDataset(tars).decode(): single samples in tar order, without batches
    webdataset      the same with shuffled tars, .shuffle(1000) and .batched(…)
    datasets        Hugging Face, streaming, .shuffle(buffer_size=1000), .iter(…)
    energon         Megatron-Energon, shuffle_buffer_size=1000, max_samples_per_sequence=100

All read the same tars, which are sorted by class, and deliver batches of arrays. Mixing is the mean number of distinct classes
in a batch. Throughput is that after the first batch, so that no reader's start counts. Rounds are interleaved. The tars stay in
memory, so that the readers' own work is measured instead of the disk's.

    python -m benchmarks.reading --samples 60000 --sample-kb 64
    python -m benchmarks.reading --samples 4000 --sample-kb 700

Goals for permutation: 0.947 of the classes that random batches have (215 of 227), at least 0.9 of the sequential throughput and
0.95 of bare webdataset's.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple

import numpy as np
from webdataset.compat import WebDataset, WebLoader

from benchmarks.common.class_sets import MEMBERS, write_class_set
from benchmarks.common.inputs import scratch
from imagemill.reading import ShardDataset
from imagemill.reading.samples import short_name

GOAL_MIXING, GOAL_SEQUENTIAL, GOAL_BARE = 215 / 227, 0.9, 0.95
BUFFER = 1000
JSON, ARRAY = MEMBERS

# The captions of a batch; a reader also builds the batch's array.
Captions = list[str]


class Run(NamedTuple):
    """Samples per second after the first batch, and the mean number of distinct classes in a full batch."""

    rate: float
    classes: float


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--samples", type=int, default=8000)
    parser.add_argument("--sample-kb", type=int, default=64, help="KiB per sample, an even number")
    parser.add_argument("--tars", type=int, default=60)
    parser.add_argument("--classes", type=int, default=1000)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1, help="limit of each reader in each round")
    parser.add_argument("--workers", type=int, default=0, help="worker processes of each reader")
    arguments = parser.parse_args()

    with scratch(in_memory_bytes=1100 * arguments.sample_kb * arguments.samples) as folder:
        shards = folder / "shards"
        write_class_set(shards, arguments.samples, arguments.sample_kb, tars=arguments.tars, classes=arguments.classes)
        # Before `datasets` is imported, which reads these once.
        os.environ |= {"HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "cache")}
        return _compare(shards, arguments)


def _compare(shards: Path, arguments: argparse.Namespace) -> int:
    """Run interleaved rounds, of which the first is discarded; print the table, and return the exit code."""
    readers, batch_size = _readers(shards, arguments.batch_size, arguments.workers), arguments.batch_size
    runs: dict[str, list[Run]] = {name: [] for name in readers}
    for number in range(arguments.rounds + 1):
        for name in list(runs):
            try:
                run = _measure(readers[name](), batch_size, arguments.seconds)
            except ImportError as error:
                del runs[name]
                print(f"{name}: skipped, {error}; do: pip install '.[dev]'")
                continue
            if number:
                runs[name].append(run)
    ideal = _random_classes(arguments.classes, arguments.samples, batch_size)
    print(
        f"{arguments.samples} samples of {arguments.sample_kb} KiB in {arguments.tars} tars, batches of {batch_size}, "
        f"{arguments.workers} workers; a random batch has {ideal:.0f} classes"
    )
    print(f"{'':<14}{'classes':>9}{'samples/s':>12}{'of sequential':>16}{'of bare':>10}")
    ratios = {
        name: (_ratio(ours, runs["sequential"]), _ratio(ours, runs["bare"]), median(run.classes for run in ours))
        for name, ours in runs.items()
    }
    for name, (of_sequential, of_bare, classes) in ratios.items():
        shown = "-" if name == "bare" else f"{classes:.0f}"
        rate = median(run.rate for run in runs[name])
        print(f"{name:<14}{shown:>9}{rate:>12.0f}{of_sequential:>16.2f}{of_bare:>10.2f}")
    of_sequential, of_bare, classes = ratios["permutation"]
    print(
        f"goals for permutation: {GOAL_MIXING * ideal:.0f} classes, {GOAL_SEQUENTIAL:g} of sequential, "
        f"{GOAL_BARE:g} of bare webdataset"
    )
    return int(classes < GOAL_MIXING * ideal or of_sequential < GOAL_SEQUENTIAL or of_bare < GOAL_BARE)


def _ratio(runs: Iterable[Run], reference: Iterable[Run]) -> float:
    return median(run.rate / other.rate for run, other in zip(runs, reference, strict=True))


def _measure(batches: Iterable[Captions], batch_size: int, seconds: float) -> Run:
    """Read until the end or the time limit. A reader that ends with its first batch is timed from its start."""
    began, later, delivered, classes = time.perf_counter(), 0.0, 0, []
    first = 0
    for captions in batches:
        now = time.perf_counter()
        if not first:
            first, later = len(captions), now
        delivered += len(captions)
        if len(captions) == batch_size or not classes:
            classes.append(len(set(captions)))
        if now - later > seconds:
            break
    ended = time.perf_counter()
    if delivered > first:
        return Run((delivered - first) / (ended - later), mean(classes))
    return Run(delivered / (ended - began), mean(classes))


def _random_classes(classes: int, samples: int, batch_size: int) -> float:
    """Return the expected number of distinct classes among samples drawn without replacement, from equal classes."""
    each, taken = samples / classes, min(batch_size, samples)
    missing = np.prod([max(samples - each - n, 0) / (samples - n) for n in range(taken)])
    return float(classes * (1 - missing))


# ---- readers


def _readers(shards: Path, batch_size: int, workers: int) -> dict[str, Callable[[], Iterator[Captions]]]:
    (folder,) = shards.glob("bucket_*")
    tars = [str(tar) for tar in sorted(folder.glob("*.tar"))]
    return {
        "sequential": partial(_ours, folder, batch_size, workers, order="stream", buffer=0),
        "permutation": partial(_ours, folder, batch_size, workers),
        "stream": partial(_ours, folder, batch_size, workers, order="stream"),
        "bare": partial(_bare, tars, workers),
        "webdataset": partial(_webdataset, tars, batch_size, workers),
        "datasets": partial(_datasets, tars, batch_size, workers),
        "energon": partial(_energon, folder, batch_size, workers),
    }


def _ours(folder: Path, batch_size: int, workers: int, **order: Any) -> Iterator[Captions]:
    dataset = ShardDataset(folder, batch_size, members=[short_name(member) for member in MEMBERS], repeat=True, **order)
    for batch in dataset.loader(num_workers=workers):
        yield batch["caption"]


def _bare(tars: list[str], workers: int) -> Iterator[Captions]:
    for sample in _loaded(WebDataset(tars, shardshuffle=False, empty_check=False).decode(), workers):
        yield [sample[JSON]["caption"]]


def _webdataset(tars: list[str], batch_size: int, workers: int) -> Iterator[Captions]:
    mixed = WebDataset(tars, shardshuffle=len(tars), empty_check=False).shuffle(BUFFER)
    for records, _ in _loaded(mixed.decode().to_tuple(JSON, ARRAY).batched(batch_size), workers):
        yield [record["caption"] for record in records]


def _loaded(samples: Any, workers: int) -> Any:
    # The library's own loader, without torch's function that converts every number of a record to a tensor.
    return WebLoader(samples, batch_size=None, num_workers=workers, collate_fn=_unchanged) if workers else samples


def _datasets(tars: list[str], batch_size: int, workers: int) -> Iterator[Captions]:
    import datasets

    datasets.disable_progress_bars()
    rows: Any = datasets.load_dataset("webdataset", data_files={"train": tars}, split="train", streaming=True)
    rows = rows.shuffle(seed=0, buffer_size=BUFFER).with_format("numpy").batch(batch_size)
    for batch in WebLoader(rows, batch_size=None, num_workers=workers, collate_fn=_unchanged) if workers else rows:
        yield [record["caption"] for record in batch[JSON]]


def _energon(folder: Path, batch_size: int, workers: int) -> Iterator[Captions]:
    from megatron import energon

    from benchmarks.common.energon_batches import BatchEncoder

    dataset = energon.get_train_dataset(
        folder,
        task_encoder=BatchEncoder(),
        worker_config=energon.WorkerConfig(rank=0, world_size=1, num_workers=workers),
        batch_size=batch_size,
        shuffle_buffer_size=BUFFER,
        max_samples_per_sequence=100,
        repeat=False,
    )
    for captions, _ in energon.get_loader(dataset):
        yield captions


def _unchanged(sample: Any) -> Any:
    return sample


if __name__ == "__main__":
    sys.exit(main())
