"""The snapshot at the end of a command (imagemill/pipeline/snapshot.py), and the run that finds nothing to do.

    command ends ──> snapshot ──> `imagemill status`: the counts, without looking at the files again
                             └──> `imagemill run`: nothing to do, if nothing has changed since

The second use needs more than an equal ledger. A run may end at once only if it would read what the last run read, and the last
run left nothing to do. The digest of what a run reads is therefore made from the listings that the last run planned with, from
the records as it merged them and from the sets as it verified them, never from a later look at the disk.

Reference: docs/decisions/0103-snapshot.md.
"""

import contextlib
import time
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec

from dagster_project.internals.history_state import HistoryState, history_state
from imagemill.domain.embedding_specs import embedding_specs
from imagemill.domain.layout import DataRoot
from imagemill.errors import ImagemillError
from imagemill.fs.atomic import write_bytes_atomic
from imagemill.fs.fingerprints import RunningFingerprint, signature_if_there
from imagemill.pipeline.session import Session
from imagemill.pipeline.snapshot import FORMAT, Snapshot, read_snapshot, settings_lines, state_read
from imagemill.pipeline.stage2.inventory import Inventory, Settled
from imagemill.pipeline.status import State, Status
from imagemill.store.ledger import HISTORY, Ledger
from imagemill.store.ledger.schema import SNAPSHOT, state_of_files
from imagemill.store.second_copy import refresh
from imagemill.validation.shard_sets import is_verified, set_folders

# A snapshot of more would take longer to read than the viewer saves.
_MOST_DIFFERING = 100_000


class Ended(Protocol):
    """A command that has ended, and what its runs did."""

    session: Session
    embedded: set[str]

    @property
    def interrupted(self) -> int | None:
        """Number of the signal that stopped a run, or None."""

    @property
    def error(self) -> str | None:
        """The messages of failed runs, None if no run failed."""

    def counts(self) -> Mapping[str, Mapping[str, int]]:
        """Return the counters of the runs, per asset."""
        ...

    def checks(self) -> dict[str, bool]:
        """Return whether each check passed, by name."""
        ...

    def warnings(self) -> list[str]:
        """Return the names of the checks that warned."""
        ...

    def findings(self) -> list[str]:
        """Return the messages of failed checks."""
        ...

    def seconds(self) -> float:
        """Return the duration of the command so far."""
        ...


def write_snapshot(work: Ended, state: State, *, everything: bool) -> None:
    """Record the state at the end of a command. A disk that is full is ignored here, because every writer reports it.

    Args:
        work: the command.
        state: after the command.
        everything: whether the command was to bring the whole data root up to date.
    """
    session, root, checks = work.session, work.session.root, work.checks()
    passed = everything and not (work.interrupted or work.error) and all(checks.values())
    history = history_state(root)
    if passed and history and history.id:
        _record_history(session, history.id)
    settled = _settled(session, history) if passed and history and _is_idle(state.status) else None
    images = state.status.images
    status = msgspec.structs.replace(
        state.status, images=msgspec.structs.replace(images, embedded=0, up_to_date=images.up_to_date + images.embedded)
    )
    session.ledger.note_gone({problem.item for problem in status.problems if problem.outcome == "gone"})
    merged = work.counts().get("stage2_jsonl", {})
    is_short = len(state.differing) <= _MOST_DIFFERING
    found = Snapshot(
        release=version("imagemill"),
        ledger=session.ledger.file_state(),
        names=state.inventory.approved.names,
        status=status,
        inputs={name: merged[name] for name in ("total", "refused") if name in merged},
        checks=checks,
        warnings=work.warnings(),
        settled=settled or "",
        written_at=datetime.now(UTC).timestamp(),
        format=FORMAT,
        read=state_read(session, state.inventory.approved.digest) if is_short else "",
        differing=state.differing if is_short else {},
        reported=history.state if settled and history else "",
    )
    _store(found, root)


def _store(found: Snapshot, root: DataRoot) -> None:
    with contextlib.suppress(OSError, ImagemillError):
        write_bytes_atomic(root.state / SNAPSHOT, msgspec.json.encode(found))


def settled_snapshot(session: Session) -> Snapshot | None:
    """Return the snapshot if a run would change nothing; list the folders only if it may.

    The listings are kept for the run that follows otherwise. The second copies of the settings are completed, which an upgrade of
    the ledger, or a disk that was full, has left behind.

    Raises:
        ImagemillError: if a second copy cannot be written.
    """
    found = read_snapshot(session.root)
    if found is None or not found.settled:
        return None
    history = history_state(session.root)
    if history is None or not _is_recorded(session.reading, history):
        return None
    inventory = session.look()
    here = _Read(inventory, signature_if_there(session.root.stage2_jsonl), _sets(session.root, session.reading))
    digest = _digest(session, here, history, found.release)
    if digest != found.settled:
        if digest and _without_approved(digest) == _without_approved(found.settled):
            inventory.settled = _state_at_end(session, found, here)
        return None
    if refresh(session.root, session.reading, required=True):  # the digest includes a copy
        here = here._replace(sets=_sets(session.root, session.reading))
        found = msgspec.structs.replace(found, settled=_digest(session, here, history, found.release) or "")
        _store(found, session.root)
    return found


