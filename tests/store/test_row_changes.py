"""Every change of a row that plans and records are made from is known by its image, also one by another process."""

import sqlite3
from contextlib import closing

import pytest
from msgspec.structs import replace

from imagemill.fs.fingerprints import posix_signature
from imagemill.store.ledger import (
    Captioned,
    CaptionRow,
    FileRow,
    Ledger,
    MergedRecords,
    PackedSets,
    Problem,
    SourceRow,
    row_changes,
)
from tests.helpers.earlier_release import undo_version_13

STAT = posix_signature(1, 2, 3)
SOURCE = SourceRow("a", "a.png", STAT, "pixels", 24, 32)
CAPTION = CaptionRow("a", STAT, "noise", "sidecar", "words")
FILE = FileRow("vae_latents", "a", STAT, "pixels", "content", "key")
PROBLEM = Problem("a", "vae_latents", "refused", "undecodable", "detail", "remedy")

ROWS = {
    "source": lambda ledger: ledger.record_sources([SOURCE]),
    "caption": lambda ledger: ledger.record_captions([CAPTION]),
    "file": lambda ledger: ledger.record_files([FILE]),
}
CHANGES = {
    "source": lambda ledger: ledger.record_sources([replace(SOURCE, width=33)]),
    "color": lambda ledger: ledger.record_sources([replace(SOURCE, color="none")]),
    "no source": lambda ledger: ledger.forget_sources(["a"]),
    "caption": lambda ledger: ledger.record_captions([replace(CAPTION, fingerprint="other words")]),
    "several captions": lambda ledger: ledger.record_captions([replace(CAPTION, texts=("noise", "grain"))]),
    "mask": lambda ledger: ledger.record_masks([("a", "words", [1, 0], False)]),
    "conflict": lambda ledger: ledger.record_conflicts({"a": True}),
    "no sidecar": lambda ledger: ledger.forget_source("sidecar", ["a"]),
    "captioned": lambda ledger: ledger.record_captioned([Captioned("a", "pixels", "key")]),
    "file": lambda ledger: ledger.record_files([replace(FILE, model_key="another key")]),
    "another file": lambda ledger: ledger.forget_superseded(
        [FileRow("vae_latents", "a", "posix:4:5:6", "pixels", "content", "key")]
    ),
    "no files": lambda ledger: ledger.forget_files("vae_latents"),
    "problem": lambda ledger: ledger.record_problems([PROBLEM]),
    "no problem": lambda ledger: ledger.clear_problems("vae_latents", ["a"]),
}


@pytest.fixture
def ledger(tmp_path):
    """A ledger with all rows of one image, and with a source of another."""
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        for name in ("source", "caption", "file"):
            ROWS[name](ledger)
        for name in ("captioned", "problem"):
            CHANGES[name](ledger)
        ledger.record_sources([SourceRow("b", "b.png", STAT, "pixels", 24, 32)])
        yield ledger


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("is_here", [True, False], ids=["this connection", "another one"])
def test_change_of_a_row_is_known_by_its_image(ledger, name, is_here):
    seen = ledger.last_row_change()
    assert ledger.row_changes_after(seen) == set()

    with Ledger(ledger.path) as other:
        CHANGES[name](ledger if is_here else other)

    assert ledger.row_changes_after(seen) == {"a"}
    assert ledger.row_changes_after(ledger.last_row_change()) == set()
    assert ledger.row_changes_after(0) == {"a", "b"}


@pytest.mark.parametrize("name", ROWS)
def test_row_that_is_recorded_again_unchanged_is_no_change(ledger, name):
    seen, pages = ledger.last_row_change(), ledger.path.with_name("ledger.sqlite-wal").stat().st_size

    with ledger.transaction():
        ROWS[name](ledger)

    assert ledger.last_row_change() == seen
    assert ledger.row_changes_after(seen) == set()
    assert ledger.path.with_name("ledger.sqlite-wal").stat().st_size == pages


def test_changes_that_a_merge_has_seen_are_deleted_and_then_not_known(ledger, tmp_path):
    records, first = tmp_path / "records.jsonl", ledger.last_row_change()
    ledger.record_merged(records, STAT, "parameters", first, compared_all=True)
    CHANGES["mask"](ledger)

    ledger.forget_row_changes()

    assert ledger.row_changes_after(first - 1) is None
    assert ledger.row_changes_after(first) == {"a"}
    assert ledger.merged(records, STAT) == MergedRecords(str(records), STAT, "parameters", 1, first)
    assert ledger.merged(records, "posix:4:5:6") is None
    assert ledger.merged(tmp_path / "other.jsonl", STAT) is None


def test_changes_are_deleted_after_the_data_root_was_moved(ledger, tmp_path):
    ledger.record_merged(tmp_path / "before" / "records.jsonl", STAT, "", 1, compared_all=True)
    last = ledger.last_row_change()
    ledger.record_merged(tmp_path / "after" / "records.jsonl", STAT, "", last, compared_all=True)

    ledger.forget_row_changes()

    assert ledger.row_changes_after(last - 1) is None
    assert ledger.merged(tmp_path / "before" / "records.jsonl", STAT) is None


def test_changes_that_a_packing_has_not_seen_are_kept_up_to_a_number(ledger, tmp_path, monkeypatch):
    last = ledger.last_row_change()
    ledger.record_packed(PackedSets(str(tmp_path), {}, "", 1, 1))
    ledger.record_merged(tmp_path / "records.jsonl", STAT, "", last, compared_all=True)

    ledger.forget_row_changes()
    assert ledger.row_changes_after(1) == {"a", "b"}

    monkeypatch.setattr(row_changes, "KEPT_CHANGES", last - 2)
    ledger.forget_row_changes()
    assert ledger.packed(tmp_path) is None
    assert ledger.row_changes_after(last - 1) is None


def test_epoch_counts_the_merges_that_compared_all_lines(ledger, tmp_path):
    epochs = []
    for compared_all in (True, False, False, True, False):
        ledger.record_merged(tmp_path / "records.jsonl", STAT, "", 1, compared_all=compared_all)
        epochs.append(ledger.merged(tmp_path / "records.jsonl", STAT).epoch)

    assert epochs == [1, 1, 1, 2, 2]


def test_numbers_go_on_after_all_changes_were_deleted(ledger, tmp_path):
    last = ledger.last_row_change()
    ledger.record_merged(tmp_path / "records.jsonl", STAT, "", last, compared_all=True)
    ledger.forget_row_changes()
    assert ledger.row_changes_after(last) == set()
    assert ledger.row_changes_after(last - 1) is None

    CHANGES["file"](ledger)

    assert ledger.last_row_change() > last
    assert ledger.row_changes_after(last) == {"a"}


def test_changes_of_a_transaction_that_failed_do_not_count(ledger):
    seen = ledger.last_row_change()
    with pytest.raises(ZeroDivisionError), ledger.transaction():
        CHANGES["mask"](ledger)
        1 / 0  # noqa: B018

    assert ledger.last_row_change() == seen


def test_ledger_of_version_12_knows_the_changes_after_its_upgrade(ledger, tmp_path):
    ledger.close()
    with closing(sqlite3.connect(ledger.path)) as db:
        undo_version_13(db)
        db.execute("PRAGMA user_version = 12")
        db.commit()

    with Ledger(ledger.path) as upgraded:
        assert upgraded.merged(tmp_path / "records.jsonl", STAT) is None
        seen = upgraded.last_row_change()
        CHANGES["mask"](upgraded)
        assert upgraded.row_changes_after(seen) == {"a"}
