"""Migration from the monolithic Stage 1 file to version 2 and back.

Spec: docs/spec/migration.md#forward, docs/spec/migration.md#vectors, docs/spec/migration.md#migrated-records
"""

import json
import os
import random
import signal
import time

import numpy as np
import pytest

from imagemill.domain.layout import DataRoot
from imagemill.formats.jsonl import read_jsonl
from imagemill.formats.npy import read_npy
from tests.helpers.product import imagemill, photos, snapshot, start
from tests.helpers.stage1 import stage1_record, vector, write_stage1

IMAGES = 40


def stage2(root, *arguments, **options):
    done = imagemill("stage2", *arguments, "--data-root", root.path, stub=True, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def records(root):
    return {line.value["image_id"]: line.value for line in read_jsonl(root.stage2_jsonl)}


def backup(root, stage="stage1"):
    return root.stage2_jsonl.with_name(f"{root.stage2_jsonl.name}.{stage}.backup")


@pytest.fixture(scope="module")
def migrated(tmp_path_factory):
    """Eight images, ten records: a short vector, NaN, Infinity, a wrong height, no caption, and a broken line."""
    root = DataRoot(tmp_path_factory.mktemp("migrated") / "data")
    old = [stage1_record(n, score=n / 3, tags=["x"]) for n in range(10)]
    old[1]["dinov3_embedding"] = old[1]["dinov3_embedding"][:7]
    old[4]["dinov3_embedding"][3] = float("nan")
    old[7]["dinov3_embedding"][1000] = -float("inf")
    old[3]["height"] = 99
    old[5]["caption"] = " \n"
    lines = [*old[:4], b"{broken", *old[4:]]
    before = write_stage1(root, lines, images=8)
    assert b" NaN," in before, "as json.dumps writes them"
    assert b" -Infinity," in before
    (root.approved / "photo0006.txt").write_text("a newer  caption\n")
    return root, old, before, stage2(root)


def test_vectors_are_extracted_bit_for_bit_and_only_unusable_ones_computed(migrated):
    root, _, _, output = migrated

    for number in (0, 2, 3, 5, 6, 8, 9):
        assert read_npy(root.derived / "dinov3" / f"photo{number:04d}.npy").tobytes() == vector(number).tobytes()
    for number in (1, 4, 7):
        assert len(set(read_npy(root.derived / "dinov3" / f"photo{number:04d}.npy"))) == 1, "made by the stub encoder"
    assert "dinov3_npy 3 made in" in output
    assert "7 extracted, 3 replaced" in output


def test_records_become_version_2_and_keep_extra_fields(migrated):
    root, old, _, _ = migrated
    lines = {line.value.get("image_id", "photo0005"): line.value for line in read_jsonl(root.stage2_jsonl)}

    for number in (0, 1, 2, 3, 4, 7, 8, 9):
        record = lines[f"photo{number:04d}"]
        assert record["format_version"] == 2
        assert "dinov3_embedding" not in record
        assert (record["caption"], record["score"], record["tags"]) == (f"as  recorded {number} ", number / 3, ["x"])
        assert (record["height"], record["width"]) == (32, 48)
    assert lines["photo0006"]["caption"] == "a newer caption"
    assert lines["photo0005"] == old[5], "without a caption it stays as it is"


def test_every_image_is_counted_once_and_corrections_are_reported(migrated):
    """Photos 8 and 9 do not exist, so their latents cannot be made."""
    _, _, _, output = migrated

    assert "progress: 7 migrated, 2 enriched, 0 extracted, 0 skipped (total: 10)" in output
    assert "failed=1" in output
    assert "1 with a corrected height" in output
    assert "1 with a replaced caption" in output
    assert "1 line put into quarantine" in output
    assert "missing_caption  photo0005" in output


def test_original_is_kept_byte_for_byte_and_its_broken_line_twice(migrated):
    root, _, before, _ = migrated

    assert backup(root).read_bytes() == before
    kept = [line.value for line in read_jsonl(root.quarantine / "approved_image_dataset.jsonl.quarantine.jsonl")]
    broken = [line for line in kept if not line["why"].startswith("caption replaced")]
    assert [(line["line"], line["text"]) for line in broken] == [(5, "{broken")]


def test_jsonl_is_at_least_nine_tenths_smaller(tmp_path):
    """Spec: docs/spec/migration.md#migration-from-stage-1"""
    root = DataRoot(tmp_path / "data")
    before = write_stage1(root, [stage1_record(n) for n in range(12)])

    stage2(root)

    assert root.stage2_jsonl.stat().st_size <= 0.1 * len(before)


def test_second_run_changes_nothing(migrated):
    root, *_ = migrated
    before = snapshot(root.derived)

    output = stage2(root)

    assert snapshot(root.derived) == before
    assert "progress: 0 migrated, 0 enriched, 0 extracted, 9 skipped (total: 10) rate=0.0/s failed=1" in output


def test_rollback_restores_the_original_and_migration_can_be_repeated(tmp_path):
    root = DataRoot(tmp_path / "data")
    before = write_stage1(root, [stage1_record(0), b"{broken", stage1_record(1)])
    stage2(root)
    newer = snapshot(root.derived)
    version_2 = root.stage2_jsonl.read_bytes()

    output = stage2(root, "--rollback")
    assert "rolled back" in output
    assert root.stage2_jsonl.read_bytes() == before
    assert backup(root, "stage2").read_bytes() == version_2

    assert "0 made in 0 model calls" in stage2(root)
    assert root.stage2_jsonl.read_bytes() == version_2
    assert backup(root).read_bytes() == before
    assert {p: b for p, b in snapshot(root.derived).items() if p.endswith(".npy")} == {
        p: b for p, b in newer.items() if p.endswith(".npy")
    }


def test_rollback_can_delete_the_embeddings(tmp_path):
    root = DataRoot(tmp_path / "data")
    before = write_stage1(root, [stage1_record(n) for n in range(3)])
    stage2(root)

    output = stage2(root, "--rollback", "--delete-embeddings")

    assert "deleted 9 npy files" in output
    assert root.stage2_jsonl.read_bytes() == before
    assert not list(root.derived.rglob("*.npy"))
    assert "3 extracted" in stage2(root), "and migration makes them again"


ORDERS = [
    pytest.param(("dinov3", "vae", "t5", "migrate"), marks=pytest.mark.soak),
    ("migrate", "t5", "vae", "dinov3", "migrate"),
]


@pytest.mark.parametrize("order", ORDERS, ids=" ".join)
def test_any_order_of_passes_gives_the_result_of_all(migrated, tmp_path, order):
    """Spec: docs/spec/stage2.md#pass-names"""
    root, _, before, _ = migrated
    other = DataRoot(tmp_path / "data")
    write_stage1(other, [], images=8)
    photos(other.approved, 8)
    for caption in other.approved.glob("*.txt"):
        caption.unlink()
    (other.approved / "photo0006.txt").write_text("a newer  caption\n")
    other.stage2_jsonl.write_bytes(before)

    outputs = {}
    for name in order:
        done = imagemill("stage2", "--pass", name, "--data-root", other.path, stub=True)
        outputs.setdefault(name, done.stdout)

    assert done.returncode == 0, done.stdout + done.stderr
    found = {p.removeprefix(str(other.derived)): b for p, (b, _) in snapshot(other.derived).items()}
    assert found == {p.removeprefix(str(root.derived)): b for p, (b, _) in snapshot(root.derived).items()}
    if order[0] == "dinov3":
        assert "progress: 0 migrated, 3 enriched, 7 extracted, 0 skipped (total: 10)" in outputs["dinov3"]


def test_migrate_pass_loads_no_embedding_model(tmp_path):
    """A record with an unusable vector is kept and names the required pass. Only the tokenizer is available."""
    root = DataRoot(tmp_path / "data")
    write_stage1(root, [stage1_record(0), stage1_record(1, dinov3_embedding=[0.5])])
    nowhere = {kind: {"model": str(tmp_path / "nowhere")} for kind in ("dinov3_npy", "vae_latents")}
    root.config_file.write_text(json.dumps({"encoders": nowhere}))

    done = imagemill("stage2", "--pass", "migrate", "--data-root", root.path)

    assert done.returncode == 1, done.stdout + done.stderr
    assert "unusable_vector" in done.stdout
    assert "run imagemill stage2 --pass dinov3" in done.stdout
    assert [line.value.get("format_version") for line in read_jsonl(root.stage2_jsonl)] == [2, None]
    assert np.array_equal(read_npy(root.derived / "dinov3" / "photo0000.npy"), vector(0))


def test_limit_migrates_the_given_number_of_records(tmp_path):
    root = DataRoot(tmp_path / "data")
    before = write_stage1(root, [stage1_record(n) for n in range(6)])

    stage2(root, "--limit", 2)
    assert [line.value.get("format_version") for line in read_jsonl(root.stage2_jsonl)] == [
        2,
        2,
        None,
        None,
        None,
        None,
    ]
    stage2(root, "--limit", 2)
    stage2(root)

    assert all(record["format_version"] == 2 for record in records(root).values())
    assert backup(root).read_bytes() == before


def test_records_follow_outputs_on_another_disk(tmp_path):
    """Spec: docs/spec/migration.md#forward"""
    root, disk = DataRoot(tmp_path / "data"), tmp_path / "disk2" / "out"
    before = write_stage1(root, [stage1_record(n) for n in range(3)])

    done = imagemill("stage2", "--output-base-dir", disk, "--data-root", root.path, stub=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"derived: in {disk} from now on" in done.stderr

    assert root.stage2_jsonl.read_bytes() == before, "the old file is left alone"
    assert sum(1 for _ in disk.rglob("*.npy")) == 9
    assert not list(root.derived.rglob("*.npy"))
    done = imagemill("run", "--data-root", root.path, stub=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 made in 0 model calls" in done.stdout, "remembered"
    assert "3 samples" in done.stdout
    assert imagemill("verify", "--data-root", root.path).returncode == 0


# ---- killed


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    root = DataRoot(tmp_path_factory.mktemp("undisturbed") / "data")
    write_stage1(root, [stage1_record(n) for n in range(IMAGES)])
    stage2(root)
    return {p.removeprefix(str(root.derived)): b for p, (b, _) in snapshot(root.derived).items()}


def kill_migration(root, undisturbed, seed):
    before = write_stage1(root, [stage1_record(n) for n in range(IMAGES)])
    moment = random.Random(seed)
    process = start("stage2", "--data-root", root.path, IMAGEMILL_STUB_SLEEP=0.01)
    files = moment.randrange(3 * IMAGES)
    while process.poll() is None and sum(1 for _ in root.derived.glob("*/*.npy")) < files:
        time.sleep(0.01)
    time.sleep(moment.uniform(0, 0.5))
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    originals = [path for path in (root.stage2_jsonl, backup(root)) if path.exists() and path.read_bytes() == before]
    assert originals, "the original is there at every moment"

    stage2(root)

    assert {p.removeprefix(str(root.derived)): b for p, (b, _) in snapshot(root.derived).items()} == undisturbed


@pytest.mark.parametrize("seed", range(1))
def test_killed_migration_is_completed_by_the_next_run(data_root, undisturbed, seed):
    """kill -9 at a random moment."""
    kill_migration(data_root, undisturbed, seed)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(100, 120))
def test_killed_migration_is_completed_by_the_next_run_twenty_times(data_root, undisturbed, seed):
    kill_migration(data_root, undisturbed, seed)
