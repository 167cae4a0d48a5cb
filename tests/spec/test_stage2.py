"""Every scenario of the Stage 2 format: one test each, named after it.

The runs are fixtures (tests/spec/conftest.py). Where docs/spec/stage2.md departs from the original, the test checks our rule
says and the docstring says so. Depth is elsewhere: tests/formats, tests/pipeline, tests/cli.
"""

import json
import os

import numpy as np
import pytest

from assets.embeddings import embedding_assets
from assets.stage2_jsonl import stage2_jsonl
from imagemill.domain.buckets import BUCKETS, assign_bucket, bucket_size
from imagemill.domain.embedding_specs import DINOV3, T5, VAE, embedding_specs
from imagemill.domain.ids import image_id_of
from imagemill.formats import diff_writer
from imagemill.formats.jsonl import read_jsonl
from imagemill.fs.fingerprints import posix_signature
from imagemill.pipeline.forecast import Forecast
from imagemill.pipeline.stage2.plan import Job
from imagemill.store.ledger import SourceRow
from imagemill.store.second_copy import NAME
from tests.helpers.product import snapshot
from tests.helpers.spec_runs import (
    FIELDS,
    INTERRUPTED_IMAGES,
    MEGAPIXEL,
    NEW,
    PORTRAIT,
    SAMPLES,
    counters,
    derived_files,
    ids_in,
    load,
    made,
    records,
    stage1_root,
    unfinished,
)
from tests.helpers.stage1 import stage1_record
from tests.helpers.stage2 import picture
from tests.helpers.wiring import history, materialize, stub_every_kind

HEADER = 128  # of an npy file
ALL_IDS = {f"photo{n:04d}" for n in range(INTERRUPTED_IMAGES)}


def size_of(root, spec, image_id):
    return (root.derived / spec.folder / f"{image_id}.npy").stat().st_size


# ---- directory structure organization


def test_output_directories_are_created(data_root, monkeypatch):
    """Directory structure organization: Output directories are created.

    Each when its pass begins: here nothing can be made, because the only file is no image.
    """
    stub_every_kind(monkeypatch)
    (data_root.approved / "a.png").write_bytes(b"no image")
    (data_root.approved / "a.txt").write_text("a caption")
    note = data_root.derived / "t5_hidden" / "a note of mine"
    note.parent.mkdir(parents=True)
    note.write_text("stays")

    with history("a") as instance:
        assert materialize(data_root, instance, *embedding_assets, keys=["a", "a"], deferred=True).success

    assert {path.name for path in data_root.derived.iterdir()} == {"dinov3", "vae_latents", "t5_hidden", NAME}
    assert derived_files(data_root) == {"t5_hidden/a note of mine": b"stays"}, "created only if they do not exist"


def test_jsonl_metadata_is_stored_separately_from_embeddings(samples):
    """Directory structure organization: JSONL metadata is stored separately from embeddings."""
    derived = samples.root.derived

    assert sorted(path.name for path in derived.iterdir() if path.is_file()) == [NAME, "approved_image_dataset.jsonl"]
    for folder in ("dinov3", "vae_latents", "t5_hidden"):
        assert len(list((derived / folder).glob("*.npy"))) == len(SAMPLES)


# ---- file naming convention


def test_image_id_is_derived_consistently(samples):
    """File naming convention: Image ID is derived consistently."""
    assert image_id_of("abc123xyz.jpg") == "abc123xyz"
    assert records(samples.root)["abc123xyz"]["image_path"] == "data/approved/abc123xyz.jpg"


def test_embedding_files_use_image_id_naming(samples):
    """File naming convention: Embedding files use image_id naming."""
    for name in ("dinov3/abc123xyz.npy", "vae_latents/abc123xyz.npy", "t5_hidden/abc123xyz.npy"):
        assert (samples.root.derived / name).is_file()
    for spec in embedding_specs():
        assert ids_in(samples.root, spec) == set(SAMPLES)


# ---- JSONL metadata format


def test_metadata_record_contains_required_fields(samples):
    """JSONL metadata format: Metadata record contains required fields."""
    record = records(samples.root)[PORTRAIT]

    assert set(record) == FIELDS
    assert record["caption"] == "noise of 768 by 1024 pixels"
    assert (record["height"], record["width"]) == (1024, 768)
    assert len(record["t5_attention_mask"]) == 77
    assert all(set(other) == FIELDS for other in records(samples.root).values())


def test_format_version_identifies_stage_2_records(samples, migrated):
    """JSONL metadata format: Format version identifies Stage 2 records. A number, not a text."""
    for ran in (samples, migrated):
        assert {json.dumps(record["format_version"]) for record in records(ran.root).values()} == {"2"}


def test_inline_embeddings_are_removed(migrated):
    """JSONL metadata format: Inline embeddings are removed. The only list that stays is the mask of 77."""
    assert b"dinov3_embedding" in migrated.before

    for record in records(migrated.root).values():
        assert "dinov3_embedding" not in record
        assert [name for name, value in record.items() if isinstance(value, list | dict)] == ["t5_attention_mask"]
        assert len(record["t5_attention_mask"]) == 77


