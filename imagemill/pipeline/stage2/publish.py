"""Publication of finished rows: ledger rows, then final file names, in the one process that owns the ledger.

    rows ──128 or one second──> flush the files ──> ledger rows, one transaction ──> renames ──> flush the folder

While a pass runs, this happens on a thread of its own, with its own connection to the ledger.

The ledger row precedes the rename, so a kill at any moment leaves no file under a final name without a row.

The files are made in embed.py; Dagster events are in io_managers/npy.py.

Reference: docs/decisions/0001-ledger-row-before-rename.md.
Spec: docs/spec/conventions.md#atomic-names
"""

import contextlib
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeVar

from imagemill.domain.embedding_specs import T5
from imagemill.formats.npy import NpyStore
from imagemill.fs.atomic import sync_folder
from imagemill.fs.durable import flush_files
from imagemill.fs.fingerprints import signature_bytes
from imagemill.pipeline.byte_budget import ByteBudget
from imagemill.pipeline.stage2.examine import EmbedRow
from imagemill.pipeline.turns import Turns
from imagemill.store.ledger import Ledger, Problem
from imagemill.store.provenance import guard_identity

T = TypeVar("T")

# Rows per ledger transaction and folder flush, and the longest time in seconds that a finished file waits for its name.
PUBLISH_ROWS = 128
PUBLISH_SECONDS = 1.0

# Most bytes of staged files that wait for their names, and what a row counts for itself.
PUBLISH_BEHIND_BYTES = 256 * 1024 * 1024
_ROW_BYTES = 4096

# Outcomes that leave another file under the final name.
_CHANGES = {"computed", "linked", "extracted", "restored"}


def publish(
    rows: Iterable[EmbedRow | None],
    store: NpyStore,
    ledger: Ledger,
    *,
    run_id: str = "",
    leased: bool = False,
    on_row: Callable[[EmbedRow], None] = lambda row: None,
) -> Iterator[list[EmbedRow]]:
    """Record rows in the ledger, then give their files their final names; yield each batch once it is durable.

    On interrupt, it still publishes the rows it holds and those the stream has finished, then re-raises.

    Args:
        rows: results of `EmbedWorker.stream`; None lets a batch that waits for more rows be published.
        store: folder of the kind.
        ledger: receives sources, files, masks, changes and problems.
        run_id: the run that is recorded with problems.
        leased: whether this run leases its images, which each batch then checks.
        on_row: called for each row as it arrives, which is before its batch is published.

    Raises:
        LeaseLost: if another process has taken over one of the images; nothing of that batch is published.
        ModelMismatch: if another process has recorded another model meanwhile; nothing of that batch is published.
    """
    batches, publisher = _timely_batches(rows, on_row), _Publisher(store, ledger, run_id, leased)
    try:
        for batch in batches:
            publisher.publish(batch)
            yield batch
    except GeneratorExit:
        raise
    except BaseException as interrupt:
        for batch in after_interrupt(batches, interrupt):
            publisher.publish(batch)
            yield batch
        raise


def publish_on_thread(
    rows: Iterable[EmbedRow],
    store: NpyStore,
    ledger: Ledger,
    take: Callable[[list[EmbedRow], Ledger], None],
    *,
    run_id: str = "",
    leased: bool = False,
    on_row: Callable[[EmbedRow], None] = lambda row: None,
) -> None:
    """Publish rows on a thread of its own, while the caller's thread makes more of them and handles signals.

    An interrupt of the caller's thread never reaches a batch that is being published: the rows that exist are published and
    taken, then the interrupt is raised. A second interrupt ends publishing after the current batch.

    Args:
        rows: results of `EmbedWorker.stream`.
        store: folder of the kind.
        ledger: the ledger, to which the thread has a connection of its own.
        take: called on the thread with each published batch, and the connection.
        run_id: as for `publish`.
        leased: as for `publish`.
        on_row: called on the caller's thread for each row.

    Raises:
        LeaseLost, ModelMismatch: as `publish`.
    """
    queue, failures, taking = _StagedRows(), [], Turns()

    def work(connection: Ledger) -> None:
        try:
            for batch in publish(queue, store, connection, run_id=run_id, leased=leased):
                with taking.turn(len(batch)):
                    take(batch, connection)
        except BaseException as error:
            failures.append(error)
            queue.abandon()

    with ledger.helper() as connection:
        thread = threading.Thread(target=work, args=(connection,), name="publish")
        thread.start()
        interrupted = False
        try:
            for row in rows:
                queue.put(row)
                on_row(row)
                if failures:
                    break
        except BaseException as interrupt:
            interrupted = True
            for row in after_interrupt(rows, interrupt):
                queue.put(row)
            raise
        finally:
            queue.end()
            _join(thread, queue, interrupted=interrupted)
            if failures and isinstance(rows, Generator):
                rows.close()
    if failures:
        raise failures[0]


def _join(thread: threading.Thread, queue: "_StagedRows", *, interrupted: bool) -> None:
    """Wait until all rows are published; after a second interrupt, until the current batch is."""
    interrupt: BaseException | None = None
    while thread.is_alive():
        try:
            thread.join()
        except BaseException as error:
            if interrupted:
                queue.abandon()
            interrupt, interrupted = error, True
    if interrupt:
        raise interrupt


