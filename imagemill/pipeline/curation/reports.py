"""Reports of curation assets, passed to the IO manager: files to write, counters and pages to show.

The contents of reports are made in latent_statistics.py and near_duplicates.py; they are written in io_managers/report.py.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from imagemill.fs.atomic import write_if_changed


@dataclass(frozen=True, slots=True)
class CurationReport:
    """One partition's report, or a whole asset's.

    Attributes:
        version: equal versions mean equal reports.
        partition: its key; None for a report on the whole asset.
        files: whole contents, to be written in this order; empty if the files on disk are up to date.
        counts: counters.
        pages: title → markdown.
        path: the file to show, even if it is up to date; None for the folder or file of all reports.
    """

    version: str
    partition: str | None = None
    files: Mapping[Path, bytes] = field(default_factory=dict)
    counts: Mapping[str, int] = field(default_factory=dict)
    pages: Mapping[str, str] = field(default_factory=dict)
    path: Path | None = None


@dataclass(slots=True)
class Reports:
    """A handle around reports that are made while it is iterated; `place`: the file or folder they are written to."""

    place: Path
    stream: Iterator[CurationReport]


def write_report(report: CurationReport) -> int:
    """Write a report's files atomically; return how many changed. A file with the same bytes keeps its mtime."""
    return sum(write_if_changed(path, data) for path, data in report.files.items())