# ---- the three kinds: shape, dtype and size, by the real model classes


def test_dinov3_file_has_correct_shape(samples):
    """DINOv3 embedding storage: DINOv3 file has correct shape."""
    for image_id in SAMPLES:
        vector = load(samples.root, DINOV3, image_id)
        assert (vector.shape, vector.dtype) == ((1024,), np.float32)


def test_dinov3_file_size_is_approximately_4kb(samples):
    """DINOv3 embedding storage: DINOv3 file size is approximately 4KB. The values, and the header of the format."""
    assert size_of(samples.root, DINOV3, PORTRAIT) == 1024 * 4 + HEADER


def test_vae_latent_has_correct_shape(samples):
    """VAE latent storage: VAE latent has correct shape. The original's 1024x768 has H=1024, W=768: the shape is (16, 128, 96)."""
    assert SAMPLES[PORTRAIT] == (768, 1024), "width, height"

    latent = load(samples.root, VAE, PORTRAIT)

    assert (latent.shape, latent.dtype) == ((16, 128, 96), np.float16)


def test_vae_latent_file_size_is_approximately_correct(samples):
    """VAE latent storage: VAE latent file size is approximately correct.

    Departure: 524,288 bytes for a 1024x1024 image by the shape rule; its 131 KB is 64x64 cells, not 128x128.
    """
    assert size_of(samples.root, VAE, MEGAPIXEL) == 16 * 128 * 128 * 2 + HEADER == 524_288 + HEADER


def test_t5_hidden_state_has_correct_shape(samples):
    """T5 hidden state storage: T5 hidden state has correct shape."""
    for image_id in SAMPLES:
        hidden = load(samples.root, T5, image_id)
        assert (hidden.shape, hidden.dtype) == ((77, 1024), np.float16)


def test_t5_hidden_state_file_size_is_approximately_158kb(samples):
    """T5 hidden state storage: T5 hidden state file size is approximately 158KB."""
    assert size_of(samples.root, T5, PORTRAIT) == 77 * 1024 * 2 + HEADER == 157_696 + HEADER


# ---- aspect ratio bucketing


def test_bucket_assignment_is_based_on_aspect_ratio(samples):
    """Aspect ratio bucketing: Bucket assignment is based on aspect ratio. Width over height; sizes do not matter."""
    found = records(samples.root)

    assert found["near_1024x1024"]["aspect_bucket"] == found[MEGAPIXEL]["aspect_bucket"] == "1024x1024"
    assert found[PORTRAIT]["aspect_bucket"] == "832x1216"
    # Halfway to the neighbours: (1 + 1216/832) / 2 = 1.2308 and (832/1216 + 1) / 2 = 0.8421.
    assert [assign_bucket(width, 1000) for width in (842, 843, 1230, 1231)] == [
        "832x1216", "1024x1024", "1024x1024", "1216x832",
    ]  # fmt: skip


def test_all_images_are_assigned_to_a_bucket(samples):
    """Aspect ratio bucketing: All images are assigned to a bucket."""
    seven = {"1024x1024", "832x1216", "1216x832", "768x1280", "1280x768", "704x1344", "1344x704"}

    assert len(records(samples.root)) == len(SAMPLES)
    assert {record["aspect_bucket"] for record in records(samples.root).values()} == seven


def test_bucket_dimensions_are_divisible_by_64(samples):
    """Aspect ratio bucketing: Bucket dimensions are divisible by 64."""
    assigned = {record["aspect_bucket"] for record in records(samples.root).values()}

    for bucket in assigned | set(BUCKETS):
        assert [side % 64 for side in bucket_size(bucket)] == [0, 0]


# ---- idempotent processing


@pytest.mark.parametrize("spec", embedding_specs(), ids=lambda spec: spec.kind)
def test_existing_embedding_file_is_not_regenerated(data_root, monkeypatch, spec):
    """Idempotent processing: Existing embedding file is not regenerated.

    Departure: a file that is valid and current, not one that merely exists. This one comes from another program.
    """
    stub_every_kind(monkeypatch)
    for image_id in "ab":
        picture(data_root.approved / f"{image_id}.png", size=(48, 32))
        (data_root.approved / f"{image_id}.txt").write_text("a caption")
    folder = data_root.derived / spec.folder
    folder.mkdir(parents=True)
    np.save(folder / "a.npy", np.full(spec.shape(32, 48), 0.25, spec.dtype))
    before = snapshot(folder)

    with history("a", "b") as instance:
        assert materialize(data_root, instance, *embedding_assets, keys=["a", "b"], deferred=True).success

    after = snapshot(folder)
    assert after.keys() - before.keys() == {str(folder / "b.npy")}
    assert {path: after[path] for path in before} == before, "bytes and modification time"


