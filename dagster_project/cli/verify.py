"""`imagemill verify`: check every record, header and value of Stage 2, and the shards against index and checksums."""

import sys
from collections.abc import Iterator

import click

from dagster_project.cli.options import root_options
from dagster_project.cli.validate import show
from imagemill.domain.layout import DataRoot
from imagemill.errors import ImagemillError
from imagemill.pipeline.curation.near_duplicates import reported_images
from imagemill.pipeline.session import Session
from imagemill.pipeline.shards.shard_sets import refuse_no_sets
from imagemill.pipeline.status import ledger_of_runs
from imagemill.store.ledger import LedgerDamaged
from imagemill.store.locations import refuse_gone
from imagemill.validation.contents import RecordedContents
from imagemill.validation.findings import Report, collect
from imagemill.validation.shard_coverage import shard_coverage
from imagemill.validation.shard_sets import set_folders
from imagemill.validation.validator import Options, missing, validate, verify_stage2


@click.command("verify")
@click.option(
    "--sample", type=int, metavar="N", default=0, help="Compare the first N samples of each tar (default: all)."
)
@root_options
def command(session: Session, sample: int) -> None:
    """Read everything back and compare. Names each bad id; exit 1 on any finding."""
    root, ledger = session.root, ledger_of_runs(session)
    if problem := ledger.check():
        raise LedgerDamaged.at(root.ledger, problem)
    contents = RecordedContents(ledger, session.in_force)
    reports = [
        verify_stage2(root.stage2_jsonl, root.derived, contents),
        *_shards(root, sample, contents),
        *_coverage(session),
    ]
    sys.exit(show(reports))


def _shards(root: DataRoot, sample: int, contents: RecordedContents) -> Iterator[Report]:
    """Yield a report per set. A missing folder of shards is a finding, because nothing was verified."""
    try:
        refuse_gone(root, "shards")
        refuse_no_sets(root.shards)
    except ImagemillError as error:
        yield missing(root.shards, error)
    for folder in set_folders(root.shards):
        yield validate(folder, kind="shards", options=Options(derived=root.derived, sample=sample, contents=contents))


def _coverage(session: Session) -> Iterator[Report]:
    """Yield a report on the records against all sets together, if there are sets."""
    root = session.root
    excluded = reported_images(root.derived, session.config.near_duplicates)
    if excluded is None or not set_folders(root.shards):  # nothing is packed without a report
        return
    findings = shard_coverage(root.stage2_jsonl, root.derived, root.shards, session.reading, excluded=excluded)
    yield collect(str(root.shards), "records and shards", findings)
