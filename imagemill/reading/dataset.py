"""An endless or epoch-wise source of batches from shards, with a position that can be saved and restored.

    plan ──> pieces of this rank ──> pieces of this worker ──> BatchReader ──> batches     a webdataset.DataPipeline

This module composes the stages and handles ranks, position and state. Each stage is in its own module.

Reference: the names `state_dict` and `load_state_dict` are torch's.
Spec: docs/spec/shards.md#updating-a-set
"""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import numpy as np

from imagemill.errors import WrongUsage
from imagemill.pipeline.shards.shard_manifest import specs_of_set
from imagemill.pipeline.shards.shard_sets import MASK_MEMBER
from imagemill.pipeline.shards.shard_statistics import POOR_USE, is_poor, use_line
from imagemill.reading.batches import Batch, BatchReader, Captions, Crop
from imagemill.reading.latents import Fit
from imagemill.reading.plan import BUFFER, BucketLayout, Order, Piece, Plan, Tail
from imagemill.reading.published import Version
from imagemill.reading.samples import short_name
from imagemill.reading.sets import Bucket, Places, SetIds, Source, empty_caption, open_sources, parts_of, sources_of

if TYPE_CHECKING:
    from imagemill.reading.loader import BatchPipeline, ShardLoader

# Options of torch's DataLoader that the plan determines, with the alternative to each.
_DECIDED = {
    "batch_size": "give batch_size to ShardDataset",
    "batch_sampler": "give batch_size to ShardDataset",
    "sampler": "choose order and seed of ShardDataset",
    "shuffle": "choose order and seed of ShardDataset",
    "drop_last": 'choose tail="drop" of ShardDataset',
    "collate_fn": "change each batch as it comes, or dataset.pipeline().compose(webdataset.map(…))",
    "in_order": "leave it out: the position counts batches in the plan's order",
}


# Options that a state names only if they have other values, so that states of earlier releases stay equal.
_DEFAULTS = {"repeats": False, "captions": "first"}


