"""The reading stage of the pipeline: converts pieces of a plan to batches of tensors.

The samples of a batch are chosen in plan.py; a single sample is read in samples.py.
"""

import random
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from imagemill.domain.embedding_specs import VAE
from imagemill.domain.stage2_records import Record, captions_of, repeats_of
from imagemill.pipeline.shards.shard_sets import IndexLine
from imagemill.reading.latents import Fit, fit_latent, latent_factors
from imagemill.reading.plan import Piece
from imagemill.reading.published import CONNECTIONS, SAMPLES_AHEAD, PublishedTars
from imagemill.reading.samples import Tars, chosen_suffixes, decode_members, read_members, short_name
from imagemill.reading.sets import Bucket, parts_of

Crop = Literal["center", "random"]
Captions = Literal["first", "random"]
Batch = dict[str, Any]

_LATENT = short_name(VAE.member)


@dataclass(frozen=True, slots=True)
class BatchReader:
    """A reader of pieces.

    Attributes:
        buckets: of the set.
        suffixes: of the members to decode, for each bucket.
        latents: see `fit_latent`.
        crop: position of the window in a larger latent.
        factors: scaling and shift of the VAE, for each bucket; None to leave latents as stored.
        seed: of windows and captions.
        captions: which of several captions is `caption` in a batch.
        repeated: whether a sample may be drawn several times in an epoch: each draw then has its own window and caption.
    """

    buckets: Sequence[Bucket]
    suffixes: Sequence[Sequence[str]]
    latents: Fit
    crop: Crop
    factors: Sequence[tuple[float, float]] | None
    seed: int
    captions: Captions = "first"
    repeated: bool = False

    @classmethod
    def of(
        cls,
        buckets: Sequence[Bucket],
        members: Sequence[str],
        *,
        latents: Fit,
        crop: Crop,
        normalized: bool,
        seed: int,
        captions: Captions = "first",
        repeated: bool = False,
    ) -> "BatchReader":
        """Build a reader for the named members.

        Raises WrongUsage for a member that a bucket lacks, ImagemillError if factors are requested but not recorded.
        """
        suffixes = [chosen_suffixes(members, bucket.members, bucket.folder) for bucket in buckets]
        factors = [latent_factors(bucket.manifest, bucket.folder) for bucket in buckets] if normalized else None
        return cls(buckets, suffixes, latents, crop, factors, seed, captions, repeated)

    def over(self, buckets: Sequence[Bucket]) -> "BatchReader":
        """Return a reader of the same members of other buckets. Raises as `of`."""
        members = list(dict.fromkeys(short_name(suffix) for suffixes in self.suffixes for suffix in suffixes))
        return self.of(
            buckets,
            members,
            latents=self.latents,
            crop=self.crop,
            normalized=self.factors is not None,
            seed=self.seed,
            captions=self.captions,
            repeated=self.repeated,
        )

    def __call__(self, pieces: Iterable[Piece]) -> Iterator[Batch]:
        """Read pieces as batches, in order."""
        # One buffer for all batches of an iteration: with new memory for each sample of 700 kB, four fifths of the time
        # went to page faults.
        if any(isinstance(part.tars, PublishedTars) for part in parts_of(self.buckets)):
            yield from self._fetched(pieces)
            return
        buffer = memoryview(b"")
        for piece in pieces:
            lines = self._lines(piece)
            tars = self.buckets[piece.bucket].tars_of(piece.rows)
            if len(buffer) < (needed := sum(line.size for line in lines)):
                buffer = np.empty(needed, np.uint8).data
            yield self._batch(piece, lines, self._read(piece, lines, tars, buffer))

    def _lines(self, piece: Piece) -> list[IndexLine]:
        return [self.buckets[piece.bucket].lines[row] for row in piece.rows]

    def _read(
        self, piece: Piece, lines: Sequence[IndexLine], tars: Sequence[Tars], buffer: memoryview
    ) -> list[dict[str, Any]]:
        """Read the samples of a piece into a buffer."""
        suffixes = self.suffixes[piece.bucket]
        samples = []
        for line, of_line in zip(lines, tars, strict=True):
            samples.append(read_members(of_line, line, suffixes, buffer))
            buffer = buffer[line.size :]
        return samples

    def _fetched(self, pieces: Iterable[Piece]) -> Iterator[Batch]:
        """Read pieces, of which the samples of the next ones are asked for ahead."""
        waiting: deque[tuple[Piece, list[IndexLine], list[Future[dict[str, Any]]]]] = deque()
        pending = 0
        with ThreadPoolExecutor(CONNECTIONS, "samples") as pool:
            try:
                for piece in pieces:
                    lines = self._lines(piece)
                    tars = self.buckets[piece.bucket].tars_of(piece.rows)
                    futures = [pool.submit(self._fetch, piece, *each) for each in zip(lines, tars, strict=True)]
                    waiting.append((piece, lines, futures))
                    pending += len(lines)
                    while pending > SAMPLES_AHEAD + len(waiting[0][1]):
                        pending -= len(waiting[0][1])
                        yield self._taken(*waiting.popleft())
                while waiting:
                    yield self._taken(*waiting.popleft())
            finally:
                for _, _, futures in waiting:
                    for future in futures:
                        future.cancel()

    def _fetch(self, piece: Piece, line: IndexLine, tars: Tars) -> dict[str, Any]:
        suffixes = self.suffixes[piece.bucket]
        if isinstance(tars, PublishedTars):
            return decode_members(tars, line, suffixes, tars.read(line.shard, line.offset, line.size))
        return read_members(tars, line, suffixes, np.empty(line.size, np.uint8).data)

    def _taken(self, piece: Piece, lines: list[IndexLine], futures: list[Future[dict[str, Any]]]) -> Batch:
        return self._batch(piece, lines, [future.result() for future in futures])

    def _batch(self, piece: Piece, lines: Sequence[IndexLine], samples: Sequence[dict[str, Any]]) -> Batch:
        """Return the batch of a piece. Its tensors do not share memory with the samples."""
        bucket, suffixes = self.buckets[piece.bucket], self.suffixes[piece.bucket]
        batch: Batch = {
            "epoch": piece.epoch,
            "step": piece.step,
            "bucket": bucket.name,
            "image_id": [line.image_id for line in lines],
            **self._pictures(bucket, lines),
        }
        for name in map(short_name, suffixes):
            values = [sample[name] for sample in samples]
            if name == "json":
                batch |= {"json": values, **self._texts(values, piece)}
            elif name == _LATENT:
                batch[name] = self._latents(values, piece, batch["image_id"])
            else:
                batch[name] = _stacked(values)
        return batch

    def _texts(self, records: Sequence[Record], piece: Piece) -> Batch:
        """Return `caption`, `captions` and `repeats` of records."""
        captions = [list(captions_of(record)) for record in records]
        if self.captions == "first":
            chosen = [texts[0] for texts in captions]
        else:
            ids = (record["image_id"] for record in records)
            chosen = [
                texts[int(self._chance(piece, f"{image_id}/caption", row).random() * len(texts))]
                for row, (image_id, texts) in enumerate(zip(ids, captions, strict=True))
            ]
        return {"caption": chosen, "captions": captions, "repeats": [repeats_of(record) for record in records]}

    def _chance(self, piece: Piece, what: str, row: int) -> random.Random:
        """Return random numbers for one sample of a batch, independent of the reading process."""
        draw = f"/{piece.step}/{piece.first + row}" if self.repeated else ""
        return random.Random(f"{self.seed}/{piece.epoch}{draw}/{what}")

    @staticmethod
    def _pictures(bucket: Bucket, lines: Sequence[IndexLine]) -> Batch:
        """Return `original_size` and `crop_box` of samples; sets that were written before sizes were recorded have neither."""
        if not all(line.width and line.height for line in lines):
            return {}
        import torch

        boxes = [bucket.crop_box(line.width, line.height) for line in lines]
        sizes = [(line.height, line.width) for line in lines]
        return {"original_size": torch.tensor(sizes), "crop_box": torch.tensor(boxes)}

    def _latents(self, latents: list[np.ndarray], piece: Piece, image_ids: Sequence[str]) -> Any:
        bucket = self.buckets[piece.bucket]
        if self.latents != "as_stored":
            size, where = bucket.latent_size, str(bucket.folder)
            latents = [
                fit_latent(z, size, self.latents, self._corner(piece, image_id, row), where=f"{where}, {image_id!r}")
                for row, (z, image_id) in enumerate(zip(latents, image_ids, strict=True))
            ]
        if self.factors:
            scaling, shift = self.factors[piece.bucket]
            latents = [(z.astype(np.float32) - np.float32(shift)) * np.float32(scaling) for z in latents]
        # Always a list where sizes may differ, also for a batch in which they do not.
        return _each(latents) if self.latents == "as_stored" and not bucket.one_size else _stacked(latents)

    def _corner(self, piece: Piece, image_id: str, row: int) -> tuple[float, float] | None:
        """Return the corner of this sample in this epoch; None for the center."""
        if self.crop == "center":
            return None
        chance = self._chance(piece, image_id, row)
        return chance.random(), chance.random()


def _stacked(values: list[np.ndarray]) -> Any:
    """Return one tensor, or a list of tensors for a kind with arrays of different shapes."""
    import torch
    from torch.utils.data import default_collate, get_worker_info

    if len({value.shape for value in values}) > 1:
        return _each(values)
    if get_worker_info() is None or not all(value.flags.writeable for value in values):
        # Not torch.stack, whose threads took ten times as long on busy cores, and which does not take read-only arrays.
        return torch.from_numpy(np.stack(values))
    # In a worker torch stacks into shared memory, which saves a copy when the batch is sent.
    return default_collate([torch.from_numpy(value) for value in values])


def _each(values: list[np.ndarray]) -> list[Any]:
    """Return one writable tensor per array."""
    import torch

    return [torch.from_numpy(np.array(value)) for value in values]