def test_partial_completion_can_be_resumed(interrupted):
    """Idempotent processing: Partial completion can be resumed.

    When it was interrupted some images had all three files, others two; the new ones had none.
    """
    done = interrupted.stopped_with
    assert 0 < len(done) < INTERRUPTED_IMAGES

    missing = INTERRUPTED_IMAGES - len(done) + len(NEW)
    assert made(interrupted.output) == {"dinov3_npy": len(NEW), "vae_latents": len(NEW), "t5_hidden": missing}
    after = snapshot(interrupted.root.derived)
    files = {path: kept for path, kept in interrupted.stopped.items() if path.endswith(".npy")}
    assert len(files) == 2 * INTERRUPTED_IMAGES + len(done)
    assert {path: after[path] for path in files} == files, "bytes and modification time"
    for spec in embedding_specs():
        assert ids_in(interrupted.root, spec) == ALL_IDS | set(NEW)
    assert counters(interrupted.output)["skipped"] == len(done)


# ---- atomic JSONL updates


def test_updates_are_written_to_temporary_file_first(tmp_path, monkeypatch):
    """Atomic JSONL updates: Updates are written to temporary file first.

    While passes run, finished work is in the ledger; then the next file of records is written under `.tmp`, flushed, and
    takes the main one's place in one rename.
    """
    stub_every_kind(monkeypatch)
    root, before = stage1_root(tmp_path / "data")
    flushed, seen = set(), []
    sync, replace = diff_writer.flush, os.replace

    def noted_sync(handle):
        flushed.add(os.fstat(handle).st_ino)
        sync(handle)

    def noted_replace(source, target, **how):
        if os.fspath(target) == str(root.stage2_jsonl):
            main = root.stage2_jsonl.read_bytes()
            seen.append(
                (os.fspath(source), os.stat(source).st_ino in flushed, list(read_jsonl(unfinished(root))), main)
            )
        replace(source, target, **how)

    monkeypatch.setattr(diff_writer, "flush", noted_sync)
    monkeypatch.setattr(os, "replace", noted_replace)
    keys = sorted(records(root))
    with history(*keys) as instance:
        assert materialize(root, instance, *embedding_assets, keys=keys, deferred=True).success
        assert root.stage2_jsonl.read_bytes() == before
        assert materialize(root, instance, stage2_jsonl).success

    ((temporary, on_disk, lines, main),) = seen
    assert temporary == f"{root.stage2_jsonl}.tmp"
    assert on_disk, "flushed before the rename"
    assert [line.value["format_version"] for line in lines] == [2] * 6, "whole before the rename"
    assert main == before, "untouched until the rename"
    assert list(read_jsonl(root.stage2_jsonl)) == lines
    assert not unfinished(root).exists()


def test_graceful_shutdown_merges_temporary_file(interrupted):
    """Atomic JSONL updates: Graceful shutdown merges temporary file. SIGINT to a process whose last pass is half done."""
    done = interrupted.stopped_with
    assert interrupted.while_running == interrupted.before, "the main file waits for the merge"

    assert interrupted.code == 130, interrupted.said
    assert "Traceback" not in interrupted.said
    assert not interrupted.left, "no .tmp"
    assert done
    assert interrupted.recorded.keys() == ALL_IDS
    assert {i for i, record in interrupted.recorded.items() if record.get("format_version") == 2} == done
    waiting = {image_id: stage1_record(int(image_id[-4:])) for image_id in ALL_IDS - done}
    assert {image_id: interrupted.recorded[image_id] for image_id in waiting} == waiting, "nothing is lost"


# ---- storage efficiency


def test_jsonl_size_is_reduced_significantly(migrated):
    """Storage efficiency: JSONL size is reduced significantly."""
    size = migrated.root.stage2_jsonl.stat().st_size

    assert 0 < size <= 0.1 * len(migrated.before)


def test_total_stage_2_storage_is_predictable(samples):
    """Storage efficiency: Total Stage 2 storage is predictable.

    Departure: 60,000 images of 1024x1024 take about 41 GB by the shape rules, not 18. The forecast that a
    command makes before it starts says the same as the files that it made.
    """
    images = 60_000
    line = len(json.dumps(records(samples.root)[MEGAPIXEL]).encode()) + 1
    gigabytes = {spec.kind: images * size_of(samples.root, spec, MEGAPIXEL) / 1e9 for spec in embedding_specs()}

    assert gigabytes == pytest.approx({"dinov3_npy": 0.25, "vae_latents": 31.5, "t5_hidden": 9.5}, rel=0.02)
    assert sum(gigabytes.values()) + images * line / 1e9 == pytest.approx(41.2, rel=0.01)
    seen = posix_signature(1, 2, 3)
    jobs = [
        Job(f"i{n}", f"i{n}.jpg", seen, SourceRow(f"i{n}", f"i{n}.jpg", seen, "", 1024, 1024), "a caption", None, None)
        for n in range(images)
    ]
    sizes = {job.image_id: (1024, 1024) for job in jobs}
    derived = samples.root.derived
    expected = Forecast(derived, state=samples.root.state)
    expected.add(dict.fromkeys(embedding_specs(), jobs), sizes)
    outputs = sum(need.bytes for need in expected.needs() if need.folder.is_relative_to(derived)) / 1e9
    assert outputs == pytest.approx(41.2, rel=0.03), "whole blocks of the disk"
