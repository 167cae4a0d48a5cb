"""Pictures of the viewer: photographs of 12 megapixels beside a plain Pillow loop, and small photographs on one core.

    unseen     JPEGs of 12 megapixels to 256 pixels, on two threads, into an empty cache; the loop opens, drafts to the fitted
               size, makes the thumbnail and saves it
    again      the same pictures from the cache
    cropped    the same photographs as cropped for their bucket
    served     as unseen, from `imagemill look` over two connections; served again: from its cache
    small      JPEGs of 640 x 480 pixels, or all of `--photos FOLDER`, to 256 pixels on one core

Rounds are interleaved. Files are in memory.

Goals: unseen and served at most 1.3 times the loop; 100 pictures again in at most 0.5 seconds, served or not; small at least 0.8
of the rate of the loop.
"""

import argparse
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from http.client import HTTPConnection
from pathlib import Path
from statistics import median
from urllib.parse import urlsplit

from PIL import Image

from benchmarks.common.inputs import noise_photos, scratch
from benchmarks.common.processes import PROJECT
from benchmarks.common.ui import free_port
from benchmarks.scale import OURS, TINY_KINDS, TINY_PATH, command
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
    names = ("loop", "unseen", "again", "cropped", "served", "served again")
    taken: dict[str, list[float]] = {name: [] for name in names}
    with _served(folder) as (get, root):
        for _ in range(rounds):
            _round(folder, sources, made, taken)
            shutil.rmtree(root.look, ignore_errors=True)
            taken["served"].append(_seconds(get, sources, THREADS))
            taken["served again"].append(_seconds(get, sources, THREADS))
    print(f"{len(sources)} JPEGs of 12 megapixels on {THREADS} threads, medians of {rounds} rounds")
    for name, seconds in taken.items():
        print(
            f"{name:<13}{1000 * median(seconds) / len(sources):>9.2f} ms per picture{_ratio(taken, name):>8.2f} of the loop"
        )
    again = [median(taken[name]) * 100 / len(sources) for name in ("again", "served again")]
    ratios = [_ratio(taken, name) for name in ("unseen", "served")]
    return [*(ratio <= UNSEEN_GOAL for ratio in ratios), *(seconds <= AGAIN_GOAL for seconds in again)]


def _ratio(taken: dict[str, list[float]], name: str) -> float:
    return median(one / loop for one, loop in zip(taken[name], taken["loop"], strict=True))


def _round(folder: Path, sources: list[SourceRow], made: "_Made", taken: dict[str, list[float]]) -> None:
    taken["loop"].append(_seconds(partial(_loop, folder / "loop"), _paths(folder / "large"), THREADS))
    pictures = made.uncached()
    taken["unseen"].append(_seconds(lambda s, p=pictures: p.photograph(s, PX), sources, THREADS))
    taken["again"].append(_seconds(lambda s, p=pictures: p.photograph(s, PX), sources, THREADS))
    taken["cropped"].append(_seconds(lambda s, p=pictures: p.cropped(s, _frame(s), PX), sources, THREADS))


@contextmanager
def _served(folder: Path) -> Iterator[tuple[Callable[[SourceRow], None], DataRoot]]:
    """Yield a function that gets the picture of a photograph from a viewer, and the viewer's data root."""
    root = DataRoot(folder / "root")
    root.path.mkdir()
    root.config_file.write_text(f"kinds: [{TINY_KINDS[0]}]\n")
    command("run", "--data-root", root.path, "--approved", folder / "large", DAGSTER_HOME=str(folder / "history"))
    words = [sys.executable, *OURS, "look", "--no-open", "--port", str(free_port()), "--data-root", str(root.path)]
    variables = {**os.environ, "PYTHONPATH": TINY_PATH}
    with subprocess.Popen(words, cwd=PROJECT, env=variables, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        try:
            address = urlsplit(next(line for line in process.stdout if "token=" in line).split()[1])
            connections = threading.local()

            def get(source: SourceRow) -> None:
                connection = getattr(connections, "open", None)
                if connection is None:
                    connection = connections.open = HTTPConnection(address.hostname or "", address.port)
                    connection.request("GET", f"/?{address.query}")
                    answer = connection.getresponse()
                    answer.read()
                    connections.cookie = (answer.getheader("Set-Cookie") or "").partition(";")[0]
                connection.request("GET", f"/thumb?id={source.image_id}", headers={"Cookie": connections.cookie})
                answer = connection.getresponse()
                data = answer.read()
                if answer.status != 200 or not data.startswith(b"\xff\xd8"):
                    raise RuntimeError(f"{source.image_id}: {answer.status} {data[:200]!r}")

            _wait_for(address.port or 0)
            get(_sources(folder / "large")[0])
            yield get, root
        finally:
            process.terminate()


def _wait_for(port: int) -> None:
    """Wait until a server accepts connections."""
    until = time.monotonic() + 60
    while time.monotonic() < until:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            time.sleep(0.05)
    raise RuntimeError("the viewer did not start")


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
