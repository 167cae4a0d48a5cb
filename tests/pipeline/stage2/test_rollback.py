"""Rollback to Stage 1.

Spec: docs/spec/migration.md#rollback, docs/spec/migration.md#restoring-stage-1, docs/spec/migration.md#backup
"""

import json

import pytest

from imagemill.domain.embedding_specs import DINOV3
from imagemill.errors import ImagemillError, MissingInput
from imagemill.formats.jsonl import read_jsonl
from imagemill.formats.npy import NpyStore
from imagemill.fs.fingerprints import fingerprint_file
from imagemill.pipeline.stage2.merge import STAGE1, stage1_backup
from imagemill.pipeline.stage2.rollback import roll_back, stage2_backup
from imagemill.store.ledger import FileRow, Ledger
from tests.helpers.npy_files import write_npy
from tests.helpers.rot import rot
from tests.helpers.stage1 import stage1_record, vector
from tests.helpers.stage2 import record_of, write_text


def back(root, **options):
    with Ledger(root.ledger) as ledger:
        return roll_back(root, ledger, "run", **options)


def version_2(root, *ids):
    for number, image_id in enumerate(ids):
        write_npy(root.derived / "dinov3" / f"{image_id}.npy", vector(number))
        write_npy(root.derived / "vae_latents" / f"{image_id}.npy", vector(number))
    write_text(root.stage2_jsonl, *(json.dumps(record_of(image_id)) for image_id in ids))
    with Ledger(root.ledger) as ledger:
        ledger.record_setting(STAGE1, "migrated")


def test_backup_is_restored_and_the_version_2_file_is_kept(data_root):
    version_2(data_root, "a")
    newer = data_root.stage2_jsonl.read_bytes()
    stage1_backup(data_root.stage2_jsonl).write_bytes(b'{"image_path": "as it was"}\n{torn')

    counts = back(data_root)

    assert counts == {"records": 2, "from_backup": 1}
    assert data_root.stage2_jsonl.read_bytes() == b'{"image_path": "as it was"}\n{torn'
    assert stage2_backup(data_root.stage2_jsonl).read_bytes() == newer
    assert not stage1_backup(data_root.stage2_jsonl).exists()
    assert len(list(data_root.derived.rglob("*.npy"))) == 2, "npy files stay"


def test_rollback_without_a_backup_inlines_the_vectors_bit_for_bit(data_root):
    version_2(data_root, "a", "b")

    assert back(data_root) == {"records": 2, "from_backup": 0}

    for number, line in enumerate(read_jsonl(data_root.stage2_jsonl)):
        assert line.value["dinov3_embedding"] == vector(number).astype(float).tolist()
        assert line.value.keys() == stage1_record(0).keys()


def test_record_without_a_vector_stops_the_rollback_before_any_change(data_root):
    version_2(data_root, "a", "b", "c")
    (data_root.derived / "dinov3" / "a.npy").unlink()
    (data_root.derived / "dinov3" / "b.npy").write_bytes(b"torn")
    before = data_root.stage2_jsonl.read_bytes()

    with pytest.raises(ImagemillError, match="2 records have no valid vector to restore: a, b"):
        back(data_root)

    assert data_root.stage2_jsonl.read_bytes() == before


def test_damaged_vector_is_not_restored(data_root):
    """Size, time and inode match, and the values are valid: only the hash reveals the damage."""
    version_2(data_root, "a", "b")
    store = NpyStore(data_root.derived / "dinov3", DINOV3)
    with Ledger(data_root.ledger) as ledger:
        ledger.record_files(
            FileRow(DINOV3.kind, i, store.stat(i), None, fingerprint_file(store.path(i)), "m") for i in "ab"
        )
    rot(store.path("a"))

    with pytest.raises(ImagemillError, match="1 records have no valid vector to restore: a") as error:
        back(data_root)
    assert "imagemill stage2 --verify" in error.value.do


def test_rolled_back_file_is_not_rolled_back_again(data_root):
    version_2(data_root, "a")
    back(data_root)
    before = data_root.stage2_jsonl.read_bytes()

    assert back(data_root) == {"records": 0, "from_backup": 0}
    assert data_root.stage2_jsonl.read_bytes() == before


def test_embeddings_are_deleted_only_on_request(data_root):
    version_2(data_root, "a", "b")

    counts = back(data_root, delete_embeddings=True)

    assert counts["deleted_files"] == 4
    assert list(data_root.derived.rglob("*.npy")) == []
    assert [line.value["image_path"] for line in read_jsonl(data_root.stage2_jsonl)] == [
        "data/approved/a.png",
        "data/approved/b.png",
    ]


def test_root_without_a_migration_is_reported(data_root):
    with pytest.raises(MissingInput, match="no records to roll back"):
        back(data_root)
