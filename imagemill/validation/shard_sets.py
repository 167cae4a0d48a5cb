"""Validation of all sets below a shards folder; a set is read only if a file changed since it was written or fully checked.

The full check is in shards.py; its result is recorded by imagemill/store/ledger/. Every byte is read by `imagemill verify`.

Spec: docs/spec/conventions.md#completion
"""

import os
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

from imagemill.formats.energon import META
from imagemill.fs.fingerprints import file_signature, fingerprint
from imagemill.fs.swap import read_unswapped
from imagemill.pipeline.shards.shard_sets import INDEX, MANIFEST, read_manifest
from imagemill.store.ledger import Ledger
from imagemill.validation.catalogue import RULES
from imagemill.validation.contents import RecordedContents
from imagemill.validation.findings import Report
from imagemill.validation.validator import Options, validate

KIND = "shards"


def validate_shards(
    folders: Iterable[Path], derived: Path, ledger: Ledger, *, also: Callable[[Path], Report] | None = None
) -> Iterator[Report]:
    """Yield a report for each of these sets, see `set_folders`; an unchanged set is not read again.

    Args:
        folders: the sets.
        derived: folder of the embedding files that npy members must equal.
        ledger: remembers the sets that were fully checked, and the contents of the files.
        also: returns another report on a set that is read.
    """
    contents = RecordedContents(ledger)
    for folder in folders:
        yield from read_unswapped(folder, partial(_reports, folder, derived, ledger, contents, also))


def is_verified(folder: Path, ledger: Ledger) -> bool:
    """Return whether no file of a set changed since it was written or fully checked."""
    return folder.is_dir() and ledger.verified(folder) == _signature(folder)


def record_written(folder: Path, ledger: Ledger) -> None:
    """Record a set that this process has just written, with tars of a verified set or none: its checksums are known."""
    ledger.record_verified(folder, _signature(folder))


def set_folders(output: Path) -> list[Path]:
    """Return the bucket folders that contain part of a set, but not those with only foreign files."""
    folders = sorted(path for path in output.glob("bucket_*") if path.is_dir())
    return [
        path for path in folders if any((path / name).exists() for name in (MANIFEST, INDEX)) or [*path.glob("*.tar")]
    ]


def _reports(
    folder: Path, derived: Path, ledger: Ledger, contents: RecordedContents, also: Callable[[Path], Report] | None
) -> list[Report]:
    """Return the reports of one set; none if it was removed meanwhile."""
    if not folder.is_dir():
        return []
    signature = _signature(folder)
    if ledger.verified(folder) == signature:
        manifest = read_manifest(folder)
        return [Report(str(folder), KIND, checked=manifest.samples if manifest else 0)]
    report = validate(folder, kind=KIND, options=Options(derived=derived, contents=contents))
    if report.passed:
        ledger.record_verified(folder, signature)
    return [report, *([also(folder)] if also else [])]


def _signature(folder: Path) -> str:
    """Return a fingerprint of the signatures of a set's files and of the rules' names, so that a new rule causes a new check."""
    folders = [path for path in (folder, folder / META) if path.is_dir()]
    entries = sorted((entry for path in folders for entry in os.scandir(path)), key=lambda entry: entry.path)
    files = [f"{entry.name} {file_signature(_stat(entry))}" for entry in entries]
    return fingerprint("\n".join([*files, *(name for name, rule in RULES.items() if KIND in rule.kinds)]).encode())


def _stat(entry: os.DirEntry[str]) -> os.stat_result:
    try:
        return entry.stat()
    except FileNotFoundError:  # a dangling link
        return entry.stat(follow_symlinks=False)
