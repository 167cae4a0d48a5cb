"""Assignment of samples to batches and ranks, computed from counts and seeds alone, without opening a tar.

    epoch ── steps ── one bucket each, drawn with a chance in proportion to the samples it has left
                │
                └── world_size × batch_size samples of that bucket, in its order of this epoch, shared among the ranks

So all ranks have the same bucket at the same step, a position is two numbers (epoch, step), and resuming from a
position needs no reading. The same seed and epoch give the same plan on every machine and with any number of DataLoader
workers.

Everything here is pure. Reading is in batches.py, position and state in dataset.py.
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

# Default of `stream`, in samples. Saved states of earlier releases depend on it.
BUFFER = 1000


@dataclass(frozen=True, slots=True)
class Piece:
    """One batch of one rank.

    `bucket`: its number; `rows`: its samples' numbers in the bucket's index; `first`: how many samples of the step precede them
    on other ranks.
    """

    epoch: int
    step: int
    bucket: int
    rows: np.ndarray
    first: int = 0


@dataclass(frozen=True, slots=True)
class BucketLayout:
    """The data of a bucket that a plan uses.

    Attributes:
        name: of the bucket.
        shards: the number of each sample's tar, in index order.
        repeats: how often each sample is drawn in an epoch; None: once.
    """

    name: str
    shards: np.ndarray
    repeats: np.ndarray | None = None

    @property
    def rows(self) -> np.ndarray:
        """The samples' numbers in the index, each as often as it is drawn."""
        rows = np.arange(len(self.shards))
        return rows if self.repeats is None else np.repeat(rows, self.repeats)

    @property
    def draws(self) -> int:
        """Number of samples drawn in an epoch."""
        return len(self.shards) if self.repeats is None else int(self.repeats.sum())


@dataclass(frozen=True, slots=True)
class Plan:
    """The plan of all epochs of a set.

    Attributes:
        buckets: of the set.
        batch_size: per rank.
        world_size: number of ranks.
        seed: of all random choices.
        order: of the samples of a bucket in an epoch. `permutation`: every order is equally likely, so that each batch
            is a random sample of the bucket; each sample is one read at a random position. `stream`: tars in random
            order; within this stream no sample moves more than `buffer` places, as with a shuffle buffer. Reads are
            almost sequential, but samples of one tar stay together.
        buffer: for `stream`, in samples.
        tail: treatment of a bucket's last samples if they do not fill a step. `short`: divided evenly, so that every
            sample occurs exactly once; a rank may get no samples at that step, and then has one batch less. `drop`:
            left out in this epoch. `pad`: filled up with the bucket's first samples of this epoch. The last two give
            all ranks equally many full batches, which DDP requires.
    """

    buckets: Sequence[BucketLayout]
    batch_size: int
    world_size: int = 1
    seed: int = 0
    order: Order = "permutation"
    buffer: int = BUFFER
    tail: Tail = "short"

    @property
    def global_batch(self) -> int:
        """Samples per step, over all ranks."""
        return self.batch_size * self.world_size

    @property
    def steps(self) -> int:
        """Steps per epoch: positions of a rank, including those without samples for it."""
        return sum(-(-usable // self.global_batch) for usable in self._usable())

    def batches(self, rank: int) -> int:
        """Return the batches per epoch of one rank: fewer than steps if `short` leaves it without samples at some."""
        full = sum(usable // self.global_batch for usable in self._usable())
        rests = [usable % self.global_batch for usable in self._usable()]
        sizes = [self.global_batch if self.tail == "pad" and rest else rest for rest in rests]
        return full + sum(stop > start for start, stop in (self._share(size, rank) for size in sizes))

    def pieces(self, epoch: int, rank: int, first_step: int = 0) -> Iterator[Piece]:
        """Yield a rank's batches of one epoch, in order, starting at a step."""
        orders = [self._samples_in_order(bucket, epoch) for bucket in self.buckets]
        for step, (bucket, start) in enumerate(self._drawn(epoch)):
            if step < first_step:
                continue
            count = len(orders[bucket])
            size = self.global_batch if self.tail == "pad" else min(self.global_batch, count - start)
            first, stop = self._share(size, rank)
            if stop > first:
                # Indices beyond the end occur only if a tail is padded.
                yield Piece(epoch, step, bucket, orders[bucket][np.arange(start + first, start + stop) % count], first)

    def _usable(self) -> list[int]:
        """Return the number of samples of each bucket that occur at least once in an epoch."""
        counts = [bucket.draws for bucket in self.buckets]
        return [count - count % self.global_batch for count in counts] if self.tail == "drop" else counts

    def _share(self, size: int, rank: int) -> tuple[int, int]:
        """Return a rank's range within a step of `size` samples: `batch_size` if full; short shares differ by at most one."""
        return rank * size // self.world_size, (rank + 1) * size // self.world_size

    def _drawn(self, epoch: int) -> Iterator[tuple[int, int]]:
        """Yield the bucket of each step, and the number of its samples in earlier steps."""
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
        """Return the bucket's row numbers in this epoch's order, which does not depend on other buckets."""
        rows = bucket.rows
        count = len(rows)
        bits = np.random.PCG64([self.seed, epoch, zlib.crc32(bucket.name.encode())])
        noise = _uniform(bits, count)
        if self.order == "permutation":
            return rows[np.argsort(noise, kind="stable")]
        _, number = np.unique(bucket.shards[rows], return_inverse=True)
        places = _uniform(bits, count and int(number.max()) + 1)
        stream = np.argsort(places[number], kind="stable")
        return rows[stream[np.argsort(np.arange(count) + self.buffer * noise, kind="stable")]]


def _uniform(bits: np.random.PCG64, count: int) -> np.ndarray:
    """Return numbers in [0, 1) from raw bits, which NumPy keeps the same in every version, unlike the output of `Generator`."""
    return (bits.random_raw(count) >> np.uint64(11)) * 2.0**-53
