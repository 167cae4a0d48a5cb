"""The second copy of a data root's state that cannot be recomputed: its settings and its withdrawals.

    derived/.imagemill.json
    shards/.imagemill.json
    {"format": 1, "settings": {"identity.vae_latents": "{…}"}, "withdrawn": {…}}

It is written after the ledger has changed. It is read only if a data root has a new, empty ledger beside data of
earlier runs, because `.imagemill/` was lost. Restored values are reported.
"""

import sys
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import msgspec

from imagemill.domain.layout import DataRoot
from imagemill.errors import ImagemillError
from imagemill.fs.atomic import write_bytes_atomic
from imagemill.fs.owners import use
from imagemill.store.inputs import ADOPTED, COLOR, NAMES, first_inputs, record_inputs, recorded_inputs
from imagemill.store.ledger import BEGUN, HISTORY, ROOT_ID, Ledger

NAME = ".imagemill.json"


class SecondCopy(msgspec.Struct, frozen=True):
    """Settings by name, and withdrawn image ids with the time of their withdrawal.

    It contains no time of writing, so that equal data roots have equal bytes except for their ids. `written_at` is the
    file's modification time, UTC.
    """

    settings: dict[str, str]
    withdrawn: dict[str, str]
    format: int = 1


class FoundCopy(NamedTuple):
    """A second copy and when it was written, UTC."""

    copy: SecondCopy
    written_at: datetime


def open_ledger(root: DataRoot) -> Ledger:
    """Open a data root's ledger for writing; a new one takes over the content of the second copy, and prints this.

    A ledger is new until it has looked for a copy, because the process that created it may have ended before that.
    """
    ledger = Ledger(root.ledger)
    use(root.owners)
    try:
        if ledger.setting(BEGUN) is None:
            report_restored(root, restore(root, ledger))
    except BaseException:
        ledger.close()
        raise
    return ledger


def restore(root: DataRoot, ledger: Ledger) -> FoundCopy | None:
    """Copy settings and withdrawals that the ledger lacks from the newest second copy.

    Return the copy, or None if it has none of them.
    """
    found = newest(root)
    copy = found.copy if found else SecondCopy({}, {})
    with ledger.transaction():
        ledger.record_setting(BEGUN, "1")
        for name, value in copy.settings.items():
            if (name == ROOT_ID or ledger.setting(name) is None) and not name.startswith("place."):
                ledger.record_setting(name, value)
        record_inputs_of_copy(root, ledger, copy.settings, copied=found is not None)
        ledger.record_withdrawals({**copy.withdrawn, **ledger.withdrawals()})
    return found if copy.withdrawn or copy.settings.keys() - {BEGUN, HISTORY, ROOT_ID, *NAMES.values()} else None


def record_inputs_of_copy(root: DataRoot, ledger: Ledger, settings: Mapping[str, str], *, copied: bool) -> None:
    """Record the input settings of a ledger that lacks them, and how the arrays that it will adopt were made.

    Args:
        root: the data root.
        ledger: its new ledger, with the settings of the copy.
        settings: of the copy.
        copied: whether there is a copy.
    """
    record_inputs(ledger, recorded_inputs(ledger.setting, first_inputs(root, copied=copied)))
    if COLOR in settings:
        ledger.record_setting(ADOPTED, settings[COLOR])


def report_restored(root: DataRoot, found: FoundCopy | None) -> None:
    """Print what was taken from a second copy, if anything."""
    if found is None:
        return
    copy, written_at = found
    models = sorted(name.removeprefix("identity.") for name in copy.settings if name.startswith("identity."))
    print(
        f"the ledger of {root.path} was lost; taken from {NAME} of {written_at:%Y-%m-%d %H:%M:%S} UTC: "
        f"models of {', '.join(models) or 'no kind'}, {len(copy.withdrawn)} withdrawn images. "
        "Files are adopted again; which model made each of them is not known any more. "
        "Folders outside the data root are not part of the copy: name them again",
        file=sys.stderr,
        flush=True,
    )


def refresh(root: DataRoot, ledger: Ledger, *, required: bool = False) -> bool:
    """Bring the copies up to date; return whether one was written. A folder that does not exist yet gets no copy.

    A ledger that never looked for a copy does not replace one. Folders outside the data root are not part of it: a copy
    may be in another data root by now. Neither is the setting of adopted arrays, which a new ledger takes from the copy.

    Args:
        root: the data root.
        ledger: its ledger.
        required: raise if a copy cannot be written. Otherwise this is a warning, because the ledger is complete.

    Raises:
        ImagemillError: with `required`.
    """
    settings, withdrawn = ledger.settings(), ledger.withdrawals()
    if BEGUN not in settings:
        return False
    settings = {name: value for name, value in settings.items() if not name.startswith("place.") and name != ADOPTED}
    written = False
    for path in _paths(root):
        if not path.parent.is_dir():
            continue
        present = read_copy(path)
        if present is None or (present.settings, present.withdrawn) != (settings, withdrawn):
            copy = SecondCopy(settings=settings, withdrawn=withdrawn)
            try:
                write_bytes_atomic(path, msgspec.json.format(msgspec.json.encode(copy, order="sorted")) + b"\n")
                written = True
            except OSError as error:
                what = f"the second copy of the settings cannot be written: {error.strerror}"
                if required:
                    raise ImagemillError(
                        what,
                        where=path,
                        why="without it, models and withdrawn images would be lost with the ledger",
                        do="free disk space or check the disk, then run the same command again",
                    ) from error
                print(f"{what} ({path})", file=sys.stderr, flush=True)
    return written


def newest(root: DataRoot) -> FoundCopy | None:
    """Return the copy that was written last, None if no copy can be read."""
    found = [
        FoundCopy(copy, datetime.fromtimestamp(path.stat().st_mtime, UTC))
        for path in _paths(root) if (copy := read_copy(path))
    ]  # fmt: skip
    return max(found, key=lambda one: one.written_at, default=None)


def read_copy(path: Path) -> SecondCopy | None:
    """Return the copy at this path, None if there is no readable one."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=SecondCopy)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def _paths(root: DataRoot) -> Iterator[Path]:
    yield root.derived / NAME
    yield root.shards / NAME
