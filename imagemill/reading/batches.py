"""The reading stage of the pipeline: converts pieces of a plan to batches of tensors.

The samples of a batch are chosen in plan.py; a single sample is read in samples.py.
"""

import random
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from imagemill.domain.embedding_specs import VAE
from imagemill.reading.latents import Fit, fit_latent, latent_factors
from imagemill.reading.plan import Piece
from imagemill.reading.samples import chosen_suffixes, read_members, short_name
from imagemill.reading.sets import Bucket

Crop = Literal["center", "random"]
Batch = dict[str, Any]

_LATENT = short_name(VAE.member)


@dataclass(frozen=True, slots=True)
class BatchReader:
    """A reader of pieces. `suffixes`: of the members to decode, for each bucket."""

    buckets: Sequence[Bucket]
    suffixes: Sequence[Sequence[str]]
    latents: Fit
    crop: Crop
    factors: Sequence[tuple[float, float]] | None
    seed: int

    @classmethod
    def of(
        cls, buckets: Sequence[Bucket], members: Sequence[str], *, latents: Fit, crop: Crop, normalized: bool, seed: int
    ) -> "BatchReader":
        """Build a reader for the named members.

        Raises WrongUsage for a member that a bucket lacks, ImagemillError if factors are requested but not recorded.
        """
        suffixes = [chosen_suffixes(members, bucket.members, bucket.folder) for bucket in buckets]
        factors = [latent_factors(bucket.manifest, bucket.folder) for bucket in buckets] if normalized else None
        return cls(buckets, suffixes, latents, crop, factors, seed)

    def __call__(self, pieces: Iterable[Piece]) -> Iterator[Batch]:
        """Read pieces as batches, in order."""
        return map(self.read, pieces)

    def read(self, piece: Piece) -> Batch:
        """Read one piece as a batch."""
        bucket, suffixes = self.buckets[piece.bucket], self.suffixes[piece.bucket]
        lines = [bucket.lines[row] for row in piece.rows]
        samples = [read_members(bucket.tars, line, suffixes) for line in lines]
        batch: Batch = {
            "epoch": piece.epoch,
            "step": piece.step,
            "bucket": bucket.name,
            "image_id": [line.image_id for line in lines],
        }
        for name in map(short_name, suffixes):
            values = [sample[name] for sample in samples]
            if name == "json":
                batch |= {"json": values, "caption": [record["caption"] for record in values]}
            elif name == _LATENT:
                batch[name] = self._latents(values, piece, batch["image_id"])
            else:
                batch[name] = _stacked(values)
        return batch

    def _latents(self, latents: list[np.ndarray], piece: Piece, image_ids: Sequence[str]) -> Any:
        if self.latents != "as_stored":
            bucket = self.buckets[piece.bucket]
            size, where = bucket.latent_size, str(bucket.folder)
            latents = [
                fit_latent(z, size, self.latents, self._corner(piece.epoch, image_id), where=f"{where}, {image_id!r}")
                for z, image_id in zip(latents, image_ids, strict=True)
            ]
        if self.factors:
            scaling, shift = self.factors[piece.bucket]
            latents = [(z.astype(np.float32) - np.float32(shift)) * np.float32(scaling) for z in latents]
        return _each(latents) if self.latents == "as_stored" else _stacked(latents)

    def _corner(self, epoch: int, image_id: str) -> tuple[float, float] | None:
        """Return the corner of this sample in this epoch, independent of the reading process; None for the center."""
        if self.crop == "center":
            return None
        chance = random.Random(f"{self.seed}/{epoch}/{image_id}")
        return chance.random(), chance.random()


def _stacked(values: list[np.ndarray]) -> Any:
    """Return one tensor, or a list of tensors for a kind with arrays of different shapes."""
    import torch
    from torch.utils.data import default_collate, get_worker_info

    if len({value.shape for value in values}) > 1:
        return _each(values)
    if get_worker_info() is None:
        # Not torch.stack, whose threads took ten times as long on busy cores.
        return torch.from_numpy(np.stack(values))
    with warnings.catch_warnings():
        # Decoded arrays are read-only, about which torch warns; these tensors are only copied from.
        warnings.simplefilter("ignore", UserWarning)
        views = [torch.from_numpy(value) for value in values]
    # In a worker torch stacks into shared memory, which saves a copy when the batch is sent.
    return default_collate(views)


def _each(values: list[np.ndarray]) -> list[Any]:
    """Return one writable tensor per array."""
    import torch

    return [torch.from_numpy(np.array(value)) for value in values]