def _state_at_end(session: Session, found: Snapshot, here: "_Read") -> Settled | None:
    """Return what the snapshot tells the run that follows; None if it is too long for that, or the ledger has just changed."""
    seen, settings = session.reading.last_row_change(), session.reading.settings()
    if not found.read or state_of_files(session.root.ledger) != found.ledger:
        return None
    return Settled(found.differing.keys(), here.records, settings, seen)


def is_reported(session: Session) -> bool:
    """Return whether the history is known to have every file of the ledger; False if that has changed since the last command."""
    found, history = read_snapshot(session.root), history_state(session.root)
    if found is None or history is None or not found.reported:
        return False
    return found.reported == history.state and _is_recorded(session.reading, history)


class Unchanged:
    """A run that found nothing changed since the last one."""

    def __init__(self, session: Session, snapshot: Snapshot) -> None:
        self.session, self.snapshot = session, snapshot
        self.embedded: set[str] = set()
        self.interrupted = self.error = None
        self._began = time.monotonic()

    def counts(self) -> Mapping[str, Mapping[str, int]]:
        """Return the counters of the last merge, as a run without news would count them."""
        inputs = {"total": 0, "refused": 0, **self.snapshot.inputs}
        unchanged = dict.fromkeys(("migrated_new", "enriched", "extracted", "failed", "waiting"), 0)
        merged = {**unchanged, **inputs, "skipped": inputs["total"] - inputs["refused"]}
        return {
            "stage2_jsonl": {**merged, "truncated_captions": self.snapshot.status.truncated},
            "written": {"written_buckets": 0},
        }

    def checks(self) -> dict[str, bool]:
        """Return the checks of the last run."""
        return self.snapshot.checks

    def warnings(self) -> list[str]:
        """Return the names of the checks that warned in the last run."""
        return self.snapshot.warnings

    def findings(self) -> list[str]:
        """Return nothing: all checks passed."""
        return []

    def seconds(self) -> float:
        """Return the duration of the command so far."""
        return time.monotonic() - self._began


# ---- what a run reads


class _Read(NamedTuple):
    """The input of a run, beside the ledger. `sets`: a line per verified set and file; None if a set is not verified."""

    inventory: Inventory
    records: str | None
    sets: list[str] | None


def _is_idle(status: Status) -> bool:
    """Return whether every image has its files and record, or is refused because of its own bytes."""
    waiting = status.images.waiting + status.images.failed + sum(counts["to do"] for counts in status.kinds.values())
    failed = any(problem.outcome == "failed" for problem in status.stage2_problems)
    return not (waiting or failed or status.regenerating or status.unreadable)


def _record_history(session: Session, history: str) -> None:
    """Record the id of the history that every image was reported to, in the second copies too: the digest includes one."""
    if session.ledger.setting(HISTORY) != history:
        session.ledger.record_setting(HISTORY, history)
        refresh(session.root, session.ledger)


def _is_recorded(ledger: Ledger, history: HistoryState) -> bool:
    """Return whether this history was the last one that images were reported to.

    Ledgers of earlier releases lack the id. Their snapshots identify the history by its file.
    """
    return ledger.setting(HISTORY) in {None, history.id}


def _settled(session: Session, history: HistoryState) -> str | None:
    """Return the digest of what the command's last run read and wrote; None if another process may have changed it."""
    root, ledger = session.root, session.ledger
    merged = ledger.verified(root.stage2_jsonl)
    inventory = session.planned
    if inventory is None or session.overview() is not inventory or merged != signature_if_there(root.stage2_jsonl):
        return None
    # The check of the sets has just compared them with these signatures.
    return _digest(session, _Read(inventory, merged, _recorded_sets(root, ledger)), history, version("imagemill"))


def _digest(session: Session, read: _Read, history: HistoryState, release: str) -> str | None:
    """Return the digest of `approved/`, then that of everything else; None if a run always has something to compare."""
    if read.sets is None or session.config.near_duplicates.exclude:
        return None
    digest = RunningFingerprint()
    digest.update_lines((release, *settings_lines(session.config), history.state, str(read.records), *read.sets))
    digest.update_lines(_listed(read.inventory))
    return f"{_approved(read.inventory)}{digest}"


def _approved(inventory: Inventory) -> str:
    """Return the beginning of each digest of a run over this listing."""
    return f"{inventory.approved.digest} "


def _without_approved(digest: str) -> str:
    """Return the end of a digest, which does not depend on the listing of `approved/`."""
    return digest.partition(" ")[2]


def _listed(inventory: Inventory) -> Iterator[str]:
    """Yield a line per file of each kind."""
    for spec in embedding_specs():
        yield spec.folder
        yield from (f"{image_id} {signature}" for image_id, signature in inventory.files(spec).pairs())


def _sets(root: DataRoot, ledger: Ledger) -> list[str] | None:
    """Return `_recorded_sets`; None if a set changed since it was verified."""
    verified = all(is_verified(folder, ledger) for folder in set_folders(root.shards))
    return _recorded_sets(root, ledger) if verified else None


def _recorded_sets(root: DataRoot, ledger: Ledger) -> list[str]:
    """Return the signatures of the sets when they were verified, and of the files beside them."""
    folders = set_folders(root.shards)
    beside = sorted(path for path in root.shards.glob("*") if path.is_file()) if root.shards.is_dir() else []
    return [*(f"{folder} {ledger.verified(folder)}" for folder in folders), *map(_signature_of, beside)]


def _signature_of(path: Path) -> str:
    return f"{path} {signature_if_there(path)}"
