"""Finished rows into the ledger, staged files under their final names: by the one process that owns the ledger.

    rows ──128 or one second──> flush the files ──> ledger rows, one transaction ──> renames ──> flush the folder

The ledger knows a file before it has its name, so a kill at any moment leaves no file under a final name that nobody vouches for.

Belongs here: the order of these steps, what an interrupt still lets finish, counts.
Belongs elsewhere: making the files (embed.py), Dagster events (io_managers/npy.py).
Reference: docs/decisions/0001-ledger-row-before-rename.md.
Spec: docs/spec/conventions.md#atomic-names
"""

import contextlib
import os
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Literal, TypeVar

from imagemill.formats.npy import NpyStore
from imagemill.fs.atomic import sync_folder
from imagemill.fs.durable import flush_files
from imagemill.pipeline.stage2.embed import EmbedRow, EmbedWorker
from imagemill.pipeline.stage2.plan import Job
from imagemill.store.ledger import Ledger, Problem
from imagemill.store.provenance import guard_identity

T = TypeVar("T")

# Rows per ledger transaction and folder flush, and the longest a finished file waits for its name.
PUBLISH_ROWS = 128
PUBLISH_SECONDS = 1.0


def publish(
    rows: Iterable[EmbedRow],
    store: NpyStore,
    ledger: Ledger,
    *,
    run_id: str = "",
    held: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
    leased: bool = False,
    on_row: Callable[[EmbedRow], None] = lambda row: None,
) -> Iterator[list[EmbedRow]]:
    """Record rows in the ledger, then give their files their final names; yield each batch once it is durable.

    Interrupted, it still publishes the rows it holds and those the stream has finished, then lets the interrupt go on.

    Args:
        held: while a batch is published, interrupts wait; one that came meanwhile is raised when the context ends.
        leased: whether this run leases its images, which each batch then checks.
        on_row: called for each row as it arrives, which is before its batch is published.

    Raises:
        LeaseLost: if another process has taken over one of the images; nothing of that batch is published.
        ModelMismatch: if another process has recorded another model meanwhile; the same.
    """
    batches = _timely_batches(rows, on_row)
    unreported: list[list[EmbedRow]] = []
    try:
        for batch in batches:
            with held():
                _publish_batch(batch, store, ledger, run_id, leased)
                unreported.append(batch)
            yield unreported.pop()
    except GeneratorExit:
        raise
    except BaseException as interrupt:
        yield from unreported  # published before the interrupt was raised
        for batch in after_interrupt(batches, interrupt):
            _publish_batch(batch, store, ledger, run_id, leased)
            yield batch
        raise


def after_interrupt(stream: Iterable[T], interrupt: BaseException) -> Iterator[T]:
    """What a generator still has when an interrupt meets its consumer: it hears of it, and hands over what is finished.

    Nothing where the interrupt came out of the generator itself.
    """
    if not isinstance(stream, Generator):
        return
    with contextlib.suppress(StopIteration, type(interrupt)):
        yield stream.throw(interrupt)
        while True:
            yield next(stream)


def _timely_batches(rows: Iterable[EmbedRow], on_row: Callable[[EmbedRow], None]) -> Iterator[list[EmbedRow]]:
    batch: list[EmbedRow] = []
    began = time.monotonic()
    try:
        for row in rows:
            on_row(row)
            batch.append(row)
            if len(batch) >= PUBLISH_ROWS or time.monotonic() - began >= PUBLISH_SECONDS:
                ready, batch = batch, []
                yield ready
                began = time.monotonic()
    except GeneratorExit:
        raise
    except BaseException as interrupt:
        batch += after_interrupt(rows, interrupt)
        if batch:
            yield batch
        raise
    if batch:
        yield batch


def _publish_batch(
    batch: Sequence[EmbedRow], store: NpyStore, ledger: Ledger, run_id: str, leased: bool = False
) -> None:
    kind = store.spec.kind
    staged = {row.staged: row for row in batch if row.staged}
    for path, error in flush_files(list(staged)).items():
        _not_written(staged[path], path, error)
    files = [row.file for row in batch if row.file]
    good = [row.image_id for row in batch if row.file]
    masks = [
        (r.image_id, r.caption_fingerprint, r.facts["mask"], r.facts["truncated"]) for r in batch if "mask" in r.facts
    ]
    with ledger.transaction():
        if leased:
            ledger.check_lease(kind, [row.image_id for row in batch], run_id)
        for identity in {row.identity.key: row.identity for row in batch if row.identity}.values():
            guard_identity(ledger, identity)
        ledger.record_sources(row.source for row in batch if row.source)
        ledger.record_files(files)
        ledger.record_masks(mask for mask in masks if mask[1] is not None)  # type: ignore[misc]
        ledger.record_changes(
            (row.image_id, kind, row.outcome) for row in batch if row.outcome in {"computed", "extracted", "restored"}
        )
        ledger.clear_problems(kind, good)
        ledger.record_problems(problem_of(row, kind, run_id) for row in batch if row.outcome in {"refused", "failed"})
    if nameless := [row for row in batch if row.staged and not _give_name(row, row.staged, store)]:
        ledger.record_problems(problem_of(row, kind, run_id) for row in nameless)
    if any(row.staged for row in batch):
        sync_folder(store.folder)
    ledger.forget_superseded(row.file for row in batch if row.file)


def _give_name(row: EmbedRow, staged: Path, store: NpyStore) -> bool:
    """Rename a staged file. Where that cannot be, the row becomes one of a failed image."""
    try:
        os.replace(staged, store.path(row.image_id))
    except OSError as error:
        _not_written(row, staged, error)
    return row.file is not None


def _not_written(row: EmbedRow, staged: Path, error: OSError) -> None:
    """Make a row whose file the disk does not take one of a failed image."""
    staged.unlink(missing_ok=True)
    row.outcome, row.reason, row.detail, row.remedy = "failed", "write_error", str(error), "run imagemill again"
    row.file = row.staged = None


def problem_of(row: EmbedRow, asset: str, run_id: str) -> Problem:
    outcome: Literal["refused", "failed"] = "refused" if row.outcome == "refused" else "failed"
    return Problem(row.image_id, asset, outcome, row.reason, row.detail, row.remedy, row.stat, run_id)


def count_rows(counts: Counter[str], batch: Iterable[EmbedRow]) -> None:
    """Add a batch to a pass's counters: outcomes, `calls`, and `replaced` files."""
    for row in batch:
        counts[row.outcome] += 1
        counts["calls"] += row.calls
        counts["replaced"] += row.replaced is not None


def run_pass(worker: EmbedWorker, jobs: Sequence[Job], ledger: Ledger, *, run_id: str = "") -> Counter[str]:
    """One whole pass in this process, without Dagster: what an asset does, as a plain call."""
    counts: Counter[str] = Counter()
    with contextlib.closing(worker):
        for batch in publish(worker.stream(jobs), worker.store, ledger, run_id=run_id):
            count_rows(counts, batch)
    return counts