class _StagedRows:
    """A queue of rows whose files are staged, limited by the bytes of these files. Yields None if no row arrives for a while.

    The reader is woken for a whole batch of rows, not for each: to wake a thread costs as much as to publish a row.
    """

    def __init__(self) -> None:
        self._rows: deque[tuple[EmbedRow, int]] = deque()
        self._bytes = ByteBudget(PUBLISH_BEHIND_BYTES)
        self._wake = threading.Event()
        self._ended = self._abandoned = False

    def put(self, row: EmbedRow) -> None:
        """Add a row, after waiting until the files of all rows are within the limit."""
        size = _ROW_BYTES + (signature_bytes(row.file.stat) if row.file and row.staged else 0)
        if not self._bytes.has_room(size):
            self._wake.set()
        self._bytes.acquire(size)
        self._rows.append((row, size))
        if len(self._rows) >= PUBLISH_ROWS:
            self._wake.set()

    def end(self) -> None:
        """Let the iteration end after the rows that were added."""
        self._ended = True
        self._wake.set()

    def abandon(self) -> None:
        """Let the iteration end at once, and nothing wait."""
        self._abandoned = True
        self._bytes.close()
        self.end()

    def __iter__(self) -> Iterator[EmbedRow | None]:
        while not self._abandoned:
            self._wake.wait(PUBLISH_SECONDS)
            self._wake.clear()
            ended = self._ended  # read before the rows: those added earlier are among them
            while self._rows and not self._abandoned:
                row, size = self._rows.popleft()
                self._bytes.release(size)
                yield row
            if ended:
                return
            yield None


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


def _timely_batches(rows: Iterable[EmbedRow | None], on_row: Callable[[EmbedRow], None]) -> Iterator[list[EmbedRow]]:
    """Yield batches of different rows: an interrupted stream may yield its last row again."""
    batch: list[EmbedRow] = []
    last: EmbedRow | None = None
    began = time.monotonic()
    try:
        for row in rows:
            if row is not None and row is not last:
                on_row(row)
                batch.append(row)
                last = row
            if batch and (len(batch) >= PUBLISH_ROWS or time.monotonic() - began >= PUBLISH_SECONDS):
                ready, batch = batch, []
                yield ready
                began = time.monotonic()
    except GeneratorExit:
        raise
    except BaseException as interrupt:
        last = batch[-1] if batch else last
        batch += (row for row in after_interrupt(rows, interrupt) if row is not None and row is not last)
        if batch:
            yield batch
        raise
    if batch:
        yield batch


@dataclass(slots=True)
class _Publisher:
    """Publishes batches. `recording`, `naming`: turns of the ledger's statements and of the renames."""

    store: NpyStore
    ledger: Ledger
    run_id: str
    leased: bool
    recording: Turns = field(default_factory=Turns)
    naming: Turns = field(default_factory=Turns)

    def publish(self, batch: Sequence[EmbedRow]) -> None:
        staged = {row.staged: row for row in batch if row.staged}
        for path, error in flush_files(list(staged)).items():
            _not_written(staged[path], path, error)
        with self.ledger.transaction(), self.recording.turn(len(batch)):
            self._record(batch)
        with self.naming.turn(len(batch)):
            nameless = [row for row in batch if row.staged and not _give_name(row, row.staged, self.store)]
        if nameless:
            self.ledger.record_problems(problem_of(row, self.store.spec.kind, self.run_id) for row in nameless)
        if any(row.staged for row in batch):
            sync_folder(self.store.folder)
        self.ledger.forget_superseded(row.file for row in batch if row.file)

    def _record(self, batch: Sequence[EmbedRow]) -> None:
        kind, ledger = self.store.spec.kind, self.ledger
        made = [row.file for row in batch if row.file and row.outcome in _CHANGES]
        found = [row.file for row in batch if row.file and row.outcome not in _CHANGES]
        good = [row.image_id for row in batch if row.file]
        masks = [
            (r.image_id, r.caption_fingerprint, r.facts["mask"], r.facts["truncated"])
            for r in batch
            if kind == T5.kind and "mask" in r.facts
        ]
        if self.leased:
            ledger.check_lease(kind, [row.image_id for row in batch], self.run_id)
        for identity in {row.identity.key: row.identity for row in batch if row.identity}.values():
            guard_identity(ledger, identity)
        ledger.record_sources(row.source for row in batch if row.source)
        ledger.record_files(made)
        ledger.record_files(found, made=False)
        ledger.record_masks(mask for mask in masks if mask[1] is not None)  # type: ignore[misc]
        if kind == T5.kind:
            ledger.copy_masks({row.image_id: row.facts["donor"] for row in batch if "donor" in row.facts})
        ledger.record_changes((row.image_id, kind, row.outcome) for row in batch if row.outcome in _CHANGES)
        ledger.clear_problems(kind, good)
        ledger.record_problems(
            problem_of(row, kind, self.run_id) for row in batch if row.outcome in {"refused", "failed"}
        )


def _give_name(row: EmbedRow, staged: Path, store: NpyStore) -> bool:
    """Rename a staged file; if that fails, mark its row as failed. Return True on success."""
    try:
        os.replace(staged, store.path_text(row.image_id))
        if row.outcome == "linked":
            # If both are names of the same file, the replacement leaves both.
            staged.unlink(missing_ok=True)
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
