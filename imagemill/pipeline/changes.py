"""Changes of a data root since a time, from the times in its ledger.

Spec: docs/spec/conventions.md#what-changed
"""

import re
from datetime import UTC, datetime, timedelta

import msgspec

from imagemill.errors import WrongUsage
from imagemill.store.ledger import Ledger

_DURATION = re.compile(r"(\d{1,6})\s*([mhdw])")
_UNITS = {"m": "minutes", "h": "hours", "d": "days", "w": "weeks"}
# Of a run id, as Dagster's UI shows it.
_LEAST_OF_A_RUN = 6


class Changes(msgspec.Struct, frozen=True):
    """Changes since a time.

    Attributes:
        since: the time, UTC, ISO 8601.
        images: image ids by kind of change, `CHANGES_SINCE`; of problems, their items.
        unknown: images of which no time is known.
    """

    since: str
    images: dict[str, list[str]]
    unknown: int


def read_changes(ledger: Ledger, since: int) -> Changes:
    """Return what changed at or after a time, in seconds since the epoch."""
    return Changes(written_time(since), dict(ledger.changed_since(since)), ledger.unknown_times())


def written_time(since: int) -> str:
    """Return a time, in seconds since the epoch, as UTC, ISO 8601."""
    return datetime.fromtimestamp(since, UTC).isoformat(timespec="seconds")


def parse_since(text: str, ledger: Ledger, now: datetime | None = None) -> int:
    """Return the time that a user means, in seconds since the epoch.

    Args:
        text: a duration before now (`90m`, `24h`, `7d`, `2w`); a date, or date and time, of ISO 8601, in local time if it names
            no zone; or the id of a run, or its first characters, which means when that run began.
        ledger: contains the runs.
        now: the present time.

    Raises:
        WrongUsage: for any other text, and for the beginning of several ids.
    """
    given, now = text.strip(), now or datetime.now(UTC)
    try:
        if duration := _DURATION.fullmatch(given.lower()):
            return int((now - timedelta(**{_UNITS[duration[2]]: int(duration[1])})).timestamp())
        return int(datetime.fromisoformat(given).astimezone(UTC).timestamp())
    except (ValueError, OverflowError):
        runs = ledger.run_began_at(given) if len(given) >= _LEAST_OF_A_RUN else {}
    if len(runs) == 1:
        return next(iter(runs.values()))
    raise WrongUsage(
        f"not a time or a run: {text!r}",
        why=f"{len(runs)} runs have an id that begins with it" if runs else None,
        do="give a duration such as 24h or 7d, a date such as 2026-11-24 or 2026-11-24T18:30, or the id of a run",
    )
