"""The images that are most similar to one, by the cosine of their DINOv3 vectors.

All vectors are read once and kept in memory, 2 KiB each.
"""

from collections.abc import Collection, Sequence
from contextlib import suppress
from typing import NamedTuple

import numpy as np

from imagemill.domain.embedding_specs import DINOV3, DINOV3_WIDTH
from imagemill.domain.layout import DataRoot
from imagemill.formats.npy import NpyStore, read_npy
from imagemill.parts import in_parts

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
            wanted = _vectors(store, [image_id])[1]
            self._read(store)
        except OSError:
            return []
        if not len(wanted) or not self._ids:
            return []
        cosines = np.concatenate(
            [
                block.astype(np.float32) @ wanted[0]
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
        ids: list[str] = []
        vectors = np.empty((len(listing), DINOV3_WIDTH), np.float16)
        for part in in_parts(listing, _BLOCK):
            found, directions = _vectors(store, part)
            vectors[len(ids) : len(ids) + len(found)] = directions
            ids += found
        self._ids, self._vectors, self._state = ids, vectors[: len(ids)], state


def _vectors(store: NpyStore, ids: Sequence[str]) -> tuple[list[str], np.ndarray]:
    """Return the ids that have a vector, and their vectors scaled to length 1, float32 (N, 1024).

    Vectors of another shape, zero vectors and vectors that are not finite do not count.
    """
    found: list[str] = []
    vectors = np.empty((len(ids), DINOV3_WIDTH), np.float32)
    for image_id in ids:
        # Text, because a `Path` takes longer than the file.
        with suppress(OSError, ValueError, TypeError):
            vector = read_npy(store.path_text(image_id))
            if vector.shape == (DINOV3_WIDTH,):
                vectors[len(found)] = vector
                found.append(image_id)
    vectors = vectors[: len(found)]
    lengths = np.linalg.norm(vectors.astype(np.float64), axis=1)
    usable = (lengths > 0) & np.isfinite(lengths)
    directions = vectors[usable] / lengths[usable, np.newaxis].astype(np.float32)
    return [image_id for image_id, is_usable in zip(found, usable, strict=True) if is_usable], directions
