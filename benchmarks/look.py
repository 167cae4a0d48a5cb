"""Pictures of the viewer: photographs of 12 megapixels beside a plain Pillow loop, and small photographs on one core.

    unseen     JPEGs of 12 megapixels to 256 pixels, on two threads, into an empty cache; the loop opens, drafts to the fitted
               size, makes the thumbnail and saves it
    again      the same pictures from the cache
    cropped    the same photographs as cropped for their bucket
    small      JPEGs of 640 x 480 pixels, or all of `--photos FOLDER`, to 256 pixels on one core

Rounds are interleaved. Files are in memory.

Goals: unseen at most 1.3 times the loop; 100 pictures again in at most 0.5 seconds; small at least 0.8 of the rate of the loop.
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from statistics import median

from PIL import Image

from benchmarks.common.inputs import noise_photos, scratch
from imagemill.domain.buckets import assign_bucket
from imagemill.domain.inputs import NEW_INPUTS
from imagemill.domain.layout import DataRoot
from imagemill.formats.images import fitted_size, header_size
from imagemill.fs.fingerprints import file_signature, fingerprint_file
from imagemill.look.cache import PictureCache
from imagemill.look.frames import frame_of
from imagemill.look.pictures import Pictures
from imagemill.store.ledger import SourceRow

PX, THREADS = 256, 2
UNSEEN_GOAL, AGAIN_GOAL, SMALL_GOAL = 1.3, 0.5, 0.8


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--images", type=int, default=100, help="photographs of 12 megapixels")
    parser.add_argument("--small", type=int, default=128, help="photographs of 640 x 480 pixels")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--photos", type=Path, help="folder of JPEGs instead of the small photographs")
    arguments = parser.parse_args()
    with scratch(in_memory_bytes=(arguments.images + 200) << 23) as folder:
        noise_photos(folder / "large", arguments.images, width=4000, height=3000, smooth=8)
        noise_photos(folder / "small", arguments.small, width=640, height=480, smooth=8)
        reached = [
            *_large(folder, arguments.rounds),
            _small(folder, arguments.photos or folder / "small", arguments.rounds),
        ]
    print(f"goals reached: {sum(reached)} of {len(reached)}")
    return 0 if all(reached) else 1


# ---- photographs of 12 megapixels


def _large(folder: Path, rounds: int) -> list[bool]:
    sources, made = _sources(folder / "large"), _Made(folder, folder / "large")
    taken: dict[str, list[float]] = {"loop": [], "unseen": [], "again": [], "cropped": []}
    for _ in range(rounds):
        taken["loop"].append(_seconds(partial(_loop, folder / "loop"), _paths(folder / "large"), THREADS))
        pictures = made.uncached()
        taken["unseen"].append(_seconds(lambda s, p=pictures: p.photograph(s, PX), sources, THREADS))
        taken["again"].append(_seconds(lambda s, p=pictures: p.photograph(s, PX), sources, THREADS))
        taken["cropped"].append(_seconds(lambda s, p=pictures: p.cropped(s, _frame(s), PX), sources, THREADS))
    print(f"{len(sources)} JPEGs of 12 megapixels on {THREADS} threads, medians of {rounds} rounds")
    for name, seconds in taken.items():
        ratio = median(one / loop for one, loop in zip(seconds, taken["loop"], strict=True))
        print(f"{name:<9}{1000 * median(seconds) / len(sources):>9.2f} ms per picture{ratio:>8.2f} of the loop")
    unseen = median(one / loop for one, loop in zip(taken["unseen"], taken["loop"], strict=True))
    again = median(taken["again"]) * 100 / len(sources)
    return [unseen <= UNSEEN_GOAL, again <= AGAIN_GOAL]


# ---- small photographs


def _small(folder: Path, photos: Path, rounds: int) -> bool:
    sources, made = _sources(photos), _Made(folder, photos)
    loop, ours = [], []
    for _ in range(rounds):
        loop.append(_seconds(partial(_loop, folder / "loop"), _paths(photos), 1))
        pictures = made.uncached()
        ours.append(_seconds(lambda s, p=pictures: p.photograph(s, PX), sources, 1))
    ratio = median(one / other for one, other in zip(loop, ours, strict=True))
    rates = [len(sources) / median(seconds) for seconds in (loop, ours)]
    print(
        f"{len(sources)} small JPEGs on one core: loop {rates[0]:.0f}, pictures {rates[1]:.0f} per second ({ratio:.2f})"
    )
    return ratio >= SMALL_GOAL


# ---- both


class _Made:
    """Pictures of a folder of images, each time with an empty cache."""

    def __init__(self, folder: Path, approved: Path) -> None:
        self._folder, self._root, self._serial = folder, DataRoot(folder, approved_at=approved), 0

    def uncached(self) -> Pictures:
        self._serial += 1
        return Pictures(self._root, NEW_INPUTS, PictureCache(self._folder / f"cache{self._serial}"))


def _paths(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.jpg"))


def _sources(folder: Path) -> list[SourceRow]:
    rows = []
    for path in _paths(folder):
        height, width = header_size(path)
        name = str(path.relative_to(folder))
        rows.append(SourceRow(path.stem, name, file_signature(path), fingerprint_file(path), height, width))
    return rows


def _frame(source: SourceRow):
    return frame_of(source.width, source.height, assign_bucket(source.width, source.height), "bucket")


def _loop(folder: Path, path: Path) -> None:
    folder.mkdir(exist_ok=True)
    with Image.open(path) as image:
        image.draft(None, fitted_size(image.size, PX))
        image = image.convert("RGB")  # noqa: PLW2901
        image.thumbnail((PX, PX))
        image.save(folder / path.name, quality=85)


def _seconds(work: Callable[..., object], items: Sequence[object], threads: int) -> float:
    if threads == 1:
        began = time.process_time()
        for item in items:
            work(item)
        return time.process_time() - began
    began = time.perf_counter()
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(work, items))
    return time.perf_counter() - began


if __name__ == "__main__":
    sys.exit(main())
