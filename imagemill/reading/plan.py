"""Which samples make which batch, for whom: decided from counts and seeds alone, before a tar is touched.

    epoch ── steps ── one bucket each, drawn with a chance in proportion to the samples it has left
                │
                └── world_size × batch_size samples of that bucket, in its order of this epoch, shared among the ranks

So all ranks have the same bucket at the same step, a position is two numbers (epoch, step), and going on from one costs no
reading. The same seed and epoch give the same plan on every machine and with any number of DataLoader workers.

Belongs here: order, drawing, sharing out; all pure.
Belongs elsewhere: reading (batches.py), position and state (dataset.py).
"""

import random
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

import numpy as np

Order = Literal["stream", "permutation"]
Tail = Literal["short", "drop", "pad"]


@dataclass(frozen=True, slots=True)
class Piece:
    """One batch of one rank. `bucket`: its number; `rows`: its samples' numbers in the bucket's index."""

    epoch: int
    step: int
    bucket: int
    rows: np.ndarray


@dataclass(frozen=True, slots=True)
class BucketLayout:
    """What a plan knows of a bucket. `shards`: for each sample, in index order, the number of its tar."""

    name: str
    shards: np.ndarray


@dataclass(frozen=True, slots=True)
class Plan:
    """Every epoch of a set.

    Attributes:
        order: of the samples of a bucket in an epoch. `permutation`: every order equally likely; reads jump all over the
            set. `stream`: tars in random order, within that stream no sample more than `buffer` places from its own, as
            a shuffle buffer does; reads go once through the tars.
        tail: what becomes of a bucket's last samples where they do not fill a step. `short`: shared evenly, so that every
            sample comes exactly once; a rank may get none at that step, and then has a batch less. `drop`: left out in this
            epoch. `pad`: filled up with the bucket's first samples of this epoch. The last two give all ranks equally many
            full batches, which DDP needs.
    """

    buckets: Sequence[BucketLayout]
    batch_size: int
    world_size: int = 1
    seed: int = 0
    order: Order = "stream"
    buffer: int = 1000
    tail: Tail = "short"

    @property
    def global_batch(self) -> int:
        """Samples per step, over all ranks."""
        return self.batch_size * self.world_size

    @property
    def steps(self) -> int:
        """Steps per epoch: positions that a rank may be at, whether or not it has samples there."""
        return sum(-(-usable // self.global_batch) for usable in self._usable())

    def batches(self, rank: int) -> int:
        """Batches per epoch of one rank: fewer than steps where `short` leaves it some without samples."""
        full = sum(usable // self.global_batch for usable in self._usable())
        rests = [usable % self.global_batch for usable in self._usable()]
        sizes = [self.global_batch if self.tail == "pad" and rest else rest for rest in rests]
        return full + sum(stop > start for start, stop in (self._share(size, rank) for size in sizes))

    def pieces(self, epoch: int, rank: int, first_step: int = 0) -> Iterator[Piece]:
        """A rank's batches of one epoch from a step on, in order."""
        orders = [self._samples_in_order(bucket, epoch) for bucket in self.buckets]
        for step, (bucket, start) in enumerate(self._drawn(epoch)):
            if step < first_step:
                continue
            count = len(orders[bucket])
            size = self.global_batch if self.tail == "pad" else min(self.global_batch, count - start)
            first, stop = self._share(size, rank)
            if stop > first:
                # Past the end only where a tail is filled up.
                yield Piece(epoch, step, bucket, orders[bucket][np.arange(start + first, start + stop) % count])

    def _usable(self) -> list[int]:
        """Samples of each bucket that an epoch delivers at least once."""
        counts = [len(bucket.shards) for bucket in self.buckets]
        return [count - count % self.global_batch for count in counts] if self.tail == "drop" else counts

    def _share(self, size: int, rank: int) -> tuple[int, int]:
        """A rank's part of a step of `size` samples: `batch_size` of a full one, one more or less of a short one."""
        return rank * size // self.world_size, (rank + 1) * size // self.world_size

    def _drawn(self, epoch: int) -> Iterator[tuple[int, int]]:
        """Bucket of each step, and how many of its samples went before."""
        chance = random.Random(f"{self.seed}/{epoch}")
        left = self._usable()
        taken = [0] * len(left)
        while total := sum(left):
            point = int(chance.random() * total)
            bucket = next(n for n, end in enumerate(accumulate(left)) if point < end)
            yield bucket, taken[bucket]
            took = min(self.global_batch, left[bucket])
            taken[bucket] += took
            left[bucket] -= took

    def _samples_in_order(self, bucket: BucketLayout, epoch: int) -> np.ndarray:
        """The bucket's row numbers in this epoch's order; other buckets, present or not, have no part in it."""
        count = len(bucket.shards)
        bits = np.random.PCG64([self.seed, epoch, zlib.crc32(bucket.name.encode())])
        noise = _uniform(bits, count)
        if self.order == "permutation":
            return np.argsort(noise, kind="stable")
        _, number = np.unique(bucket.shards, return_inverse=True)
        places = _uniform(bits, count and int(number.max()) + 1)
        stream = np.argsort(places[number], kind="stable")
        return stream[np.argsort(np.arange(count) + self.buffer * noise, kind="stable")]


def _uniform(bits: np.random.PCG64, count: int) -> np.ndarray:
    """Numbers in [0, 1) from raw bits: those NumPy keeps the same in every version, unlike what `Generator` makes of them."""
    return (bits.random_raw(count) >> np.uint64(11)) * 2.0**-53