class ShardDataset:
    """Batches of one bucket each, over every live sample of a set.

    A batch is a dict:

        bucket    as `1024x1024`             epoch, step   its position in the plan
        image_id  list of ids                caption, json lists of texts and of whole records
        captions  list of lists of all texts repeats       list of how often an epoch draws each, by its record
        vae       float16 (n, 16, h, w); float32 with `normalized`; with latents="as_stored" a list of tensors,
                  except in a set made with `vae_latents: {size: bucket}`, where all have one size
        t5h       float16 (n, 77, 1024)      t5m           uint8 (n, 77), 1 for tokens of the caption
        dinov3    float32 (n, 1024), if requested

    Every iteration starts at the position that the last batch or `load_state_dict` has set. After an epoch this is the
    start of the next epoch.

    Args:
        places: `shards/`, one bucket folder in it, or the URL of a published version; or a list of them, which are read as one.
        batch_size: per rank.
        members: to decode: `json` (which adds `caption`, `captions` and `repeats`), `vae`, `t5h`, `t5m`, `dinov3`, and further
            kinds. Without it `json`, `vae`, `t5h` and `t5m`; with captions="random" `json` and `vae`.
        latents: `as_stored`; `crop` or `resize` to the bucket's own size (see `fit_latent`; resizing is approximate).
        crop: position of the window in a larger latent; `random` changes each epoch and is the same for the same seed.
        normalized: apply (z - shift_factor) * scaling_factor of the VAE in the manifest.
        order: see `Plan`. Without it, `permutation`, or `stream` if `buffer` is given or a loaded state has it. Choose
            `stream` for tars on a spinning disk, a network or an object store's mount, where random reads are slow.
        buffer: see `Plan`; default 1000.
        tail: see `Plan`. For DDP choose "pad" or "drop", which give every rank equally many full batches.
        seed: see `Plan`.
        captions: which of several captions of an image is `caption`. `random`: each draw has its own, from the seed; states
            and masks of texts, which are those of the first caption, are not delivered.
        repeats: draw each sample as often as its record says (`inputs.repeats`); otherwise once.
        repeat: continue with the next epoch, without end.
        allow_preview: also read sets of preview models.
        verify: read every tar once on opening and compare its checksum; sizes are always compared.
        rank: default RANK of the environment, else that of torch.distributed if it is initialised, else 0.
        world_size: default WORLD_SIZE of the environment, else that of torch.distributed if it is initialised, else 1.
        object_storage: of a URL: settings as in imagemill.yaml; without them, AWS_ENDPOINT_URL, AWS_REGION and the environment's
            credentials.
        set_id: of a URL: id of each bucket's set, as under `sets` in a state; the current version without it. Of several places:
            a list, see `sources_of`.

    Raises:
        MissingInput: see `sources_of` and `open_sources`.
        ImagemillError: see `open_sources`.
        WrongUsage: for an unknown name or value, or if this rank has no batch.
        ShardsReplaced: while iterating, if another set replaced the one that was opened.
    """

    def __init__(
        self,
        places: Places,
        batch_size: int,
        *,
        members: Sequence[str] | None = None,
        latents: Fit = "as_stored",
        crop: Crop = "center",
        normalized: bool = False,
        order: Order | None = None,
        buffer: int | None = None,
        tail: Tail = "short",
        seed: int = 0,
        captions: Captions = "first",
        repeats: bool = False,
        repeat: bool = False,
        allow_preview: bool = False,
        verify: bool = False,
        rank: int | None = None,
        world_size: int | None = None,
        object_storage: Mapping[str, Any] | None = None,
        set_id: SetIds | None = None,
    ) -> None:
        self._order_given = order is not None or buffer is not None
        order = order or ("permutation" if buffer is None else "stream")
        buffer = BUFFER if buffer is None else buffer
        _check_choices(
            latents=(latents, Fit),
            crop=(crop, Crop),
            order=(order, Order),
            tail=(tail, Tail),
            captions=(captions, Captions),
        )
        self.rank, world_size = _node(rank, world_size)
        _check_numbers(batch_size=(batch_size, 1), buffer=(buffer, 0), seed=(seed, 0))
        self._permitted = {"allow_preview": allow_preview, "verify": verify}
        self._sources = sources_of(places, object_storage, set_id)
        self.buckets = open_sources(self._sources, **self._permitted)
        self.plan = Plan(
            [_layout(bucket, repeats) for bucket in self.buckets], batch_size, world_size, seed, order, buffer, tail
        )
        if not len(self):
            raise WrongUsage(
                f"no batch for rank {self.rank} of {world_size}",
                where=places if isinstance(places, str | Path) else ", ".join(map(str, places)),
                why=f"a step takes {self.plan.global_batch} samples of one bucket; there are {self.samples} in all",
                do='choose tail="pad", a smaller batch or fewer ranks',
            )
        if latents != "as_stored":
            _warn_of_poor_use(self.buckets)
        self._reader = BatchReader.of(
            self.buckets,
            _chosen_members(members, captions, self.buckets),
            latents=latents,
            crop=crop,
            normalized=normalized,
            seed=seed,
            captions=captions,
            repeated=repeats,
        )
        self._repeat, self._repeats, self._captions = repeat, repeats, captions
        self._samples_digest = _digest_of(self.buckets)
        self._epoch, self._step = 0, 0

    def __len__(self) -> int:
        """Number of batches of this rank in a whole epoch."""
        return self.plan.batches(self.rank)

    @property
    def samples(self) -> int:
        """Number of live samples in the set."""
        return sum(len(bucket.lines) for bucket in self.buckets)

    # ---- iterating

    def __iter__(self) -> Iterator[Batch]:
        """Iterate over batches in this process; scripts should use `loader`, which prefetches in worker processes."""
        return self._followed(self.pipeline())

    def empty_caption(self, kind: str) -> np.ndarray:
        """Return the state of the empty caption, see `ShardSet.empty_caption`."""
        return empty_caption(self.buckets, kind)

    def loader(self, num_workers: int = 0, **options: Any) -> "ShardLoader":
        """Return a DataLoader over this dataset.

        Args:
            num_workers: number of worker processes; those of a URL are started by a fork server, so a script needs
                `if __name__ == "__main__":`.
            options: options of torch's DataLoader (`pin_memory`, `prefetch_factor`, …).

        Raises:
            WrongUsage: for an option that the dataset determines (`batch_size`, `shuffle`, …).
        """
        _check_numbers(num_workers=(num_workers, 0))
        if decided := [name for name in options if name in _DECIDED]:
            raise WrongUsage(f"loader(): {decided[0]} is no option", why="the plan decides it", do=_DECIDED[decided[0]])
        from imagemill.reading.loader import ShardLoader

        if num_workers and any(isinstance(source, Version) for source in self._sources):
            # Requests in a forked process would never end, because this one has made some.
            options.setdefault("multiprocessing_context", "forkserver")
        return ShardLoader(self, num_workers, options)

    def __getitem__(self, _: object) -> Batch:
        """Raise WrongUsage, since samples are not read by number.

        A plain `torch.utils.data.DataLoader(dataset)` calls this. In its workers the position would be lost silently.
        """
        raise WrongUsage(
            "a ShardDataset is read in its plan's order, not by number",
            why="only its own loader knows, in the trainer's process, which batches of its workers have been delivered",
            do="for batch in dataset.loader(num_workers=4); if it must be a DataLoader: DataLoader(dataset.pipeline(), "
            "batch_size=None), see `pipeline`; one sample: ShardSet.open(folder)[image_id]",
        )

    def pipeline(self) -> "BatchPipeline":
        """Return a `webdataset.DataPipeline` of batches from the position on, to be extended by `.compose(…)`.

        A DataLoader over it (batch_size=None) yields the same batches in the same order with any number of workers. To
        save the position, use torchdata's StatefulDataLoader, or call `delivered` with each batch, because a worker's
        copy of the dataset cannot do this. A StatefulDataLoader does not move this dataset: choose `repeat`, or call
        `set_epoch` before each epoch.
        """
        from imagemill.reading.loader import BatchPipeline

        return BatchPipeline(self)

    def _pieces(self) -> Iterator[Piece]:
        plan, epoch, step = self.plan, self._epoch, self._step
        yield from plan.pieces(epoch, self.rank, step)
        while self._repeat:
            epoch += 1
            yield from plan.pieces(epoch, self.rank)

    def _followed(self, batches: Any) -> Iterator[Batch]:
        epoch = self._epoch
        for batch in batches:
            self.delivered(batch)
            yield batch
        self.set_epoch(epoch + 1)

    # ---- position

    def set_epoch(self, epoch: int) -> None:
        """Set the position to the start of an epoch; done automatically at the end of an epoch."""
        _check_numbers(epoch=(epoch, 0))
        self._epoch, self._step = epoch, 0

    def delivered(self, batch: Batch) -> None:
        """Set the position after a batch; `loader` and plain iteration do this themselves."""
        over = batch["step"] + 1 == self.plan.steps
        self._epoch, self._step = (batch["epoch"] + 1, 0) if over else (batch["epoch"], batch["step"] + 1)

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last delivered batch, and the plan it is valid for, as plain numbers and texts.

        Batches prefetched by workers are not counted, so that none are lost. The state is equal on all ranks at the
        same step. It may be loaded with another number of workers, or of ranks if world_size × batch_size is the same; that of
        a folder for the URL where it was published, and the reverse. That of a URL also names the ids of its sets; that of
        several places those of each, in the order of the places.
        """
        return {
            "epoch": self._epoch,
            "step": self._step,
            **self._state_of(self.plan, self._samples_digest),
            **_sets_of(self._sources),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue exactly at the position of `state_dict`, without reading earlier samples.

        If neither `order` nor `buffer` was given, the dataset continues in the order of the state. Earlier releases read
        in the order `stream` by default. Of a URL, the version of the state is opened if it is still there.

        Raises:
            WrongUsage: if the state belongs to another plan or another set of samples.
        """
        state = {"order": "stream", "buffer": BUFFER, **_DEFAULTS, **state}
        sources, buckets, digest, plan = self._sources, self.buckets, self._samples_digest, self.plan
        pinned = _pinned(sources, state.get("sets"))
        if pinned != sources:
            sources = pinned
            buckets = open_sources(sources, **self._permitted)
            digest = _digest_of(buckets)
            plan = replace(plan, buckets=[_layout(bucket, self._repeats) for bucket in buckets])
        if not self._order_given and state["order"] in get_args(Order):
            plan = replace(plan, order=state["order"], buffer=state["buffer"] if state["order"] == "stream" else BUFFER)
        now = {**_DEFAULTS, **self._state_of(plan, digest)}
        if differing := [name for name in now if state.get(name) != now[name]]:
            name = differing[0]
            raise WrongUsage(
                f"this state belongs to another plan: {name} was {state.get(name)}, now {now[name]}",
                why="a position means the same batch only in the same order of the same samples",
                do="restore what differs, or begin the next epoch with set_epoch",
            )
        reader = self._reader if buckets is self.buckets else self._reader.over(buckets)
        # Nothing can fail from here on, so a refused state changes nothing.
        self._sources, self.buckets, self._samples_digest = sources, buckets, digest
        self.plan, self._reader = plan, reader
        self._epoch, self._step = state["epoch"], state["step"]

    def _state_of(self, plan: Plan, digest: Mapping[str, str]) -> dict[str, Any]:
        options = {"repeats": self._repeats, "captions": self._captions}
        return {
            "seed": plan.seed,
            "order": plan.order,
            "buffer": plan.buffer if plan.order == "stream" else None,
            "tail": plan.tail,
            "global_batch": plan.global_batch,
            "samples": digest,
            **{name: value for name, value in options.items() if value != _DEFAULTS[name]},
        }


