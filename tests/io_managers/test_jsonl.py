"""io_managers/jsonl.py: a merge replaces the file with one rename, and only if a byte changed.

Spec: docs/spec/conventions.md#jsonl-input, docs/spec/stage2.md#merge
"""

import json

import dagster as dg
import pytest

from assets.stage2_jsonl import stage2_jsonl
from imagemill.formats.jsonl import read_jsonl
from imagemill.pipeline.stage2 import merge
from imagemill.store.ledger import Ledger
from tests.helpers.stage2 import embed, photos, record_of, write_text
from tests.helpers.wiring import claims, failure_of, history, materialize, stub_every_kind


@pytest.fixture
def instance():
    with history() as instance:
        yield instance


@pytest.fixture
def root(data_root, monkeypatch):
    stub_every_kind(monkeypatch)
    photos(data_root, "a", "b")
    embed(data_root)
    return data_root


def counts(root, result):
    with Ledger(root.ledger) as ledger:
        return ledger.counts([result.run_id])["stage2_jsonl"]


def test_records_are_written_and_counted(root, instance):
    result = materialize(root, instance, stage2_jsonl)

    assert result.success
    assert [line.value["image_id"] for line in read_jsonl(root.stage2_jsonl)] == ["a", "b"]
    assert counts(root, result) == {
        "records": 2, "added": 2, "renamed": 0, "migrated": 0, "changed": 0, "stage1": 0, "quarantined": 0, "rewritten": 1,
        "truncated_captions": 0,
        "refused": 0, "failed": 0, "waiting": 0, "skipped": 0, "migrated_new": 2, "extracted": 0, "enriched": 0, "total": 2,
        "images_seen": 2, "images_embedded": 2, "images_up_to_date": 0, "images_refused": 0, "images_failed": 0,
        "images_waiting": 0,
    }  # fmt: skip
    (event,) = result.asset_materializations_for_node("stage2_jsonl")
    assert event.metadata["records"].value == 2
    assert event.metadata["path"].value == str(root.stage2_jsonl)


def test_unchanged_file_keeps_bytes_and_mtime(root, instance):
    materialize(root, instance, stage2_jsonl)
    before = root.stage2_jsonl.stat().st_mtime_ns, root.stage2_jsonl.read_bytes()

    result = materialize(root, instance, stage2_jsonl)

    assert (root.stage2_jsonl.stat().st_mtime_ns, root.stage2_jsonl.read_bytes()) == before
    assert counts(root, result)["rewritten"] == 0


def test_removed_lines_go_to_the_quarantine(root, instance):
    write_text(root.stage2_jsonl, "{", json.dumps(record_of("elsewhere", note=1)), json.dumps(record_of("elsewhere")))

    result = materialize(root, instance, stage2_jsonl)

    assert (counts(root, result)["quarantined"], counts(root, result)["records"]) == (2, 3)
    kept = [line.value for line in read_jsonl(root.quarantine / "approved_image_dataset.jsonl.quarantine.jsonl")]
    assert [(entry["line"], entry["why"].partition(":")[0]) for entry in kept] == [
        (1, "malformed"),
        (2, "replaced by line 3"),
    ]


def test_failed_write_leaves_no_file_and_keeps_the_old_one(root, instance, monkeypatch):
    """Updates are written to a temporary file first."""
    materialize(root, instance, stage2_jsonl)
    before = root.stage2_jsonl.read_bytes()
    photos(root, "c")
    embed(root)
    seen = []

    def fail(path, lines, *, temporary, before):
        seen.append(temporary.name)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(merge, "replace_lines", fail)
    result = materialize(root, instance, stage2_jsonl)

    assert "No space left" in failure_of(result, "stage2_jsonl")
    assert seen == ["approved_image_dataset.jsonl.tmp"]
    assert root.stage2_jsonl.read_bytes() == before
    with Ledger(root.ledger) as ledger:
        assert claims(ledger) == [], "the next run does not wait for this one"


def test_temporary_file_of_a_killed_run_is_removed(root, instance):
    write_text(root.stage2_jsonl.with_name("approved_image_dataset.jsonl.tmp"), '{"image_id": "torn')

    materialize(root, instance, stage2_jsonl)

    assert sorted(path.name for path in root.derived.iterdir() if path.is_file()) == ["approved_image_dataset.jsonl"]


def test_downstream_asset_gets_the_path(root, instance):
    @dg.asset(io_manager_key="plain")
    def lines(stage2_jsonl):
        return [line.value["image_id"] for line in read_jsonl(stage2_jsonl)]

    result = materialize(root, instance, stage2_jsonl, lines, resources={"plain": dg.InMemoryIOManager()})

    assert result.output_for_node("lines") == ["a", "b"]
