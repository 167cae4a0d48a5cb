"""`imagemill stage-a` on a data root of an earlier release, and on one with a lost ledger: no image is inferred twice.

Spec: docs/spec/stage-a.md#reuse-of-summaries
"""

import shutil
import sqlite3
import tarfile
from contextlib import closing
from pathlib import Path

import pytest

from imagemill.domain.layout import DataRoot
from imagemill.pipeline.stage_a.rank_files import output_file
from imagemill.pipeline.stage_a.summaries import SNAPSHOT, summaries_folder
from imagemill.store.ledger import VERSION, Ledger
from tests.helpers.presets import imagemill_here
from tests.helpers.summarizers import MODULE, asked

FIXTURE = Path(__file__).parents[1] / "fixtures" / "stage_a" / "schema3.tar.xz"
ALL_BUT_BLANK = 6


@pytest.fixture
def earlier(tmp_path):
    """A ledger of version 3, six finished summaries in three files, rank files of a run that failed `blank.png`."""
    with tarfile.open(FIXTURE) as archive:
        archive.extractall(tmp_path, filter="data")
    root = DataRoot(tmp_path / "data")
    with closing(sqlite3.connect(root.ledger)) as db:
        assert db.execute("PRAGMA user_version").fetchone() == (3,)
    return root


def run(root, log, *options):
    """Run the command; return the images passed to the summarizer."""
    given = ["--mission", "BBU", "--summarizer", f"{MODULE}:Blank", *options]
    done = imagemill_here(root, "stage-a", *given, ASKED=log, RANK="", WORLD_SIZE="")
    assert done.returncode == 0, done.stderr
    return sorted(name for batches in asked(log).values() for batch in batches for name in batch)


def recorded(root):
    with Ledger(root.ledger, read_only=True) as ledger:
        return list(ledger.summaries("BBU"))


@pytest.mark.parametrize("lost", ["nothing", "rank files", "summaries"])
def test_root_of_an_earlier_release_is_upgraded_without_a_manual_step(earlier, tmp_path, lost):
    """Its summary files, or else its rank files, are imported as rows; the output keeps its bytes."""
    output, store = output_file(earlier.stage_a_output, "BBU"), summaries_folder(earlier.state, "BBU")
    before = output.read_bytes()
    if lost == "rank files":
        for path in earlier.stage_a_output.glob("*rank*"):
            path.unlink()
    elif lost == "summaries":
        shutil.rmtree(store)

    assert run(earlier, tmp_path / "asked", "--world-size", 1) == ["blank.png"]

    assert output.read_bytes() == before
    assert sorted(path.name for path in store.iterdir()) == [SNAPSHOT]
    assert len(recorded(earlier)) == ALL_BUT_BLANK
    assert all(row.stat and row.content and row.image for row in recorded(earlier))
    with closing(sqlite3.connect(earlier.ledger)) as db:
        assert db.execute("PRAGMA user_version").fetchone() == (VERSION,)


@pytest.mark.parametrize("loss", ["removed", "damaged and repaired"])
def test_lost_ledger_loses_no_summary(earlier, tmp_path, loss):
    run(earlier, tmp_path / "asked")
    rows = recorded(earlier)
    for path in earlier.stage_a_output.glob("*rank*"):
        path.unlink()
    for path in earlier.state.glob("ledger.sqlite*"):
        path.unlink()
    if loss == "damaged and repaired":
        earlier.ledger.write_bytes(b"no database" * 1000)
        assert imagemill_here(earlier, "repair", "--apply").returncode == 0

    assert run(earlier, tmp_path / "again") == ["blank.png"]
    assert recorded(earlier) == rows