def _sets_of(sources: Sequence[Source]) -> dict[str, Any]:
    """Return the part of a state with the ids of published sets, if there are any."""
    sets = [dict(source.sets) if isinstance(source, Version) else None for source in sources]
    return {"sets": sets[0] if len(sets) == 1 else sets} if any(sets) else {}


def _pinned(sources: tuple[Source, ...], sets: Any) -> tuple[Source, ...]:
    """Return the sources with the published sets of a state, as far as it names some."""
    named = sets if isinstance(sets, list) else [sets]
    if len(named) != len(sources):  # of other places, as their digests will tell
        return sources
    return tuple(
        source._replace(sets=ids) if isinstance(source, Version) and ids else source
        for source, ids in zip(sources, named, strict=True)
    )


def _digest_of(buckets: Sequence[Bucket]) -> dict[str, str]:
    return {bucket.name: bucket.digest() for bucket in buckets}


def _layout(bucket: Bucket, repeats: bool) -> BucketLayout:
    shards: list[int] = []
    first = 0
    for part in bucket.parts:  # tars of several places have equal names
        numbers = {shard.name: number for number, shard in enumerate(part.manifest.shards, first)}
        shards += [numbers[line.shard] for line in part.lines]
        first += len(numbers)
    return BucketLayout(
        bucket.name,
        np.array(shards, np.int64),
        np.array([line.repeats or 1 for line in bucket.lines], np.int64) if repeats else None,
    )


