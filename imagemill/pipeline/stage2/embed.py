"""The stream that turns images into npy files: decode ahead, infer, write behind. Memory does not grow with the image count.

    jobs ──decode threads──> prepared items ─groups─> device thread ─write threads─> staged files ─publish─> final names
              (open, hash,          (equal shapes,         (model)          (.tmp-…, on disk)      (ledger row,
               check what is there)  pixel budget)                                                  then rename)

Decoding, the model, writing and publishing run at the same time. Besides the model and its working memory for one batch, or for
two where the device works by itself, memory holds at most
    20 bytes x `decode_ahead_pixels`: images while they are opened and prepared (1.3 GB by default); one image is always allowed
    3 bytes x 4 x `batch_pixels`: images that wait for others of their shape (50 MB by default), and the last one to arrive
    3 bytes x 3 x `batch_pixels`: batches that are ready, and the one that the model computes (38 MB by default)
    64 MiB of arrays waiting to be written, and those of two batches
    64 MiB in each decode thread, freed and kept for its next arrays (imagemill/pipeline/malloc_tuning.py).

Jobs are chosen in plan.py; publish.py does final names and the ledger, io_managers/npy.py Dagster events. Models: encoders/.
"""

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, repeat
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NoReturn

import msgspec
import numpy as np

from imagemill.config import DECODE_AHEAD_PIXELS
from imagemill.domain.embedding_specs import EmbeddingSpec
from imagemill.domain.encoder_settings import PREVIEW, EncoderSettings
from imagemill.errors import (
    FULL_DISK,
    DiskFull,
    ImagemillError,
    ModelUnusable,
    NonFiniteEmbedding,
    is_disk_full,
)
from imagemill.formats.npy import NpyStore, npy_header
from imagemill.fs.atomic import write_bytes_atomic
from imagemill.fs.folders import SourceFolder
from imagemill.fs.owners import act_for
from imagemill.models import Encoder, Prepared
from imagemill.pipeline.batch_inference import (
    free_device_memory,
    infer_in_parts,
    is_out_of_memory,
    use_intraop_threads,
)
from imagemill.pipeline.batch_size import BatchSize
from imagemill.pipeline.device_thread import DeviceThread
from imagemill.pipeline.malloc_tuning import reuse_freed_memory
from imagemill.pipeline.prefetch import bounded_map
from imagemill.pipeline.stage2.examine import (
    EmbedRow,
    Examiner,
    Needed,
    failed_row,
    read_source,
    row_of,
    row_of_error,
    stage_array,
    wanted_input,
)
from imagemill.pipeline.stage2.image_metadata import inspect_image, size_or_none
from imagemill.pipeline.stage2.plan import EmbeddingPlan, Job
from imagemill.pipeline.stage2.reuse import Donors
from imagemill.pipeline.turns import Turns
from imagemill.pipeline.write_behind import WriteBehind
from imagemill.store.inputs import PixelRule
from imagemill.store.ledger import SourceRow
from imagemill.store.provenance import ModelIdentity, RecordedModels, empty_caption_file

# Upper bound on the bytes that a pixel counted against `decode_ahead_pixels` takes while it is decoded, rotated and converted to
# float; three bytes after that.
BYTES_PER_PIXEL_AHEAD = 20

# Most bytes of arrays that wait to be written; the arrays of a single batch may exceed it.
WRITE_BEHIND_BYTES = 64 * 1024 * 1024

# Batches that are ready for the device while it computes one.
READY_BATCHES = 2

_MORE_MEMORY = "free memory on the device, choose another one, or scale the image down, then run imagemill again"

# If the model fails this many images one by one before its first success, it cannot run on this machine. A single failure is not
# enough: an image that the model cannot process, first by name, would stop every run. Failures of earlier runs do not count.
_TRIES = 3


@dataclass(slots=True)
class _Item:
    """A job inside the worker. `source`: None if the image is gone."""

    job: Job
    source: SourceRow | None
    prepared: Prepared
    replaced: str | None


@dataclass(slots=True)
class _Made:
    """An array for a write thread. `calls`, `divided`: what its row reports about its batch."""

    item: _Item
    array: np.ndarray
    calls: int
    divided: int


