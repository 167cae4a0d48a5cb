"""The images that are most similar to one, by the cosine of their DINOv3 vectors.

All vectors are read once and kept in memory, 2 KiB each.
"""

from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

import numpy as np

from imagemill.domain.embedding_specs import DINOV3, DINOV3_WIDTH
from imagemill.domain.layout import DataRoot
from imagemill.errors import InvalidNpy
from imagemill.formats.npy import NpyStore, read_npy

# Data roots with more images are not searched: their vectors would take more than 0.4 GB.
MOST_IMAGES = 200_000

_BLOCK = 4096


class Neighbour(NamedTuple):
    """A similar image. `cosine`: from -1 to 1."""

    image_id: str
    cosine: float


class Similar:
    """The vectors of a data root."""

    def __init__(self) -> None:
        self._state: object = None
        self._ids: list[str] = []
        self._vectors = np.empty((0, DINOV3_WIDTH), np.float16)

    def to(self, root: DataRoot, image_id: str, among: Collection[str], most: int) -> list[Neighbour]:
        """Return the images with the largest cosine to one; none if it has no vector, or the data root is too large.

        Args:
            root: the data root.
            image_id: the image.
            among: the images to compare with.
            most: number of images.
        """
        store = NpyStore(root.derived / DINOV3.folder, DINOV3)
        try:
            wanted = _direction(read_npy(store.path(image_id)))
            self._read(store)
        except (OSError, ValueError, InvalidNpy):
            return []
        if wanted is None or not self._ids:
            return []
        cosines = np.concatenate(
            [
                block.astype(np.float32) @ wanted
                for block in np.split(self._vectors, range(_BLOCK, len(self._ids), _BLOCK))
            ]
        )
        found: list[Neighbour] = []
        for number in np.argsort(-cosines, kind="stable"):
            if len(found) == most:
                break
            if (other := self._ids[number]) != image_id and other in among:
                found.append(Neighbour(other, float(cosines[number])))
        return found

    def _read(self, store: NpyStore) -> None:
        """Read the vectors unless the folder is as it was."""
        state = store.folder, store.folder.stat().st_mtime_ns
        if state == self._state:
            return
        listing = sorted(store.listing())
        if len(listing) > MOST_IMAGES:
            listing = []
        ids, vectors = [], np.empty((len(listing), DINOV3_WIDTH), np.float16)
        for image_id in listing:
            if (vector := _vector(store.path(image_id))) is not None:
                vectors[len(ids)] = vector
                ids.append(image_id)
        self._ids, self._vectors, self._state = ids, vectors[: len(ids)], state


def _vector(path: Path) -> np.ndarray | None:
    try:
        return _direction(read_npy(path))
    except (OSError, InvalidNpy):
        return None


def _direction(vector: np.ndarray) -> np.ndarray | None:
    """Return a vector scaled to length 1, float32; None if it has another shape, is zero, or is not finite."""
    if vector.shape != (DINOV3_WIDTH,):
        return None
    length = float(np.linalg.norm(vector.astype(np.float64)))
    return (vector / length).astype(np.float32) if 0 < length < float("inf") else None