def _chosen_members(members: Sequence[str] | None, captions: Captions, buckets: Sequence[Bucket]) -> Sequence[str]:
    """Return the members to decode. Raises WrongUsage for those that do not go with random captions."""
    if captions == "first":
        return ("json", "vae", "t5h", "t5m") if members is None else members
    if members is None:
        return "json", "vae"
    specs = {spec for bucket in buckets for spec in specs_of_set(bucket.manifest) if spec.source == "caption"}
    of_texts = {short_name(suffix) for suffix in (MASK_MEMBER, *(name for spec in specs for name in spec.members))}
    if wrong := [name for name in members if name in of_texts]:
        raise WrongUsage(
            f'captions="random" with the member {wrong[0]!r}',
            why="it is made from the first caption alone",
            do=f'leave {wrong[0]!r} out and encode the captions while training, or choose captions="first"',
        )
    if "json" not in members:
        raise WrongUsage(
            "no member 'json'", why="it contains the captions", do='add "json", or choose captions="first"'
        )
    return members


def _node(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """Return rank and world size, determined here because a worker may lack its parent's process group."""
    if rank is None or world_size is None:
        from webdataset.utils import pytorch_worker_info

        found_rank, found_size, _, _ = pytorch_worker_info()
        rank, world_size = found_rank if rank is None else rank, found_size if world_size is None else world_size
    if not 0 <= rank < world_size:
        raise WrongUsage(f"rank {rank} of {world_size}", do="give both: rank from 0 to world_size - 1")
    return rank, world_size


def _warn_of_poor_use(buckets: Sequence[Bucket]) -> None:
    """Warn if latents of the images' own size serve training poorly at the bucket's size."""
    for bucket in parts_of(buckets):
        if bucket.manifest.crop and is_poor(bucket.manifest.crop):
            warnings.warn(f"{bucket.folder.name}: {use_line(bucket.manifest.crop)}. {POOR_USE}", stacklevel=3)


def _check_choices(**given: tuple[object, Any]) -> None:
    for name, (value, choices) in given.items():
        if value not in get_args(choices):
            raise WrongUsage(f"unknown {name}={value!r}", do=f"choose from {', '.join(get_args(choices))}")


def _check_numbers(**given: tuple[object, int]) -> None:
    for name, (value, least) in given.items():
        if type(value) is not int or value < least:
            raise WrongUsage(f"{name}={value!r}", do=f"give an int of at least {least}")
