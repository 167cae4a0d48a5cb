"""Sharing of a preset's images by hardlink: new links, and a rerun that finds all of them.

    new     limit: linkat in a loop of C, names known, one flush of the folder
            plain: pathlib, exists and hardlink_to, file by file
    rerun   limit: two scandir, reading each entry's name and inode
            plain: pathlib, samefile, file by file

Our side includes planning: both folders are compared first. Without a C compiler the limit is `os.link` in a loop.
Goals: new links at most 1.15 of the limit, a rerun at most 2.0 (medians over interleaved rounds).
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

from benchmarks.common.inputs import scratch
from imagemill.formats.hardlinks import link_tree, plan_links

GOAL_NEW, GOAL_RERUN = 1.15, 2.0

_C = r"""
#define _GNU_SOURCE
#include <fcntl.h>
#include <unistd.h>
int link_all(int from, int to, const char *names, int count) {
    for (; count; count--, names++) {
        if (linkat(from, names, to, names, 0)) return -1;
        while (*names) names++;
    }
    return fsync(to);
}
"""


class Tree(NamedTuple):
    """A base preset with images, and the location of derived ones."""

    base: Path
    derived: Path
    names: dict[str, None]

    def begin(self) -> None:
        """Create an empty derived preset, in another folder each time, because ext4 remembers the names of a deleted one."""
        (self.derived / "images").mkdir(parents=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--images", type=int, default=60_000)
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    with scratch() as folder:
        base, names = _base(folder / "base", arguments.images)
        limit = _c_loop(folder)
        new = [("C linkat" if limit else "os.link", limit or python_loop), ("imagemill", ours), ("plain", plain)]
        rerun = [("two scandir", two_scandir), ("imagemill", ours), ("plain", plain_rerun)]
        rounds = [_round(base, folder, names, new, rerun) for _ in range(arguments.rounds + 1)][1:]
    print(f"{arguments.images} images, medians of {arguments.rounds} rounds; CPU seconds beside")
    met = [
        _report("new", [name for name, _ in new], [one for one, _ in rounds], GOAL_NEW),
        _report("rerun", [name for name, _ in rerun], [two for _, two in rounds], GOAL_RERUN),
    ]
    return 0 if all(met) else 1


Ways = Sequence[tuple[str, Callable[[Tree], None]]]
Cost = tuple[float, float]


def _round(base: Path, folder: Path, names: dict[str, None], new: Ways, rerun: Ways) -> tuple[list[Cost], list[Cost]]:
    costs, made = [], []
    for _, way in new:
        tree = Tree(base, Path(tempfile.mkdtemp(dir=folder)) / "derived", names)
        tree.begin()
        os.sync()
        costs.append(_timed(way, tree))
        made.append(tree)
    again = [_timed(way, made[0]) for _, way in rerun]
    for tree in made:
        shutil.rmtree(tree.derived.parent)
    return costs, again


def _timed(way: Callable[[Tree], None], tree: Tree) -> Cost:
    began, busy = time.perf_counter(), time.process_time()
    way(tree)
    return time.perf_counter() - began, time.process_time() - busy


def _report(what: str, names: Sequence[str], rounds: Sequence[Sequence[Cost]], goal: float) -> bool:
    print(f"{what:<16}{'seconds':>10}{'CPU':>8}{'of the limit':>16}{'fastest':>10}")
    ratios = []
    for n, name in enumerate(names):
        seconds, cpu = zip(*(costs[n] for costs in rounds), strict=True)
        ratios.append(median(costs[n][0] / costs[0][0] for costs in rounds))
        print(f"  {name:<14}{median(seconds):>10.3f}{median(cpu):>8.3f}{ratios[-1]:>16.2f}{min(seconds):>10.3f}")
    print(f"  imagemill takes {ratios[1]:.2f} times the limit (goal: at most {goal:g})")
    return ratios[1] <= goal


def _base(base: Path, images: int) -> tuple[Path, dict[str, None]]:
    (base / "images").mkdir(parents=True)
    names = dict.fromkeys(f"images/{number:012d}.jpg" for number in range(images))
    for name in names:
        os.close(os.open(base / name, os.O_WRONLY | os.O_CREAT))
    return base, names


def _c_loop(folder: Path) -> Callable[[Tree], None] | None:
    """Compile the limit; return None if there is no compiler."""
    import ctypes

    source, library = folder / "link_all.c", folder / "link_all.so"
    source.write_text(_C)
    try:
        subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", library, source], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    link_all = ctypes.CDLL(str(library)).link_all

    def loop(tree: Tree) -> None:
        names = b"".join(os.fsencode(os.path.basename(name)) + b"\0" for name in tree.names)
        handles = _open(tree)
        assert link_all(*handles, names, len(tree.names)) == 0
        for handle in handles:
            os.close(handle)

    return loop


def python_loop(tree: Tree) -> None:
    source, target = _open(tree)
    for name in tree.names:
        os.link(name[7:], name[7:], src_dir_fd=source, dst_dir_fd=target)
    os.fsync(target)
    os.close(source)
    os.close(target)


def _open(tree: Tree) -> tuple[int, int]:
    return os.open(tree.base / "images", os.O_RDONLY), os.open(tree.derived / "images", os.O_RDONLY)


def ours(tree: Tree) -> None:
    link_tree(plan_links(tree.names.keys(), tree.base, tree.derived))


def plain(tree: Tree) -> None:
    for name in tree.names:
        source, target = tree.base / name, tree.derived / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if not target.exists():
            target.hardlink_to(source)


def two_scandir(tree: Tree) -> None:
    for place in (tree.base, tree.derived):
        with os.scandir(place / "images") as entries:
            for entry in entries:
                entry.name  # noqa: B018
                entry.inode()


def plain_rerun(tree: Tree) -> None:
    for name in tree.names:
        assert (tree.derived / name).samefile(tree.base / name)


if __name__ == "__main__":
    sys.exit(main())
