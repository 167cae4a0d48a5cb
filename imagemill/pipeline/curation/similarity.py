"""Vectors of nearly the same direction: an index that finds pairs, and the groups that they form.

Up to 50,000 vectors the index is exact (faiss `IndexFlatIP`): every pair is compared, once. Above, it is `IndexIVFFlat`: 4·√n
k-means cells, of which each search examines the nearest `probes`. Near duplicates are in the same cell or in a neighbouring
one, so almost none is missed, and the work grows with n·√n instead of n². Both are range searches, not searches for a number
of neighbours, so all of a vector's hundred copies are found.

Vectors are added block by block and searched as they arrive, so one copy of them is in memory: 4 KiB each, and up to twice that
while the index grows.

Only arithmetic on rows; images, files and reports are in pipeline/curation/near_duplicates.py.
"""

import importlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

EXACT_UP_TO = 50_000

# Cosines are sums of float32 products: equal vectors may give 0.9999993.
TOLERANCE = 1e-6

# Most pairs that one search may find: 12 bytes each.
_PAIRS = 1 << 25
# k-means needs this many vectors per cell (below 39 faiss warns).
_PER_CELL = 40


def cells(count: int) -> int:
    """Return the number of k-means cells of an index for `count` vectors; 0 for an exact index."""
    return 0 if count <= EXACT_UP_TO else int(4 * count**0.5)


def training_size(count: int) -> int:
    """Return the number of vectors that an index for `count` vectors is trained with."""
    return min(count, _PER_CELL * cells(count))


def block_size(count: int) -> int:
    """Return the number of vectors per search in an index of `count` vectors."""
    return max(32, min(1024, _PAIRS // max(count, 1)))


def _faiss() -> Any:
    # Imported on first use; its classes are created at run time, so type checkers cannot see them.
    return importlib.import_module("faiss")


def make_index(width: int, count: int, sample: Callable[[], np.ndarray], *, probes: int) -> Any:
    """Return an empty faiss index for about `count` unit vectors.

    Args:
        width: length of a vector.
        count: expected number of vectors.
        sample: returns `training_size(count)` of them, float32 (n, width); called only if that is not 0.
        probes: cells examined per search.
    """
    faiss = _faiss()
    if not cells(count):
        return faiss.IndexFlatIP(width)
    index = faiss.index_factory(width, f"IVF{cells(count)},Flat", faiss.METRIC_INNER_PRODUCT)
    index.train(sample())
    index.nprobe = probes
    index.set_direct_map_type(faiss.DirectMap.Array)  # required for reconstructing vectors
    return index


@contextmanager
def search_threads(threads: int) -> Iterator[None]:
    """Set faiss's number of threads for the block. torch's own OpenMP, if separate, is not affected."""
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
    """Add blocks of unit vectors, float32 (n, width), to an empty index and search each for similar ones.

    Yields:
        per block, its rows and lower rows of vectors added so far, for each pair whose cosine is at least the threshold.
    """
    for block in blocks:
        first = index.ntotal
        index.add(block)
        limits, _, lower = index.range_search(block, threshold - TOLERANCE)
        rows = np.repeat(np.arange(first, index.ntotal), np.diff(limits.astype(np.int64)))
        keep = lower < rows
        yield rows[keep], lower[keep]


def connected(count: int, pairs: Iterable[tuple[np.ndarray, np.ndarray]]) -> list[np.ndarray]:
    """Return groups of rows that pairs connect, directly or through others; each sorted, with at least two rows."""
    roots = np.arange(count)
    for one, other in pairs:
        _join(roots, one, other)
    order = np.argsort(roots, kind="stable")
    groups = np.split(order, np.flatnonzero(np.diff(roots[order])) + 1)
    return [group for group in groups if len(group) > 1]


def _join(roots: np.ndarray, one: np.ndarray, other: np.ndarray) -> None:
    """Merge sets in bulk: point each root to the least root it is paired with, until the roots of every pair are equal."""
    while True:
        a, b = roots[one], roots[other]
        apart = a != b
        if not apart.any():
            return
        one, other, a, b = one[apart], other[apart], a[apart], b[apart]
        np.minimum.at(roots, np.maximum(a, b), np.minimum(a, b))
        while not np.array_equal(roots, shorter := roots[roots]):
            roots[:] = shorter
