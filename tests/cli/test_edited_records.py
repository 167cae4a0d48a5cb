"""Captions edited in the records: used byte for byte, also in the shards, without any loss.

Spec: docs/spec/stage2.md#edited-records
"""

import json

import pytest

from imagemill.domain.embedding_specs import T5
from imagemill.formats.npy import NpyStore
from imagemill.pipeline.stage2.merge import stage1_backup
from imagemill.reading import ShardSet
from tests.helpers.commands import called
from tests.helpers.stage2 import photos
from tests.helpers.stubs import stub_captioner
from tests.helpers.wiring import stub_every_kind

EDIT = "edited\tby hand,\nwith its white space "


@pytest.fixture
def root(data_root, monkeypatch):
    """Two images whose captions are only in Stage 1 records."""
    stub_every_kind(monkeypatch)
    stub_captioner(monkeypatch.setattr)
    photos(data_root, "a", "b", size=(24, 24), captions=False)
    write_stage1(data_root, {"a": "first a", "b": "first b"})
    assert called(data_root, "run").code == 0
    return data_root


def write_stage1(root, captions):
    lines = [{"image_path": f"data/approved/{i}.png", "caption": text} for i, text in captions.items()]
    root.derived.mkdir(exist_ok=True)
    root.stage2_jsonl.write_text("".join(f"{json.dumps(line)}\n" for line in lines))


def captions(root):
    records = map(json.loads, root.stage2_jsonl.read_text().splitlines())
    return {record["image_id"]: record["caption"] for record in records}


def packed(root):
    shards = ShardSet.open(root.shards, allow_preview=True)
    return {image_id: shards[image_id]["caption"] for image_id in shards}


def edit(root, image_id, text):
    records = [json.loads(line) for line in root.stage2_jsonl.read_text().splitlines()]
    lines = [{**record, "caption": text} if record["image_id"] == image_id else record for record in records]
    root.stage2_jsonl.write_text("".join(f"{json.dumps(line)}\n" for line in lines))


def test_edit_reaches_records_text_embedding_and_shards(root):
    store = NpyStore(root.derived / T5.folder, T5)
    before = {i: store.path(i).read_bytes() for i in "ab"}
    edit(root, "a", EDIT)

    done = called(root, "run")

    assert done.code == 0, done.text
    assert captions(root) == packed(root) == {"a": EDIT, "b": "first b"}
    assert store.path("a").read_bytes() != before["a"]
    assert store.path("b").read_bytes() == before["b"]
    assert "first a" in "".join(path.read_text() for path in root.quarantine.glob("*.jsonl"))
    assert "caption_replaced" not in done.text


def test_newer_stage1_export_replaces_the_captions(root):
    write_stage1(root, {"a": "second a", "b": "first b"})

    assert called(root, "run").code == 0

    assert captions(root) == packed(root) == {"a": "second a", "b": "first b"}


def test_rollback_restores_the_old_captions_permanently(root):
    edit(root, "a", EDIT)
    assert called(root, "run").code == 0
    assert stage1_backup(root.stage2_jsonl).is_file()

    assert called(root, "stage2", "--rollback").code == 0
    assert called(root, "run").code == 0

    assert captions(root) == packed(root) == {"a": "first a", "b": "first b"}


def test_caption_of_a_record_replaced_by_a_sidecar_is_quarantined(root):
    (root.approved / "a.txt").write_text("from the sidecar")

    done = called(root, "run")

    assert captions(root)["a"] == packed(root)["a"] == "from the sidecar"
    assert "1 with a replaced caption" in done.text
    assert "first a" in "".join(path.read_text() for path in root.quarantine.glob("*.jsonl"))
