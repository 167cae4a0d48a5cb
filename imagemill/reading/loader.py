"""Iteration over a `ShardDataset` as torch's tools expect it: an iterable dataset with a state, and a DataLoader.

    BatchPipeline   for any DataLoader, and for torchdata's StatefulDataLoader, which keeps the state of each worker
    ShardLoader     for plain loops, Accelerate and Lightning; the position is kept in the dataset

Importing this module imports torch, which is why `ShardDataset` imports it only when a loader starts.
"""

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any, Protocol

from torch.utils.data import DataLoader, get_worker_info  # noqa: TID253
from webdataset.pipeline import DataPipeline  # noqa: TID253
from webdataset.utils import pytorch_worker_info  # noqa: TID253

from imagemill.reading.batches import Batch, BatchReader
from imagemill.reading.plan import Piece
from imagemill.reading.published import exit_with_parent


class BatchSource(Protocol):
    """The parts of `ShardDataset` that loaders use."""

    _reader: BatchReader

    def __len__(self) -> int: ...
    def _pieces(self) -> Iterator[Piece]: ...
    def _followed(self, batches: Any) -> Iterator[Batch]: ...

    def pipeline(self) -> "BatchPipeline":
        """Return the batches from the position on."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return the position."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at a position."""


class BatchPipeline(DataPipeline):
    """The batches of one rank, as an iterable dataset; each worker process delivers its share.

    `state_dict` and `load_state_dict` are for torchdata's StatefulDataLoader, which calls them in each worker. A state
    counts the batches that this worker has delivered since the iteration started, so that loading it reads no earlier
    sample. Stages added by `.compose(…)` must deliver one item for each batch.
    """

    def __init__(self, dataset: BatchSource) -> None:
        # Shared by the copies that `compose` makes.
        self._share = _WorkerShare(dataset)
        super().__init__(self._share, self._share.read)

    def state_dict(self) -> dict[str, Any]:
        """Return the start of the iteration as `ShardDataset.state_dict` does, and this worker's batches since then."""
        return self._share.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next iteration continue at the position of `state_dict`; raise as `ShardDataset.load_state_dict`."""
        self._share.load_state_dict(state)


class _WorkerShare:
    """The pieces of this worker process, counted."""

    def __init__(self, dataset: BatchSource) -> None:
        self._dataset = dataset
        self._start: dict[str, Any] | None = None
        self._taken = 0

    def __call__(self) -> Iterator[Piece]:
        """Yield the pieces from the dataset's position on, or from a loaded state."""
        _, _, worker, workers = pytorch_worker_info()
        if get_worker_info() is not None:
            exit_with_parent()
        taken = self._taken if self._start is None else 0
        self._start, self._taken = self._dataset.state_dict(), taken
        for piece in islice(self._dataset._pieces(), worker + taken * workers, None, workers):
            self._taken += 1
            yield piece

    def read(self, pieces: Iterator[Piece]) -> Iterator[Batch]:
        """Read pieces with the reader of the version that the dataset has now: a loaded state may have chosen another one."""
        yield from self._dataset._reader(pieces)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of `BatchPipeline`."""
        return {**(self._start or self._dataset.state_dict()), "taken": self._taken}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state of `BatchPipeline`."""
        self._dataset.load_state_dict(state)
        self._start, self._taken = None, state["taken"]


class ShardLoader(DataLoader):
    """A DataLoader of batches prefetched by worker processes, in the plan's order; the position is kept in the dataset.

    `state_dict` and `load_state_dict` are those of the dataset, so that Lightning saves and restores the position.

    After `accelerator.prepare(loader)` the tensors of a batch are on the accelerator's device. Accelerate does not
    divide the batches among the processes, because the plan already does.
    """

    # Accelerate's mark of a loader that it must not wrap. `prepare` then sets it on the instance.
    _is_accelerate_prepared = True

    def __init__(self, shards: BatchSource, num_workers: int, options: Mapping[str, Any]) -> None:
        self._shards = shards
        self._all_options: dict[str, Any] = {
            "dataset": shards.pipeline(), "batch_size": None, "collate_fn": _unchanged, "num_workers": num_workers,
            **options,
        }  # fmt: skip
        super().__init__(**self._all_options)

    def __len__(self) -> int:
        """Number of batches of this rank in a whole epoch."""
        return len(self._shards)

    def __iter__(self) -> Iterator[Batch]:  # type: ignore[override]  # torch names its private class of iterators
        # A new loader for each iteration, whose workers start at the present position.
        batches = DataLoader(**self._all_options)
        if "_is_accelerate_prepared" in vars(self):
            batches = _on_accelerators_device(batches)
        return self._shards._followed(batches)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the dataset."""
        return self._shards.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state of the dataset; raises as `ShardDataset.load_state_dict`."""
        self._shards.load_state_dict(state)


def _on_accelerators_device(batches: DataLoader) -> DataLoader:
    """Return Accelerate's loader, which also reports the end of an epoch to gradient accumulation."""
    import accelerate  # type: ignore[import-not-found]  # not a dependency; a prepared loader proves that it is installed

    return accelerate.data_loader.prepare_data_loader(
        batches,
        accelerate.PartialState().device,
        num_processes=1,
        process_index=0,
        put_on_device=True,
        dispatch_batches=False,
    )


def _unchanged(batch: Batch) -> Batch:
    """Return the batch; torch's own function would visit every number of every record."""
    return batch
