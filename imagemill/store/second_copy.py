"""The second copy of what a data root cannot recompute: its settings and its withdrawals.

    derived/.imagemill.json
    shards/.imagemill.json
    {"format": 1, "settings": {"identity.vae_latents": "{…}"}, "withdrawn": {…}}

It is written after the ledger changed, and read only where a data root has a new, empty ledger beside data of earlier runs:
`.imagemill/` was lost. Whatever is taken from it is reported.
"""

import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import msgspec

from imagemill.atomic import write_bytes_atomic
from imagemill.fs.owners import use
from imagemill.layout import DataRoot
from imagemill.store.ledger import Ledger

NAME = ".imagemill.json"


class SecondCopy(msgspec.Struct, frozen=True):
    """Settings by name, and withdrawn image ids with the time of their withdrawal.

    It contains no time of its own: equal data roots have equal bytes. `written_at` is the file's modification time, UTC.
    """

    settings: dict[str, str]
    withdrawn: dict[str, str]
    format: int = 1


class FoundCopy(NamedTuple):
    """A second copy and when it was written, UTC."""

    copy: SecondCopy
    written_at: datetime


def open_ledger(root: DataRoot) -> Ledger:
    """Open a data root's ledger for writing; an empty one takes over what the second copy has, and says so.

    Empty, not only new: the process that created it may have ended before it read the copy.
    """
    ledger = Ledger(root.ledger)
    use(root.owners)
    try:
        if not ledger.settings() and not ledger.withdrawals():
            report_restored(root, restore(root, ledger))
    except BaseException:
        ledger.close()
        raise
    return ledger


def restore(root: DataRoot, ledger: Ledger) -> FoundCopy | None:
    """Take settings and withdrawals that the ledger lacks from the newest second copy; return it, None if it has none."""
    found = newest(root)
    if found is None or not (found.copy.settings or found.copy.withdrawn):
        return None
    copy = found.copy
    with ledger.transaction():
        for name, value in copy.settings.items():
            if ledger.setting(name) is None:
                ledger.record_setting(name, value)
        ledger.record_withdrawals({i: at for i, at in copy.withdrawn.items() if i not in ledger.ids("withdrawn")})
    return found


def report_restored(root: DataRoot, found: FoundCopy | None) -> None:
    if found is None:
        return
    copy, written_at = found
    models = sorted(name.removeprefix("identity.") for name in copy.settings if name.startswith("identity."))
    print(
        f"the ledger of {root.path} was lost; taken from {NAME} of {written_at:%Y-%m-%d %H:%M:%S} UTC: "
        f"models of {', '.join(models) or 'no kind'}, {len(copy.withdrawn)} withdrawn images. "
        "Files are adopted again; which model made each of them is not known any more",
        file=sys.stderr,
        flush=True,
    )


def refresh(root: DataRoot, ledger: Ledger) -> None:
    """Bring the copies up to date. A folder that does not exist yet, or cannot be written to, gets none."""
    settings, withdrawn = ledger.settings(), ledger.withdrawals()
    for path in _paths(root):
        if not path.parent.is_dir():
            continue
        present = read_copy(path)
        if present is None or (present.settings, present.withdrawn) != (settings, withdrawn):
            copy = SecondCopy(settings=settings, withdrawn=withdrawn)
            write_bytes_atomic(path, msgspec.json.format(msgspec.json.encode(copy, order="sorted")) + b"\n")


def newest(root: DataRoot) -> FoundCopy | None:
    """Return the copy that was written last, None if there is none that can be read."""
    found = [
        FoundCopy(copy, datetime.fromtimestamp(path.stat().st_mtime, UTC))
        for path in _paths(root) if (copy := read_copy(path))
    ]  # fmt: skip
    return max(found, key=lambda one: one.written_at, default=None)


def read_copy(path: Path) -> SecondCopy | None:
    """Return a copy, None if there is no readable one at this path."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=SecondCopy)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def _paths(root: DataRoot) -> Iterator[Path]:
    yield root.derived / NAME
    yield root.shards / NAME
