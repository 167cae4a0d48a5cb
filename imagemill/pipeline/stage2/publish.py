"""Publication of finished rows: ledger rows, then final file names, in the one process that owns the ledger.

    rows ──128 or one second──> flush the files ──> ledger rows, one transaction ──> renames ──> flush the folder

The ledger row precedes the rename, so a kill at any moment leaves no file under a final name without a row.

The files are made in embed.py; Dagster events are in io_managers/npy.py.

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

from imagemill.domain.embedding_specs import T5
from imagemill.formats.npy import NpyStore
from imagemill.fs.atomic import sync_folder
from imagemill.fs.durable import flush_files
from imagemill.pipeline.stage2.embed import EmbedRow
from imagemill.store.ledger import Ledger, Problem
from imagemill.store.provenance import guard_identity

T = TypeVar("T")

# Rows per ledger transaction and folder flush, and the longest time in seconds that a finished file waits for its name.
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

    On interrupt, it still publishes the rows it holds and those the stream has finished, then re-raises.

    Args:
        rows: results of `EmbedWorker.stream`.
        store: folder of the kind.
        ledger: receives sources, files, masks, changes and problems.
        run_id: the run that is recorded with problems.
        held: context that defers interrupts while a batch is published; a deferred interrupt is raised when it ends.
        leased: whether this run leases its images, which each batch then checks.
        on_row: called for each row as it arrives, which is before its batch is published.

    Raises:
        LeaseLost: if another process has taken over one of the images; nothing of that batch is published.
        ModelMismatch: if another process has recorded another model meanwhile; nothing of that batch is published.
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
    """Raise the interrupt inside a generator and yield the items that it still produces.

    Yields nothing if the interrupt came from the generator itself.
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
        (r.image_id, r.caption_fingerprint, r.facts["mask"], r.facts["truncated"])
        for r in batch
        if kind == T5.kind and "mask" in r.facts
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
    """Rename a staged file; if that fails, mark its row as failed. Return True on success."""
    try:
        os.replace(staged, store.path(row.image_id))
    except OSError as error:
        _not_written(row, staged, error)
    return row.file is not None


def _not_written(row: EmbedRow, staged: Path, error: OSError) -> None:
    """Mark the row of a file that could not be written as failed, and remove the staged file."""
    staged.unlink(missing_ok=True)
    row.outcome, row.reason, row.detail, row.remedy = "failed", "write_error", str(error), "run imagemill again"
    row.file = row.staged = None


def problem_of(row: EmbedRow, asset: str, run_id: str) -> Problem:
    """Return the ledger's problem for a refused or failed row."""
    outcome: Literal["refused", "failed"] = "refused" if row.outcome == "refused" else "failed"
    return Problem(row.image_id, asset, outcome, row.reason, row.detail, row.remedy, row.stat, run_id)


def count_rows(counts: Counter[str], batch: Iterable[EmbedRow]) -> None:
    """Add a batch to a pass's counters: outcomes, `calls`, `divided` batches, and `replaced` files."""
    for row in batch:
        counts[row.outcome] += 1
        counts["calls"] += row.calls
        if row.divided:
            counts["divided"] += row.divided
        counts["replaced"] += row.replaced is not None