@dataclass(kw_only=True, eq=False)
class EmbedWorker:
    """A worker that makes files of one kind. Built once per process; the model is loaded when the first file has to be made.

    Args:
        spec: the kind.
        approved: folder of images.
        store: folder of the files; None for a worker whose rows carry the arrays, and whose jobs all need the model.
        recorded_models: models of the existing files; a model other than the recorded one is refused before any call.
        preview_root: for the encoder.
        settings: for the encoder.
        threads: for the encoder.
        decode_threads: threads that open and prepare images.
        write_threads: most threads that write files at a time.
        decode_ahead_pixels: most pixels of images opened ahead of the model.
        empty_captions: folder of states of the empty caption; None keeps none. Without a store, a row carries the state.
        extract_only: take vectors out of Stage 1 records and load no model.
        regenerate: make every file again, even if a valid one exists.
        owner: the process that publishes the files, if it is another one.
        pixels: how pixels are read, and the input that files must have.
        donors: files that may be linked instead of making equal ones.
    """

    spec: EmbeddingSpec
    approved: SourceFolder
    store: NpyStore | None
    recorded_models: RecordedModels
    preview_root: Path
    settings: EncoderSettings
    threads: int
    decode_threads: int = 2
    write_threads: int = 8
    decode_ahead_pixels: int = DECODE_AHEAD_PIXELS
    empty_captions: Path | None = None
    extract_only: bool = False
    regenerate: bool = False
    owner: str | None = None
    pixels: PixelRule = field(default_factory=PixelRule)
    donors: Donors = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._examiner = self.store and Examiner(
            spec=self.spec,
            approved=self.approved,
            store=self.store,
            preview=self.settings.model == PREVIEW,
            pixels=self.pixels,
            donors=self.donors,
            extract_only=self.extract_only,
            regenerate=self.regenerate,
        )
        self._encoder: Encoder | None = None
        self._identity: ModelIdentity | None = None
        self._loading, self._write_turns = threading.Lock(), Turns()
        self._succeeded, self._failures, self._disk_full = False, 0, False
        # Most items of a group that fit into memory, where a larger batch did not.
        self._fits: dict[Any, int] = {}
        self._size = BatchSize(self.settings.batch_size)
        self._ended = 0.0  # when the device finished its last batch
        self._calls = 0  # that rows have reported
        self._empty_caption: np.ndarray | None = None  # for the next row, without a store

    # ---- the stream

    def stream(self, jobs: Iterable[Job]) -> Iterator[EmbedRow]:
        """Yield one row per job, in any order. On interrupt, yield the rows already begun, then re-raise.

        The first of these may be the row that was yielded last, because an interrupt can arrive before the caller has stored it.
        """
        reuse_freed_memory()
        if self.owner:
            act_for(self.owner)
        if self.store:
            self.store.folder.mkdir(parents=True, exist_ok=True)
        # From the threads: rows of written files, None for a batch that the device has finished, or an error. They stay here
        # until they have been used, because an interrupt can lose what a queue has just returned. The queue wakes the stream.
        self._arrived: deque[deque[EmbedRow] | BaseException | None] = deque()
        self._wakes: SimpleQueue[None] = SimpleQueue()
        with (
            ThreadPoolExecutor(
                self.decode_threads, "decode", initializer=use_intraop_threads, initargs=(1,)
            ) as decoders,
            ThreadPoolExecutor(self.write_threads, "write") as writers,
            DeviceThread(self._launch, self._arrive) as device,
        ):
            self._behind = WriteBehind(writers, self.write_threads, self._write_some, WRITE_BEHIND_BYTES)
            try:
                yield from self._arriving(device, self._batches(self._decode_ahead(decoders, self._in_order(jobs))))
            except GeneratorExit:
                self._behind.close()
                raise
            except BaseException:
                decoders.shutdown(wait=False, cancel_futures=True)
                self._behind.close()
                device.stop()
                writers.shutdown()
                yield from self._finished()
                raise

    def _arriving(
        self, device: DeviceThread[list[_Item]], batches: Iterable[list[_Item] | EmbedRow]
    ) -> Iterator[EmbedRow]:
        """Pass batches to the device, and yield rows as their files are written."""
        running = pending = 0  # batches at the device, and rows that have not arrived
        for batch in chain(batches, [None]):
            self._stop_where_full()
            if isinstance(batch, EmbedRow):
                self._arrive([batch])
                pending += 1
            elif batch is not None:
                device.put(batch)
                running, pending = running + 1, pending + len(batch)
            # Until the model has succeeded once, the next batch depends on the result.
            most = READY_BATCHES if batch is not None and self._succeeded else 0
            while running > most or (batch is None and pending) or self._arrived:
                self._wakes.get()
                arrived = self._arrived[0]
                if isinstance(arrived, BaseException):
                    raise arrived
                if arrived is None:
                    running -= 1
                else:
                    pending -= len(arrived)
                    while arrived:
                        yield arrived[0]
                        arrived.popleft()
                self._arrived.popleft()
        self._stop_where_full()

    def _arrive(self, arrived: list[EmbedRow] | BaseException | None) -> None:
        self._arrived.append(deque(arrived) if isinstance(arrived, list) else arrived)
        self._wakes.put(None)

    def _finished(self) -> Iterator[EmbedRow]:
        """Yield the rows that an interrupt left behind, of which the first may have been yielded."""
        for arrived in self._arrived:
            if isinstance(arrived, deque):
                yield from arrived

    @property
    def batch_size(self) -> int:
        """Most items of the next model call."""
        return self._size.size

    def close(self) -> None:
        """Close the model if it was loaded."""
        if self._encoder is not None:
            self._encoder.close()
            self._encoder = None

    def encoder(self) -> Encoder:
        """Return the model, loaded on first use. Raises if it is refused; its rows carry its identity, recorded on publishing."""
        with self._loading:
            if self._encoder is None:
                self._encoder = self._load()
            return self._encoder

    def _load(self) -> Encoder:
        given = {"spec": self.spec, "threads": self.threads, "preview_root": self.preview_root}
        try:
            encoder_class: type[Encoder] = self.spec.encoder_class()
            identity = encoder_class.identify(self.settings, **given)
            self.recorded_models.check(identity)
            self._identity = self.recorded_models.in_force(identity)
            self._size = self._batch_size(identity.device)
            self._note_size()
            return encoder_class.load(self.settings, **given)
        except ImagemillError:
            raise
        except Exception as error:  # any error of a library: the cause is the model, not an image
            raise ModelUnusable(
                f"{self.spec.kind}: {self.settings.model} cannot be loaded: {type(error).__name__}: {error}",
                do="check model, device and dtype in imagemill.yaml",
            ) from error

    def _batch_size(self, device: str) -> BatchSize:
        """Return the size of batches on a device. One that was found for another type of device is not used."""
        recorded, on_cpu = self.recorded_models.recorded, device == "cpu"
        known = recorded.batch_size if recorded and (recorded.device == "cpu") == on_cpu else None
        return BatchSize(self.settings.batch_size, known, fixed=on_cpu)

    def _note_size(self) -> None:
        """Let the next rows carry the size of batches once it is final."""
        if self._identity and self._size.settled and self._identity.batch_size is None:
            self._identity = msgspec.structs.replace(self._identity, batch_size=self._size.size)

    def _in_order(self, jobs: Iterable[Job]) -> Iterable[Job]:
        """Sort captions by length and text: full batches, and few equal texts are computed twice."""
        if self.spec.source == "pixels":
            return jobs
        return sorted(jobs, key=lambda job: (len(job.caption or ""), job.caption or ""))

    # ---- decode threads

    def _decode_ahead(self, pool: ThreadPoolExecutor, jobs: Iterable[Job]) -> Iterator[_Item | EmbedRow]:
        """Run `_prepare` on threads, bounded by `decode_ahead_pixels` and by little more than one batch of jobs."""
        return bounded_map(
            pool,
            self._prepare,
            jobs,
            weigh=self._known_pixels,
            measure=self._measured_pixels,
            keeps=lambda made: made.prepared.pixels if isinstance(made, _Item) else 0,
            most=lambda: (1 + READY_BATCHES) * self._size.size + 2 * self.decode_threads,
            budget=self.decode_ahead_pixels,
            threads=self.decode_threads,
        )

    def _known_pixels(self, job: Job) -> int | None:
        """Return the pixels of the image that this job decodes: 0 if it decodes none, None if the size is not known yet."""
        if job.facts:
            return 0 if self.spec.source == "caption" else job.facts.height * job.facts.width
        if job.size:
            return math.prod(job.size)
        return None if job.stat else 0

    def _measured_pixels(self, job: Job) -> int:
        return math.prod(size_or_none(self.approved, job.file_name) or (0,))

    def _prepare(self, job: Job) -> _Item | EmbedRow:
        try:
            if self._examiner is None:
                return self._prepared(Needed(job, *read_source(self.spec, self.approved, job, self.pixels), None))
            needed = self._examiner.examine(job)
            return needed if isinstance(needed, EmbedRow) else self._prepared(needed)
        except Exception as error:
            return row_of_error(job, error)

    def _prepared(self, needed: Needed) -> _Item:
        """Prepare a job for the model, which is loaded first."""
        encoder, job = self.encoder(), needed.job
        if self.spec.source == "caption":
            item: np.ndarray | str = job.caption or ""
        elif needed.pixels is not None:
            item = needed.pixels
        else:
            item = inspect_image(self.approved, job, self.pixels.color)[1]
        use_intraop_threads(1)  # as many threads as cores decode already
        return _Item(job, needed.source, encoder.prepare(item), needed.replaced)

    # ---- groups

    def _batches(self, items: Iterable[_Item | EmbedRow]) -> Iterator[list[_Item] | EmbedRow]:
        """Group items, up to `batch_size` and `batch_pixels`. Batches have one item until the first success, to fail early."""
        waiting: dict[Any, list[_Item]] = {}
        for item in items:
            if isinstance(item, EmbedRow):
                yield item
                continue
            group = waiting.setdefault(item.prepared.group, [])
            group.append(item)
            if not self._succeeded or self._is_full(group):
                yield waiting.pop(item.prepared.group)
            elif self._is_crowded(waiting.values()):
                yield waiting.pop(max(waiting, key=lambda key: len(waiting[key])))
        yield from waiting.values()

    def _is_full(self, group: Sequence[_Item]) -> bool:
        pixels = sum(item.prepared.pixels for item in group)
        next_pixels = pixels + group[-1].prepared.pixels
        most = self._fits.get(group[0].prepared.group, self._size.size)
        return len(group) >= most or next_pixels > self.settings.batch_pixels

    def _is_crowded(self, groups: Iterable[Sequence[_Item]]) -> bool:
        """Return True if so many items wait that the largest group is passed on incomplete."""
        items = [item for group in groups for item in group]
        pixels = sum(item.prepared.pixels for item in items)
        return len(items) >= 4 * self._size.size or pixels >= 4 * self.settings.batch_pixels

    # ---- the model

    def _launch(self, batch: list[_Item]) -> Callable[[], None] | None:
        """Start a batch, on the device thread; return a function that waits for its end if the device works by itself."""
        encoder = self.encoder()
        use_intraop_threads(self.threads)
        most = self._fits.get(batch[0].prepared.group, len(batch))
        launch = getattr(encoder, "launch", None) if getattr(encoder, "overlaps", False) else None
        if launch is None or len(batch) > most:
            for begin in range(
                0, len(batch), most
            ):  # a batch may have been formed before its size was found not to fit
                self._make(batch[begin : begin + most])
            return None
        began = time.monotonic()
        try:
            collect = launch([item.prepared for item in batch])
        except Exception as error:
            collect = partial(_raise, error.with_traceback(None))
        return partial(self._make, batch, collect, began)

    def _make(
        self,
        batch: list[_Item],
        collect: Callable[[], list[np.ndarray]] | None = None,
        began: float = 0.0,
    ) -> None:
        """Encode a batch and pass each array to a writer. A failing batch is halved until the failing items are isolated.

        Args:
            batch: items of one group.
            collect: returns the arrays of a batch that was launched.
            began: when it was launched, by the monotonic clock.
        """
        encoder, group = self.encoder(), batch[0].prepared.group
        divided, noted = False, False

        def half(error: Exception, size: int) -> int:
            nonlocal divided
            if is_out_of_memory(error) and size > 1:
                free_device_memory()
                divided, self._fits[group] = True, (size + 1) // 2
                self._size.does_not_fit(size)
            return (size + 1) // 2

        def encode(part: Sequence[_Item]) -> list[tuple[_Item, np.ndarray]]:
            nonlocal collect
            launched, collect = collect, None
            start = began if launched else time.monotonic()
            arrays = launched() if launched else encoder.encode([item.prepared for item in part])
            # A batch that was launched during the one before it has the device from the end of that one.
            start, self._ended = max(start, self._ended), time.monotonic()
            self._size.note(len(part), self._ended - start)
            self._note_size()
            return list(zip(part, arrays, strict=True))

        for part, made in infer_in_parts(encode, batch, half):
            if isinstance(made, Exception):
                self._arrive([self._model_failure(part[0], made, encoder)])
                continue
            calls, self._calls = encoder.calls - self._calls, encoder.calls
            if not self._succeeded and self.spec.source == "caption":
                self._keep_empty_caption(encoder)
                self._calls = encoder.calls
            self._succeeded = True
            self._submit(made, calls, int(divided and not noted))
            noted = divided

    def _submit(self, made: Sequence[tuple[_Item, np.ndarray]], calls: int, divided: int) -> None:
        """Pass arrays to writers; wait while too many bytes are pending."""
        for item, _ in made:
            item.prepared.payload = None  # free the pixels before the file is written
        counts = chain([(calls, divided)], repeat((0, 0)))
        self._behind.put(
            (_Made(item, array, *counted), array.nbytes) for (item, array), counted in zip(made, counts, strict=False)
        )

    def _keep_empty_caption(self, encoder: Encoder) -> None:
        """Write the state of the empty caption, unless this model's exists. Spec: docs/spec/stage2.md#empty-caption."""
        assert self._identity
        if self.empty_captions is None:
            return
        path = self.empty_captions / empty_caption_file(self.spec.kind, self._identity.key)
        if self.store is None:
            (self._empty_caption,) = encoder.encode([encoder.prepare("")])
        elif not path.exists():
            (state,) = encoder.encode([encoder.prepare("")])
            write_empty_caption(path, state, self._identity)

    def _model_failure(self, item: _Item, error: Exception, encoder: Encoder) -> EmbedRow:
        if is_out_of_memory(error) and self._succeeded:
            detail = f"one image of this size does not fit into the memory of {encoder.identity.device}"
            return failed_row(item.job, "out_of_memory", detail, _MORE_MEMORY)
        self._failures += not item.job.failed
        if not self._succeeded and self._failures >= _TRIES:
            raise ModelUnusable(
                f"{self.spec.kind}: {encoder.identity.model} does not run on {encoder.identity.device}: {error}",
                where=self.approved / item.job.file_name,
                do="choose another device, dtype or batch_size in imagemill.yaml",
            ) from error
        return failed_row(item.job, "non_finite" if isinstance(error, NonFiniteEmbedding) else "model_error", error)

    # ---- write threads

    def _write_some(self, some: Sequence[_Made]) -> None:
        rows: list[EmbedRow] = []
        try:
            with self._write_turns.turn(len(some)):
                rows.extend(map(self._write, some))
        except BaseException as error:
            self._arrive(error)
        self._arrive(rows)

    def _write(self, made: _Made) -> EmbedRow:
        item, array = made.item, made.array
        size = (item.source.height, item.source.width) if item.source else (0, 0)
        expected = self.spec.layout(*size)
        if (array.shape, array.dtype) != expected:
            return failed_row(item.job, "wrong_shape", ValueError(f"{array.shape} {array.dtype}, expected {expected}"))
        try:
            return self._stage(made)
        except Exception as error:  # disk or memory error: the next run tries this image again
            self._disk_full = self._disk_full or is_disk_full(error)
            return failed_row(item.job, "write_error", error)

    def _stop_where_full(self) -> None:
        """Raise DiskFull once a write found the disk full, instead of running the model for results that cannot be stored."""
        if self._disk_full:
            where = self.store and self.store.folder
            raise DiskFull("the disk is full: No space left on device", where=where, do=FULL_DISK)

    def _stage(self, made: _Made) -> EmbedRow:
        item, array, job = made.item, made.array, made.item.job
        if self.store is None:
            row = EmbedRow(job.image_id, "computed", job.stat, item.source, job.caption_fingerprint, array=array)
            row.empty_caption, self._empty_caption = self._empty_caption, None
        else:
            wanted = wanted_input(self.spec, job, item.source, self.pixels)
            file, staged = stage_array(self.store, job, array, wanted, self._identity)
            row = row_of(job, "computed", item.source, file, staged, item.replaced)
        row.calls, row.divided, row.facts, row.identity = made.calls, made.divided, item.prepared.facts, self._identity
        return row


def write_empty_caption(path: Path, state: np.ndarray, identity: ModelIdentity) -> None:
    """Write the state of the empty caption by a model, unless the file exists."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_bytes_atomic(path, npy_header(state.shape, state.dtype, preview=identity.preview) + state.tobytes())


def _raise(error: Exception) -> NoReturn:
    raise error


@dataclass(frozen=True, slots=True)
class EmbeddingStream:
    """A light handle around one pass's stream, consumed by the npy IO manager.

    Dagster would iterate a bare generator as events. `plan`: everything about images that need no work; `present`: ids of
    the existing images; `work`: amount of work of each job, in pixels or tokens; `workers`: whether other processes stage the
    files for this one, of which some may have been killed.
    """

    store: NpyStore
    plan: EmbeddingPlan
    rows: Iterator[EmbedRow]
    present: Collection[str] = ()
    work: Mapping[str, int] = field(default_factory=dict)
    workers: bool = False
