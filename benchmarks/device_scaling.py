"""Images per second of one, two and four simulated devices under the command `imagemill stage2`, one worker process each.

A device takes 100 ms for a batch of eight, and no processor. The rate is that of the files between the first and the last tenth:
the start of the processes does not count.

Goal: each worker reaches at least 95 % of the rate of a single one.
"""

import argparse
import os
import sys
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from benchmarks.common.inputs import noise_photos, scratch
from benchmarks.common.processes import PROJECT, cost

BATCH, SECONDS = 8, 0.1
DEVICES = (1, 2, 4)
GOAL = 0.95
STUBS = PROJECT / "tests" / "helpers" / "stubbed"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--images", type=int, default=800, help="images per device")
    parser.add_argument("--rounds", type=int, default=3, help="the median of this many")
    arguments = parser.parse_args()
    met = []
    with scratch(in_memory_bytes=100_000 * arguments.images * DEVICES[-1]) as folder:
        approved = folder / "photos"
        noise_photos(approved, arguments.images * DEVICES[-1], width=64, height=64, smooth=8)
        measured = [[_measured(n, arguments.images * n, approved) for n in DEVICES] for _ in range(arguments.rounds)]
    rates = [median(rate for rate, _ in column) for column in zip(*measured, strict=True)]
    for number, rate, column in zip(DEVICES, rates, zip(*measured, strict=True), strict=True):
        share, cpu = rate / number / rates[0], median(cpu for _, cpu in column)
        print(
            f"{number} device{'s' if number > 1 else ''}: {rate:.1f} images/s, {share:.2f} of a single one per worker "
            f"(goal: at least {GOAL:g}); {cpu:.2f} ms of CPU time per image, processes and their start included",
            flush=True,
        )
        met.append(share >= GOAL)
    return 0 if all(met) else 1


def _measured(devices: int, images: int, approved: Path) -> tuple[float, float]:
    """Return images per second, and milliseconds of CPU time of the host per image."""
    with TemporaryDirectory(dir=approved.parent) as name:
        root = Path(name)
        (root / "approved").mkdir()
        for path in sorted(approved.glob("*.jpg"))[:images]:
            os.link(path, root / "approved" / path.name)
            os.link(path.with_suffix(".txt"), root / "approved" / f"{path.stem}.txt")
        workers = ", ".join(["cpu"] * devices)
        (root / "imagemill.yaml").write_text(
            f"threads: 1\ndevices: [{workers}]\nencoders: {{vae_latents: {{batch_size: {BATCH}}}}}\n"
        )
        spent = cost(
            ["-m", "dagster_project.cli.main", "stage2", "--pass", "vae", "--data-root", name],
            DAGSTER_HOME=str(root / ".dagster"),
            PYTHONPATH=os.pathsep.join(map(str, (STUBS, PROJECT))),
            IMAGEMILL_STUB_SLEEP=str(SECONDS),
        )
        written = sorted(path.stat().st_mtime_ns for path in (root / "derived" / "vae_latents").glob("*.npy"))
    cut = len(written) // 10
    middle = written[cut : len(written) - cut]
    return (len(middle) - 1) / max(1e-9, (middle[-1] - middle[0]) / 1e9), 1000 * spent.cpu_seconds / images


if __name__ == "__main__":
    sys.exit(main())
