"""Measurement of the embedding kinds on this machine or a cluster, with the configured models and the user's own images.

    sample of the images ──> prepare  decode threads alone      images/s
                             model    the model alone           images/s
                             write    write threads alone       images/s
                             stream   all together, with ledger and flushes: images/s, share of its time in the model

The slowest of the first three limits the stream. Files and a ledger of their own are written to a temporary folder beside the
embeddings, on the disk that will hold them, and removed.

On a cluster, the workers, this process and the link are compared, each of which could be the limit.

The stream itself is in pipeline/stage2/embed.py; tables for people are printed by the command `imagemill bench`.
"""

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any, Protocol

import msgspec
import numpy as np

from imagemill.domain.embedding_specs import EmbeddingSpec
from imagemill.domain.inputs import ColorSetting
from imagemill.domain.layout import DataRoot
from imagemill.errors import ImagemillError, MissingInput
from imagemill.formats.images import open_rgb
from imagemill.formats.npy import NpyStore
from imagemill.fs.atomic import sweep_temporaries, temporary_path
from imagemill.fs.durable import flush_files
from imagemill.fs.listing import nearest_existing
from imagemill.fs.swap import remove_folder
from imagemill.inputs.sidecars import read_captions
from imagemill.models import Encoder, Prepared
from imagemill.pipeline.stage2.embed import EmbedWorker
from imagemill.pipeline.stage2.inventory import Inventory
from imagemill.pipeline.stage2.plan import Job
from imagemill.pipeline.stage2.publish import publish
from imagemill.store.ledger import CaptionRow, Ledger
from imagemill.store.provenance import RecordedModels
from imagemill.text.units import counted

# The stages of a kind, in order.
STAGES = ("prepare", "model", "write")


class KindSpeed(msgspec.Struct, frozen=True, kw_only=True):
    """Speed of one kind on this machine.

    Attributes:
        kind: the kind.
        model: name of its model.
        device: device that the model runs on.
        images: number of images measured.
        prepare: images per second of the decode threads alone.
        model_alone: images per second of the model alone.
        write: images per second of the write threads alone, each file flushed to the disk.
        stream: images per second of all together.
        busy: share of the stream's time in which the model works, from 0 to 1.
        limit: the slowest stage.
        remaining: images in `approved/` that have no file of this kind.
        hours: forecast for the remaining images.
        gigabytes: forecast of their files, in 10⁹ bytes.
    """

    kind: str
    model: str
    device: str
    images: int
    prepare: float
    model_alone: float
    write: float
    stream: float
    busy: float
    limit: str
    remaining: int
    hours: float
    gigabytes: float


class ClusterSpeed(msgspec.Struct, frozen=True, kw_only=True):
    """Speed of one kind on a cluster.

    Attributes:
        kind: the kind.
        model: name of its model.
        device: type of the devices.
        images: number of images measured.
        nodes: images per second of the workers of each node, without transport and without the loading of models.
        stream: images per second of all together, from the first image that came back to the last.
        driver_cpu: CPU seconds of this process per image.
        sent: bytes per image to the nodes.
        returned: bytes per image from the nodes.
        link: bytes per second between this computer and a node, in the slower direction; of several nodes, the most.
        ceilings: images per second that the nodes, a core of this computer, and the link permit.
        limit: the lowest of them.
        shares: whether shares would be faster: the limit is not the nodes.
        remaining: images in `approved/` that have no file of this kind.
        hours: forecast for the remaining images, at the lowest ceiling.
        gigabytes: forecast of their files, in 10⁹ bytes.
    """

    kind: str
    model: str
    device: str
    images: int
    nodes: dict[str, float]
    stream: float
    driver_cpu: float
    sent: float
    returned: float
    link: float
    ceilings: dict[str, float]
    limit: str
    shares: bool
    remaining: int
    hours: float
    gigabytes: float


class ClusterPass(Protocol):
    """A pool that runs a pass once on a cluster, and counts (RayPool)."""

    @property
    def work(self) -> Mapping[str, Any]:
        """Work of each node, by its name."""
        ...

    @property
    def sent(self) -> int:
        """Bytes of images that were sent."""
        ...

    @property
    def returned(self) -> int:
        """Bytes of arrays that came back."""
        ...

    def stream(self, keys: Sequence[Any]) -> Iterator[Any]:
        """Yield one row per key."""
        ...


