"""Pages of the viewer over a complete data root: the first page, any filter with any order, one image, and similar images.

    limit      scandir and stat of images and captions, twice: the first time, they may no longer be in memory. Pages are measured
               after that
    first      a new viewer sees that nothing has changed since the last command, reads the state at its end, and answers with the
               first page
    filters    the slowest of all filters, with a search in captions, and of all kinds of change, each in every order: count and
               one page
    image      the facts about one image
    mark       the first page after another process has marked an image
    new image  the first page after an image has been added, for which every image is planned
    similar    reading all vectors, and the twelve most similar images; then again

Wall seconds in a process of its own, whose peak memory is printed. Images are of 64 x 64 pixels, kinds as in scale.py with
`--tiny`; vectors are written for `similar` alone.

Goals up to 60,000 images: first page 3 s, filter 0.2 s, memory 0.4 GB; up to 1,000,000: 15 s, 1.5 s, 1.5 GB. Similar images up to
200,000: 5 s, then 0.3 s.
"""

import argparse
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from benchmarks.common.inputs import scratch
from benchmarks.common.processes import PROJECT
from benchmarks.scale import BYTES_PER_TINY, TINY_PATH, _fill, _run, line_of, look_up_all, use_tiny_kinds
from imagemill.domain.embedding_specs import DINOV3, DINOV3_WIDTH
from imagemill.domain.layout import DataRoot
from imagemill.look.similar import MOST_IMAGES, Similar

FULL = 60_000
# Seconds of the first page and of a filter, and gigabytes; up to 60,000 images, and for more.
GOALS, GOALS_OF_MORE = (3.0, 0.2, 0.4), (15.0, 1.5, 1.5)
SIMILAR_SECONDS, AGAIN_SECONDS = 5.0, 0.3
VECTOR_BYTES = 4 * DINOV3_WIDTH + 128


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--images", type=int, default=2_000)
    parser.add_argument("--viewed", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.viewed:
        return 0 if _view(DataRoot(arguments.viewed), arguments.images) else 1
    size = BYTES_PER_TINY + VECTOR_BYTES
    with scratch(in_memory_bytes=size * arguments.images) as folder:
        root = DataRoot(folder / "data")
        _fill(root, 0, arguments.images)
        use_tiny_kinds(root)
        _run(root)
        if arguments.images <= MOST_IMAGES:
            _vectors(root, arguments.images)
        words = [
            sys.executable,
            "-m",
            "benchmarks.look_pages",
            "--images",
            str(arguments.images),
            "--viewed",
            root.path,
        ]
        variables = {**os.environ, "PYTHONPATH": TINY_PATH}
        return subprocess.run(words, check=False, env=variables, cwd=PROJECT).returncode


def _vectors(root: DataRoot, images: int) -> None:
    """Write a vector for each image."""
    folder = root.derived / DINOV3.folder
    folder.mkdir(parents=True)
    generator = np.random.default_rng(0)
    for number in range(images):
        np.save(folder / f"photo{number:06d}.npy", generator.normal(size=DINOV3_WIDTH).astype(np.float32))


def _view(root: DataRoot, images: int) -> bool:
    from imagemill.domain.filters import FILTERS
    from imagemill.look.selection import View
    from imagemill.look.viewer import Viewer
    from imagemill.store.ledger import CHANGES_SINCE, Ledger
    from imagemill.store.ledger.overview import SORTS, Selection

    first_goal, filter_goal, memory_goal = GOALS if images <= FULL else GOALS_OF_MORE
    limit, again = (_seconds(lambda: look_up_all(root.approved)) for _ in range(2))
    view, image_id = View(), f"photo{images // 2:06d}"
    viewer = Viewer(root.path)
    first = _seconds(lambda: viewer.run(viewer.overview))
    views = [View(Selection(show=show, sort=order, text="number 7")) for show in FILTERS for order in SORTS]
    views += [View(Selection(sort=order), kind, since="7d") for kind in CHANGES_SINCE for order in SORTS]
    slowest = max(_seconds(lambda each=each: viewer.run(viewer.page, each)) for each in views)
    image = _seconds(lambda: viewer.run(viewer.image, image_id, view))
    with Ledger(root.ledger) as ledger:
        ledger.mark([image_id])
    marked = _seconds(lambda: viewer.run(viewer.overview))
    seen = viewer.run(viewer.page, View(Selection(show="marked"))).number == 1
    shutil.copy(root.approved / f"{image_id}.jpg", root.approved / "new.jpg")
    added = _seconds(lambda: viewer.run(viewer.overview))
    seen = seen and viewer.run(viewer.page, View(Selection(show="seen"))).number == images + 1
    viewer.close()
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    print(f"{images:,} images; wall seconds", flush=True)
    line_of("limit: scandir and stat", limit)
    line_of("limit, with all in memory", again)
    reached = [
        line_of("first page", first, first_goal),
        line_of("slowest filter, order and search", slowest, filter_goal),
        line_of("first page after a mark", marked, first_goal),
        line_of("memory, GB", memory, memory_goal),
    ]
    if images <= MOST_IMAGES:
        names, search = {f"photo{number:06d}" for number in range(images)}, Similar()
        similar = _seconds(lambda: search.to(root, image_id, names, 12))
        again = _seconds(lambda: search.to(root, image_id, names, 12))
        reached += [
            line_of("similar, first", similar, SIMILAR_SECONDS),
            line_of("similar, again", again, AGAIN_SECONDS),
        ]
    line_of("first page after a new image", added)
    line_of("one image", image)
    return all(reached) and seen


def _seconds(action: Callable[[], object]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


if __name__ == "__main__":
    sys.exit(main())
