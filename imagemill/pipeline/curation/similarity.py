"""Vectors that point the same way: an index that finds them, and the groups they form.

Up to 50,000 vectors the index is exact (faiss `IndexFlatIP`): every pair is compared, once. Above, it is `IndexIVFFlat`: k-means
cells, 4·√n of them, of which each search looks into the `probes` nearest. Near duplicates lie in the same cell or in a
neighbouring one, so next to none is missed, and the work grows with n·√n instead of n². Both search a range,
not a number of neighbours: a vector's hundred copies are all found.

Vectors are added block by block and searched as they come, so one copy of them is in memory: 4 KiB each, and up to twice that
while the index grows.

Belongs here: arithmetic on rows. Belongs elsewhere: images, files, reports (pipeline/curation/near_duplicates.py).
"""

import importlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

EXACT_UP_TO = 50_000

# Cosines are sums of float32 products: equal vectors may come out as 0.9999993.
TOLERANCE = 1e-6

# Pairs that one search may find, in the worst case: 12 bytes each.
_PAIRS = 1 << 25
# k-means wants this many vectors per cell (below 39 faiss warns).
_PER_CELL = 40


def cells(count: int) -> int:
    """How many cells the index of so many vectors has; 0: it is exact."""
    return 0 if count <= EXACT_UP_TO else int(4 * count**0.5)


def training_size(count: int) -> int:
    """How many vectors the index of so many is trained with."""
    return min(count, _PER_CELL * cells(count))


def block_size(count: int) -> int:
    """Vectors per search among so many."""
    return max(32, min(1024, _PAIRS // max(count, 1)))


def _faiss() -> Any:
    # Loaded when vectors are compared; its classes are made at run time, out of any type checker's sight.
    return importlib.import_module("faiss")


def make_index(width: int, count: int, sample: Callable[[], np.ndarray], *, probes: int) -> Any:
    """An empty faiss index for about `count` unit vectors.

    Args:
        sample: `training_size(count)` of them, float32 (n, width); called only where that is not 0.
    """
    faiss = _faiss()
    if not cells(count):
        return faiss.IndexFlatIP(width)
    index = faiss.index_factory(width, f"IVF{cells(count)},Flat", faiss.METRIC_INNER_PRODUCT)
    index.train(sample())
    index.nprobe = probes
    index.set_direct_map_type(faiss.DirectMap.Array)  # else no vector could be read back
    return index


@contextmanager
def search_threads(threads: int) -> Iterator[None]:
    """Let faiss use so many threads. torch has an OpenMP of its own, which stays as it is, or shares this one."""
    faiss = _faiss()
    before = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(threads)
    try:
        yield
    finally:
        faiss.omp_set_num_threads(before)


def similar_pairs(
    index: Any, blocks: Iterable[np.ndarray], threshold: float
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Add blocks of unit vectors, float32 (n, width), to an empty index.

    Yields:
        per block, rows of it and of vectors up to it (lower rows) whose cosine is at least the threshold.
    """
    for block in blocks:
        first = index.ntotal
        index.add(block)
        limits, _, lower = index.range_search(block, threshold - TOLERANCE)
        rows = np.repeat(np.arange(first, index.ntotal), np.diff(limits.astype(np.int64)))
        keep = lower < rows
        yield rows[keep], lower[keep]


def connected(count: int, pairs: Iterable[tuple[np.ndarray, np.ndarray]]) -> list[np.ndarray]:
    """Groups of rows that pairs connect, directly or through others; each in rising order, of at least two."""
    roots = np.arange(count)
    for one, other in pairs:
        _join(roots, one, other)
    order = np.argsort(roots, kind="stable")
    groups = np.split(order, np.flatnonzero(np.diff(roots[order])) + 1)
    return [group for group in groups if len(group) > 1]


def _join(roots: np.ndarray, one: np.ndarray, other: np.ndarray) -> None:
    """Union of sets, many at once: each root points to the least root that a pair gives it, until no pair is apart."""
    while True:
        a, b = roots[one], roots[other]
        apart = a != b
        if not apart.any():
            return
        one, other, a, b = one[apart], other[apart], a[apart], b[apart]
        np.minimum.at(roots, np.maximum(a, b), np.minimum(a, b))
        while not np.array_equal(roots, shorter := roots[roots]):
            roots[:] = shorter
