"""Cost of a Ray cluster for the process that owns the data root: images out, arrays back, and its memory.

    ray         images read, hashed and sent; arrays that return are checked and staged, by the pool of the product
    in process  images read and hashed, the same arrays checked and staged, without a worker

The worker returns the same array for every image, so neither way computes it. The cluster is one that this command starts on this
computer; what its nodes and workers use is not counted. Costs are CPU seconds of this process from its first row to its last,
medians of the rounds, which alternate.

For the memory, the consumer pauses 5 seconds while 60,000 keys wait, with 2 and with 16 workers; the figure is the PSS of this
process without the object store, less that of a loop over the same keys in this process.

Goals, per image: 0.6 ms with 400 kB out and 700 kB back, 3 ms with 4.2 MB back; 2 ms per batch without payload; memory at most
`engine.in_flight_mb` and 200 MB more.
"""

import argparse
import os
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from benchmarks.common.inputs import scratch
from benchmarks.common.processes import PROJECT
from benchmarks.common.transport import SENT_BYTES, Pass

IN_FLIGHT_BYTES = 256_000_000
MORE_BYTES = 200_000_000
PAUSE_SECONDS = 5.0


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--images", type=int, default=800)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--keys", type=int, default=60_000, help="that wait while memory is measured")
    arguments = parser.parse_args()
    os.environ["PYTHONPATH"] = str(PROJECT)  # of workers
    os.environ["RAY_AUTH_MODE"] = "disabled"
    import ray

    ray.init(num_cpus=2, object_store_memory=1_000_000_000, log_to_driver=False, include_dashboard=False)
    try:
        with scratch() as folder:
            files = _files(folder, 64)
            met = [_cost(arguments, folder, files, *case) for case in CASES]
            met += [_memory(arguments.keys, folder, files, workers) for workers in (2, 16)]
    finally:
        ray.shutdown()
    print("every goal is met" if all(met) else "goals missed")
    return 0 if all(met) else 1


# Name, whether images are sent, values that come back, goal in ms, and images to which the goal applies.
CASES = [
    ("400 kB out, 700 kB back", True, 350_000, 0.6, 1),
    ("400 kB out, 4.2 MB back", True, 2_100_000, 3.0, 1),
    ("nothing out or back, per batch", False, 0, 2.0, 8),
]


def _files(folder: Path, count: int) -> list[Path]:
    made = []
    for number in range(count):
        made.append(folder / f"{number}.jpg")
        made[-1].write_bytes(os.urandom(SENT_BYTES))
    return made


def _cost(
    arguments: argparse.Namespace,
    folder: Path,
    files: list[Path],
    name: str,
    sends: bool,
    values: int,
    goal: float,
    per: int,
) -> bool:
    """Measure one kind of batches; return whether the goal is met."""
    task = Pass(files if sends else [], values, folder)
    costs = []
    for _ in range(arguments.rounds):
        costs.append((_ray_seconds(task, arguments.images), _here_seconds(task, arguments.images, sends)))
    ours = median(1000 * per * (remote - here) for remote, here in costs)
    remote, here = (median(1000 * per * cost[place] for cost in costs) for place in (0, 1))
    print(f"{name}: {ours:.2f} ms (goal {goal:g}): ray {remote:.2f}, in process {here:.2f}")
    return ours <= goal


def _pool(task: Pass, workers: int, cpus: float = 1.0) -> Any:
    from resources.ray_pool import RayPool, WorkerDemand

    demand = WorkerDemand(cpus=cpus, workers=workers, in_flight_bytes=IN_FLIGHT_BYTES)
    return RayPool(task, demand, print)  # type: ignore[arg-type]


def _ray_seconds(task: Pass, images: int) -> float:
    """Return CPU seconds per image of this process, from the first eighth of the rows on."""
    first, began = images // 8, 0.0
    count = 0
    for count, _ in enumerate(_pool(task, 2).stream(range(images)), start=1):
        if count == first + 1:
            began = time.process_time()
    assert count == images
    return (time.process_time() - began) / (images - first - 1)


def _here_seconds(task: Pass, images: int, sends: bool) -> float:
    worker = task.recipe()
    began = time.process_time()
    for key in range(images):
        if sends:
            task.read(key)
        for row in worker.stream([(str(key), None)]):
            task.receive(row)
    return (time.process_time() - began) / images


def _memory(keys: int, folder: Path, files: list[Path], workers: int) -> bool:
    """Pause while many keys wait; return whether the memory stays within the goal."""
    task = Pass(files, 350_000, folder)
    _here_seconds(task, 64, sends=True)
    alone = _pss()
    stream = _pool(task, workers, 0.1).stream(range(keys))
    try:
        for _ in range(64):
            next(stream)
        until, most = time.monotonic() + PAUSE_SECONDS, 0
        while time.monotonic() < until:
            most = max(most, _pss())
            time.sleep(0.1)
        for _ in range(64):
            next(stream)
            most = max(most, _pss())
    finally:
        stream.close()
    more, goal = (most - alone) / 1e6, (IN_FLIGHT_BYTES + MORE_BYTES) / 1e6
    print(f"memory with {keys:,} keys and {workers} workers, consumer paused: {more:.0f} MB more (goal {goal:.0f})")
    return more <= goal


def _pss() -> int:
    """Return the PSS of this process without memory that it shares with the object store, in bytes."""
    maps: list[Any] = psutil.Process().memory_maps(grouped=False)
    return sum(each.pss for each in maps if not each.path.startswith("/dev/shm"))


if __name__ == "__main__":
    sys.exit(main())