@dataclass(slots=True)
class _Clock:
    """Seconds that calls of a function took together."""

    seconds: float = 0.0

    def around(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function with its time added to the clock."""

        def timed(*given: Any, **named: Any) -> Any:
            began = time.perf_counter()
            try:
                return call(*given, **named)
            finally:
                self.seconds += time.perf_counter() - began

        return timed


def sample_jobs(spec: EmbeddingSpec, inventory: Inventory, known: Mapping[str, CaptionRow], most: int) -> list[Job]:
    """Return jobs for at most `most` images, at equal distances in name order, as if none had a file.

    Raises:
        MissingInput: if there are no images, or for a kind made from captions, none has a caption.
    """
    sources = list(inventory.scan.sources.values())
    captions = known
    if spec.source == "caption":
        read, _ = read_captions(inventory.root.approved, sources, known, inventory.inputs)
        captions = {**known, **{row.image_id: row for row in read}}
        sources = [source for source in sources if source.image_id in captions]
    if not sources:
        lacking = "captions" if spec.source == "caption" else "images"
        raise MissingInput(
            f"no {lacking} to measure {spec.kind} with", where=inventory.root.approved, do="put some there"
        )
    step = max(1.0, len(sources) / most)
    chosen = [sources[int(n * step)] for n in range(min(most, len(sources)))]
    jobs = []
    for source in chosen:
        row = captions.get(source.image_id)
        text = (row.text, row.fingerprint) if row else (None, None)
        jobs.append(Job(source.image_id, source.file_name, source.stat, None, *text, None))
    return jobs


def measure(
    spec: EmbeddingSpec, options: Mapping[str, Any], jobs: Sequence[Job], root: DataRoot, remaining: int
) -> KindSpeed:
    """Measure one kind.

    Args:
        spec: the kind.
        options: arguments of an EmbedWorker of this kind.
        jobs: as of `sample_jobs`.
        root: the data root, for the place of the temporary folder.
        remaining: images that have no file of this kind.

    Raises:
        ModelUnusable: if the model cannot be loaded or does not run here.
        ImagemillError: if no image of the sample can be read.
    """
    with _temporary_store(spec, options, root) as (store, own):
        worker = EmbedWorker(**own)
        try:
            encoder = worker.encoder()
            prepared, prepare = _prepare(spec, jobs, encoder, root, options["decode_threads"], options["pixels"].color)
            arrays, model = _encode(prepared, encoder, worker.batch_size)
            write = _write(arrays, store, options["write_threads"])
            identity = encoder.identity
            stream, busy = _stream(worker, jobs, store, store.folder.parent)
        finally:
            worker.close()
    rates = dict(zip(STAGES, (prepare, model, write), strict=True))
    size = mean(array.nbytes for array in arrays)
    return KindSpeed(
        kind=spec.kind, model=identity.model, device=identity.device, images=len(arrays), prepare=prepare,
        model_alone=model, write=write, stream=stream, busy=busy, limit=min(STAGES, key=rates.__getitem__),
        remaining=remaining, hours=remaining / stream / 3600, gigabytes=remaining * size / 1e9,
    )  # fmt: skip


def measure_cluster(
    spec: EmbeddingSpec,
    options: Mapping[str, Any],
    jobs: Sequence[Job],
    root: DataRoot,
    remaining: int,
    *,
    pool_of: Callable[[Mapping[str, Any]], ClusterPass],
    link: float,
) -> ClusterSpeed:
    """Measure one kind on a cluster.

    Args:
        spec: the kind.
        options: arguments of an EmbedWorker of this kind.
        jobs: as of `sample_jobs`.
        root: the data root, for the place of the temporary folder.
        remaining: images that have no file of this kind.
        pool_of: returns what runs the pass, for changed options.
        link: bytes per second between this computer and a node.

    Raises:
        ImagemillError: if no image of the sample gets a file. Errors of the cluster.
    """
    with _temporary_store(spec, options, root) as (store, own):
        pool = pool_of(own)
        marks: list[tuple[float, float]] = []

        def marked() -> Iterator[Any]:
            for row in pool.stream(jobs):
                marks.append((time.perf_counter(), time.process_time()))
                yield row

        with Ledger(store.folder.parent / "ledger.sqlite") as ledger:
            rows = [row for batch in publish(marked(), store, ledger) for row in batch if row.file is not None]
            at_end = time.perf_counter(), time.process_time()
        if len(rows) < 2:
            raise ImagemillError(
                f"{spec.kind}: {counted(len(rows), 'image')} of {len(jobs)} came back with a file, and two are needed",
                where=root.approved,
                do="give more images by --images, or run `imagemill run`, which lists the reasons",
            )
        size = mean(store.path(row.image_id).stat().st_size for row in rows)
    seconds, cpu = (end - first for end, first in zip(at_end, marks[0], strict=True))
    count = len(rows)
    rates = {name: _rate_of(work) for name, work in sorted(pool.work.items())}
    sent, returned = pool.sent / count, pool.returned / count
    driver_cpu = max(cpu / (len(marks) - 1), 1e-9)
    ceilings = {
        "nodes": sum(rates.values()),
        "driver": 1 / driver_cpu,
        "link": link / max(sent, returned, 1.0),
    }
    limit = min(ceilings, key=ceilings.__getitem__)
    (made_by,) = {(row.identity.model, row.identity.device.partition(":")[0]) for row in rows if row.identity}
    return ClusterSpeed(
        kind=spec.kind, model=made_by[0], device=made_by[1], images=count, nodes=rates, stream=(count - 1) / seconds,
        driver_cpu=driver_cpu, sent=sent, returned=returned, link=link, ceilings=ceilings, limit=limit,
        shares=limit != "nodes", remaining=remaining, hours=remaining / ceilings[limit] / 3600,
        gigabytes=remaining * size / 1e9,
    )  # fmt: skip


def _rate_of(work: Any) -> float:
    """Return the images per second of a node. Workers that had one batch each are measured with the loading of their model."""
    if work.keys:
        return work.workers * work.keys / work.seconds
    return work.workers * work.first_keys / work.first_seconds


@contextlib.contextmanager
def _temporary_store(
    spec: EmbeddingSpec, options: Mapping[str, Any], root: DataRoot
) -> Iterator[tuple[NpyStore, dict[str, Any]]]:
    """Return a store beside the embeddings, which is removed, and the options of a worker that writes there."""
    beside = nearest_existing(root.derived)
    sweep_temporaries(beside, folders=True)
    folder = temporary_path(beside)
    folder.mkdir()
    try:
        store = NpyStore(folder / spec.folder, options["store"].spec)
        models = RecordedModels(None, frozenset(), root.ledger)
        yield store, {**options, "recorded_models": models, "empty_captions": None, "store": store}
    finally:
        remove_folder(folder)


def _prepare(
    spec: EmbeddingSpec, jobs: Sequence[Job], encoder: Encoder, root: DataRoot, threads: int, color: ColorSetting
) -> tuple[list[Prepared], float]:
    def one(job: Job) -> Prepared | None:
        try:
            item = job.caption or "" if spec.source == "caption" else open_rgb(root.approved / job.file_name, color)
            return encoder.prepare(item)
        except (ImagemillError, OSError):  # refused in a run, too
            return None

    with ThreadPoolExecutor(threads, "prepare") as pool:
        made, seconds = _timed(lambda: list(pool.map(one, jobs)))
    found = [item for item in made if item is not None]
    if not found:
        raise ImagemillError(
            f"none of {len(jobs)} images can be read",
            where=root.approved,
            do="run `imagemill run`, which lists the reasons",
        )
    return found, len(found) / seconds


def _encode(items: Sequence[Prepared], encoder: Encoder, batch_size: int) -> tuple[list[np.ndarray], float]:
    """Encode batches of one group each, twice; the first round, in which libraries prepare for each shape, is not counted."""
    groups: dict[Any, list[Prepared]] = {}
    for item in items:
        groups.setdefault(item.group, []).append(item)
    batches = [group[n : n + batch_size] for group in groups.values() for n in range(0, len(group), batch_size)]
    made, seconds = [], 0.0
    for _ in range(2):
        made, seconds = _timed(lambda: [array for batch in batches for array in encoder.encode(batch)])
    return made, len(items) / seconds


def _write(arrays: Sequence[np.ndarray], store: NpyStore, threads: int) -> float:
    store.folder.mkdir(parents=True, exist_ok=True)

    def all_of_them() -> None:
        with ThreadPoolExecutor(threads, "write") as pool:
            staged = list(pool.map(store.stage, arrays))
        for error in flush_files(staged).values():
            raise error

    _, seconds = _timed(all_of_them)
    return len(arrays) / seconds


def _stream(worker: EmbedWorker, jobs: Sequence[Job], store: NpyStore, folder: Path) -> tuple[float, float]:
    """Return images per second, and the share of the time in which the model works."""
    clock, encoder = _Clock(), worker.encoder()
    encoder.encode = clock.around(encoder.encode)  # type: ignore[method-assign]
    with Ledger(folder / "ledger.sqlite") as ledger:

        def run() -> int:
            batches: Iterable[list[Any]] = publish(worker.stream(jobs), store, ledger)
            return sum(row.file is not None for batch in batches for row in batch)

        made, seconds = _timed(run)
    return made / seconds, min(1.0, clock.seconds / seconds)


def _timed(call: Callable[[], Any]) -> tuple[Any, float]:
    began = time.perf_counter()
    result = call()
    return result, max(time.perf_counter() - began, 1e-9)
