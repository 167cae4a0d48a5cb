"""What a curation asset hands to its IO manager: files to write, counters and pages to show, one report after another.

Belongs here: the value, and a file that is only written where its bytes change.
Belongs elsewhere: what a report says (latent_statistics.py, near_duplicates.py), when it is written (io_managers/report.py).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from imagemill.fs.atomic import write_if_changed


@dataclass(frozen=True, slots=True)
class CurationReport:
    """One partition's report, or a whole asset's.

    Attributes:
        version: equal versions are equal reports.
        partition: its key; None for what belongs to the asset as a whole.
        files: whole contents, to be written in this order; none where what lies there is up to date.
        counts: counters. pages: title → markdown.
        path: the file to show, also where it is up to date; None for the place of all.
    """

    version: str
    partition: str | None = None
    files: Mapping[Path, bytes] = field(default_factory=dict)
    counts: Mapping[str, int] = field(default_factory=dict)
    pages: Mapping[str, str] = field(default_factory=dict)
    path: Path | None = None


@dataclass(slots=True)
class Reports:
    """A handle around reports that are made while they are read; `place`: the file or folder they end in."""

    place: Path
    stream: Iterator[CurationReport]


def write_report(report: CurationReport) -> int:
    """Write a report's files, each whole or not at all; returns how many. One that holds its bytes keeps its mtime."""
    return sum(write_if_changed(path, data) for path, data in report.files.items())
