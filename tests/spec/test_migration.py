"""Every decision, mitigation, phase and goal of the migration from Stage 1: one test each, named after it.

The runs are fixtures (tests/spec/conftest.py, and below). Where docs/spec/migration.md departs from the original, the test
checks our rule and its docstring says so. Depth is elsewhere: tests/cli/test_migration.py, tests/pipeline, tests/encoders.
"""

import gc
import io
import json
import weakref
from dataclasses import dataclass, replace

import numpy as np
import pytest

from assets.embeddings import embedding_assets
from assets.latent_statistics import latent_statistics
from imagemill.config import Config
from imagemill.domain.buckets import BUCKETS, bucket_size
from imagemill.domain.embedding_specs import DINOV3, T5, VAE, EmbeddingSpec, embedding_specs
from imagemill.domain.encoder_settings import EncoderSettings
from imagemill.formats.images import open_rgb
from imagemill.pipeline.curation.latent_statistics import read_statistics, statistics_path
from imagemill.pipeline.stage2.passes import Passes
from imagemill.store.second_copy import NAME
from tests.helpers.product import photos, snapshot
from tests.helpers.spec_runs import (
    FIELDS,
    LATER,
    PANORAMA,
    PORTRAIT,
    SAMPLES,
    STAGE_1_IMAGES,
    STAGE_1_RECORDS,
    Ran,
    copy_of,
    counters,
    derived_files,
    ids_in,
    load,
    made,
    product,
    records,
    stage1_backup,
    stage1_root,
)
from tests.helpers.stage1 import stage1_record, vector
from tests.helpers.stage2 import embed, identity_of, picture
from tests.helpers.stage2 import photos as pictures
from tests.helpers.stage2 import stage2 as stage2_in_process
from tests.helpers.stubs import StubEncoder
from tests.helpers.wiring import failure_of, history, materialize, stub_every_kind

JSONL = "approved_image_dataset.jsonl"
IDS = [f"photo{n:04d}" for n in range(STAGE_1_RECORDS)]
WITH_IMAGE = IDS[:STAGE_1_IMAGES]


@dataclass(frozen=True)
class Step:
    """One phase: what the command said, what lay below `derived/` afterwards."""

    output: str
    derived: dict[str, bytes]

    def folders(self):
        return {path.split("/")[0] for path in self.derived if "/" in path}


@dataclass(frozen=True)
class Phases:
    """The migration plan, command by command; `before`: the Stage 1 file."""

    before: bytes
    steps: dict[str, Step]


@pytest.fixture(scope="module")
def phases(tmp_path_factory) -> Phases:
    """`--pass dinov3`, `vae`, `t5`, `migrate`, on the data that `migrated` does in one command."""
    root, before = stage1_root(tmp_path_factory.mktemp("phases") / "data")
    steps = {}
    for name in ("dinov3", "vae", "t5", "migrate"):
        output = product(root, "stage2", "--pass", name)
        steps[name] = Step(output, derived_files(root))
    return Phases(before, steps)


@pytest.fixture(scope="module")
def touched(migrated, tmp_path_factory) -> tuple[Ran, dict]:
    """The migrated root after one latent went and one photo came, run again; and every file of its outputs before that."""
    root = copy_of(migrated.root, tmp_path_factory.mktemp("touched") / "data")
    (root.derived / "vae_latents" / "photo0001.npy").unlink()
    picture(root.approved / "photo0009.jpg", size=(48, 32), seed=9)
    (root.approved / "photo0009.txt").write_text("a new one")
    before = snapshot(root.derived)
    return Ran(root, product(root, "stage2")), before


def passes_here(root, ids, *assets):
    """Assets run by Dagster in this process."""
    with history(*ids) as instance:
        return materialize(root, instance, *assets, keys=[ids[0], ids[-1]], deferred=True)


# ---- goals


def test_goal_stage_1_is_migrated_without_data_loss(migrated):
    """Goals: Migrate existing JSONL to Stage 2 format without data loss. The record whose image is gone included."""
    found = records(migrated.root)

    assert list(found) == IDS
    for number, image_id in enumerate(IDS):
        old = stage1_record(number, score=number / 3)
        kept = {name: found[image_id][name] for name in ("image_path", "caption", "height", "width", "score")}
        assert kept == {name: old[name] for name in kept}
        assert load(migrated.root, DINOV3, image_id).tobytes() == vector(number).tobytes()


def test_goal_every_image_gets_a_vae_latent(samples, migrated):
    """Goals: Generate VAE latents for all images using Flux VAE encoder."""
    assert ids_in(samples.root, VAE) == set(SAMPLES)
    assert ids_in(migrated.root, VAE) == set(WITH_IMAGE), "pixels that are gone cannot be encoded"
    identity = identity_of(samples.root, "vae_latents")
    assert identity.preview
    assert identity.facts["scaling_factor"] == 0.3611, "Flux's own"


def test_goal_every_caption_gets_hidden_states(samples, migrated):
    """Goals: Generate T5 hidden states for all captions. Those of records whose image is gone, too."""
    assert ids_in(samples.root, T5) == set(SAMPLES)
    assert ids_in(migrated.root, T5) == set(IDS)


def test_goal_dinov3_embeddings_become_separate_files(migrated):
    """Goals: Extract DINOv3 embeddings to separate .npy files. Taken out, not computed."""
    assert ids_in(migrated.root, DINOV3) == set(IDS)
    assert "dinov3_npy 0 made in 0 model calls, 6 extracted" in migrated.output


def test_goal_bucket_is_recorded(samples):
    """Goals: Add aspect ratio bucketing (record bucket assignment in JSONL)."""
    found = records(samples.root)

    assert {bucket: found[f"near_{bucket}"]["aspect_bucket"] for bucket in BUCKETS} == {b: b for b in BUCKETS}


def test_goal_operation_is_idempotent(touched):
    """Goals: Idempotent operation (skip existing .npy files, resume from crash). Only what was missing is made."""
    ran, before = touched

    assert made(ran.output) == {"dinov3_npy": 1, "vae_latents": 2, "t5_hidden": 1}
    after = snapshot(ran.root.derived)
    changed = {path for path in before if after.get(path) != before[path]}
    assert changed - {str(ran.root.derived / NAME)} == {str(ran.root.stage2_jsonl)}
    assert len(after) - len(before) == 4


def test_goal_jsonl_shrinks(migrated):
    """Goals: Shrink JSONL from ~2GB to ~5-10MB. For the original's 1,444 records; a mask of 77 alone takes 155 bytes."""
    size = migrated.root.stage2_jsonl.stat().st_size

    assert size / STAGE_1_RECORDS * 1444 < 10e6
    assert size <= 0.05 * len(migrated.before)


# ---- decisions


def test_decision_1_three_pass_architecture(migrated, phases):
    """Decision 1: Three-Pass Architecture (Optional). Pass after pass gives what one command without a flag gives.

    Departure: models are not all resident by default; passes stream one after another where memory asks.
    """
    assert phases.steps["migrate"].derived == derived_files(migrated.root)
    assert Passes.named([]) == Passes.named(["dinov3", "vae", "t5", "migrate"]) == Passes.named(["all"])
    assert [spec.pass_name for spec in Passes.named(["t5", "dinov3"]).specs] == ["dinov3", "t5"]


def test_decision_2_aspect_ratio_bucketing_strategy(samples):
    """Decision 2: Aspect Ratio Bucketing Strategy. Seven, each of about a megapixel, sides in steps of 64; nearest ratio."""
    ratios = {
        bucket: width / height for bucket, (width, height) in zip(BUCKETS, map(bucket_size, BUCKETS), strict=True)
    }

    assert [f"{ratio:.2f}" for ratio in ratios.values()] == ["1.00", "0.68", "1.46", "0.60", "1.67", "0.52", "1.91"]
    for bucket in BUCKETS:
        width, height = bucket_size(bucket)
        assert (width % 64, height % 64) == (0, 0)
        assert 0.9 < width * height / 1024**2 <= 1
    for image_id, record in records(samples.root).items():
        width, height = SAMPLES[image_id]
        assert record["aspect_bucket"] == min(ratios, key=lambda bucket: abs(ratios[bucket] - width / height))


def test_decision_3_vae_latent_encoding(samples):
    """Decision 3: VAE Latent Encoding. At the original size, 16 channels, float16; the mean, not scaled."""
    assert (VAE.default_model, VAE.default_subfolder) == ("black-forest-labs/FLUX.1-dev", "vae")
    for image_id, (width, height) in SAMPLES.items():
        latent = load(samples.root, VAE, image_id)
        assert (latent.shape, latent.dtype) == ((16, height // 8, width // 8), np.float16)
    facts = identity_of(samples.root, "vae_latents").facts
    assert (facts["output"], facts["scaled"]) == ("posterior mean", False)


def test_decision_4_t5_hidden_state_generation(samples):
    """Decision 4: T5 Hidden State Generation. The whole sequence of the full encoder; zeros where the mask is 0."""
    assert T5.default_model == "google-t5/t5-large"
    for image_id, record in records(samples.root).items():
        hidden = load(samples.root, T5, image_id)
        assert (hidden.shape, hidden.dtype) == ((77, 1024), np.float16)
        assert hidden.any(axis=1).tolist() == [bool(used) for used in record["t5_attention_mask"]]
        used = hidden[: sum(record["t5_attention_mask"])]
        assert len(np.unique(used, axis=0)) == len(used) > 5, "one state per token, not one pooled vector"


def test_decision_5_file_naming_and_directory_structure(samples):
    """Decision 5: File Naming and Directory Structure. Flat, three folders, `image_id` as the name."""
    expected = {f"{folder}/{image_id}.npy" for folder in ("dinov3", "vae_latents", "t5_hidden") for image_id in SAMPLES}

    assert derived_files(samples.root).keys() == expected | {JSONL}
    for image_id, record in records(samples.root).items():
        assert record["image_path"] == f"data/approved/{image_id}.jpg"


def test_decision_6_jsonl_format_migration_strategy(migrated):
    """Decision 6: JSONL Format Migration Strategy. Three fields come, one goes, the rest stays as it was.

    Departure: height, width and mask are corrected where image or tokenizer disagree; here only the mask does, and the
    record whose image is gone keeps its size.
    """
    for number, image_id in enumerate(IDS):
        old, new = stage1_record(number, score=number / 3), records(migrated.root)[image_id]
        assert new.keys() == FIELDS | {"score"}
        assert new.keys() - old.keys() == {"image_id", "aspect_bucket", "format_version"}
        assert old.keys() - new.keys() == {"dinov3_embedding"}
        assert (new["image_id"], new["aspect_bucket"], new["format_version"]) == (image_id, "1216x832", 2)
        assert {name for name in old.keys() & new.keys() if old[name] != new[name]} <= {"t5_attention_mask"}
    assert stage1_backup(migrated.root).read_bytes() == migrated.before


def test_decision_7_idempotency_and_resumption(data_root, monkeypatch):
    """Decision 7: Idempotency and Resumption. Per record and kind; a kind that nothing needs loads no model.

    Departure: a valid file that is up to date counts as done, not one that exists.
    """
    loaded = []

    class Encoder(StubEncoder):
        @classmethod
        def load(cls, settings, *, spec, **given):
            loaded.append(spec.kind)
            return super().load(settings, spec=spec, **given)

        def encode(self, batch):
            loaded.extend("one" for _ in batch)
            return super().encode(batch)

    stage2_in_process(data_root, *"abc")
    stub_every_kind(monkeypatch, Encoder)
    assert passes_here(data_root, "abc", *embedding_assets).success
    assert loaded == [], "all complete"

    (data_root.derived / "vae_latents" / "b.npy").unlink()
    truncated = data_root.derived / "t5_hidden" / "c.npy"
    truncated.write_bytes(truncated.read_bytes()[:1000])
    assert passes_here(data_root, "abc", *embedding_assets).success
    # In Dagster's order, that of the names. The empty caption is computed with the first caption of a model.
    assert loaded == ["t5_hidden", "one", "one", "vae_latents", "one"]
    assert load(data_root, T5, "c").shape == (77, 1024), "it exists, but was not complete"


def test_decision_8_batch_processing_and_progress_tracking(data_root, phases, touched):
    """Decision 8: Batch Processing and Progress Tracking. Four counters that add up, with what failed, and a rate.

    Departure: batches by pixel budget and configuration, not always 4.
    """
    sizes = []

    class Encoder(StubEncoder):
        def encode(self, batch):
            sizes.append(len(batch))
            return super().encode(batch)

    pictures(data_root, *"abcdefghi")
    embed(data_root, DINOV3, encoder=Encoder, batch_size=4)
    embed(data_root, VAE, encoder=Encoder, batch_size=4, batch_pixels=2 * 32 * 24)
    assert sizes == [1, 4, 4, 1, 2, 2, 2, 2], "the first one alone"

    ran, _ = touched
    assert counters(phases.steps["dinov3"].output) == {
        "migrated": 0, "enriched": 0, "extracted": 6, "skipped": 0, "total": 6, "failed": 0,
    }  # fmt: skip
    assert counters(ran.output) == {
        "migrated": 1, "enriched": 1, "extracted": 0, "skipped": 5, "total": 7, "failed": 0,
    }  # fmt: skip
    assert "skipped (total: 7) rate=" in ran.output


# ---- risk: Flux VAE model compatibility with ROCm


class NoKernel(StubEncoder):
    """A VAE that cannot run on this device."""

    tried: list[int]

    def encode(self, batch):
        self.tried.append(len(batch))
        raise RuntimeError("HIP error: invalid device function")


@pytest.fixture
def unusable_vae(data_root, monkeypatch):
    """Nine pictures, and the message of the pass that failed on them; `.tried`: sizes of the batches it was called with."""
    monkeypatch.setattr(NoKernel, "tried", [], raising=False)
    monkeypatch.setattr(EmbeddingSpec, "encoder_class", lambda self: NoKernel if self == VAE else StubEncoder)
    (data_root.path / "imagemill.yaml").write_text("encoders: {vae_latents: {model: black-forest-labs/FLUX.1-dev}}")
    pictures(data_root, *"abcdefghi")
    result = passes_here(data_root, "abcdefghi", *embedding_assets)
    assert not result.success
    return failure_of(result, "vae_latents")


def test_mitigation_vae_is_tried_on_a_single_image_first(samples, unusable_vae):
    """Flux VAE Model Compatibility with ROCm: Test VAE encoding on single image before batch processing.

    Three images are tried, so that one bad image condemns no model.
    """
    assert NoKernel.tried == [1, 1, 1]
    assert "vae_latents 10 made in" in samples.output, "what a working model makes of the first image is kept"


def test_mitigation_no_other_vae_steps_in(data_root, unusable_vae):
    """Flux VAE Model Compatibility with ROCm: Have fallback to SD3 VAE if Flux VAE fails.

    Departure: not done, another latent space is never mixed in. The other kinds are made all the same.
    """
    assert ids_in(data_root, VAE) == set()
    assert ids_in(data_root, DINOV3) == ids_in(data_root, T5) == set("abcdefghi")


def test_mitigation_error_names_the_model_and_the_details(unusable_vae):
    """Flux VAE Model Compatibility with ROCm: Log clear error messages with model name and error details."""
    for part in (
        "vae_latents",
        "black-forest-labs/FLUX.1-dev",
        "does not run on cpu",
        "HIP error: invalid device function",
    ):
        assert part in unusable_vae
    assert "imagemill.yaml" in unusable_vae, "and what to do"


# ---- risk: disk space exhaustion


def test_mitigation_disk_space_is_checked_before_starting(data_root, monkeypatch):
    """18GB Disk Space Exhaustion: Check available disk space before starting (abort if < 20GB free).

    Departure: compared with the forecast of this job, half a megabyte for three small images, not with a constant.
    """
    photos(data_root.approved, 3)
    free = "imagemill.pipeline.forecast.free_bytes"

    monkeypatch.setattr(free, lambda folder: 100_000)
    said = product(data_root, "stage2", code=1)
    assert "this job needs about" in said
    assert "100.0 kB are free" in said
    assert not list(data_root.derived.rglob("*.npy"))

    monkeypatch.setattr(free, lambda folder: 10_000_000)
    product(data_root, "stage2")
    assert len(list(data_root.derived.rglob("*.npy"))) == 9, "far less than 20 GB, and enough"


def test_mitigation_work_can_be_done_in_chunks(samples, data_root):
    """18GB Disk Space Exhaustion: Process in chunks (e.g., 10k images at a time) if space is tight. `--limit N`, repeated."""
    assert LATER not in records(samples.root), "ten of eleven"
    photos(data_root.approved, 3)

    product(data_root, "stage2", "--limit", 2)
    assert sorted(records(data_root)) == ["photo0000", "photo0001"]
    first = {path: file for path, file in snapshot(data_root.derived).items() if path.endswith(".npy")}
    assert len(first) == 6

    product(data_root, "stage2", "--limit", 2)
    assert sorted(records(data_root)) == ["photo0000", "photo0001", "photo0002"]
    both = snapshot(data_root.derived)
    assert {path: both[path] for path in first} == first, "a finished chunk is left alone"


def test_mitigation_outputs_may_go_to_another_disk(data_root, tmp_path):
    """18GB Disk Space Exhaustion: Provide `--output-base-dir` flag to write to different disk if needed."""
    photos(data_root.approved, 2)
    disk = tmp_path / "disk2"

    product(data_root, "stage2", "--output-base-dir", disk)

    assert sorted(path.name for path in disk.iterdir()) == [NAME, JSONL, "dinov3", "t5_hidden", "vae_latents"]
    assert len(list(disk.glob("*/*.npy"))) == 6
    assert not data_root.derived.exists()


# ---- risk: partial migration state confusion


def test_mitigation_original_is_never_deleted(phases, migrated, interrupted):
    """Partial Migration State Confusion: Never delete original JSONL until migration 100% complete. Nor after that."""
    backup = f"{JSONL}.stage1.backup"
    for name, step in phases.steps.items():
        assert step.derived[backup if name == "migrate" else JSONL] == phases.before
        assert (backup in step.derived) == (name == "migrate"), "made by the first merge that changes a record"
    for ran in (migrated, interrupted):
        assert stage1_backup(ran.root).read_bytes() == ran.before
    assert interrupted.stopped[str(stage1_backup(interrupted.root))][0] == interrupted.before


def test_mitigation_format_version_identifies_the_state(interrupted):
    """Partial Migration State Confusion: Use `format_version` field to identify migration state. In the middle of it."""
    states = {2: set(), None: set()}
    for image_id, record in interrupted.recorded.items():
        states[record.get("format_version")].add(image_id)
        assert ("dinov3_embedding" in record) == ("format_version" not in record)

    assert states[2] == interrupted.stopped_with
    assert all(states.values()), "both are there"
    assert {record["format_version"] for record in records(interrupted.root).values()} == {2}, "and at its end"


def test_mitigation_verify_scans_and_checks(samples, tmp_path):
    """Partial Migration State Confusion: Provide `--verify` flag to scan JSONL and check .npy files consistency."""
    assert "10 checked, 0 errors" in product(samples.root, "stage2", "--verify")
    root = copy_of(samples.root, tmp_path / "data")
    (root.derived / "dinov3" / "near_1024x1024.npy").unlink()
    np.save(root.derived / "vae_latents" / "near_832x1216.npy", np.full((16, 9, 6), np.nan, np.float16))
    cut = root.derived / "t5_hidden" / f"{PORTRAIT}.npy"
    cut.write_bytes(cut.read_bytes()[:-2])

    said = product(root, "stage2", "--verify", code=1)

    assert "3 errors" in said
    for rule, image_id in {
        "missing_file": "near_1024x1024",
        "non_finite": "near_832x1216",
        "truncated": PORTRAIT,
    }.items():
        assert any(rule in line and image_id in line for line in said.splitlines()), said


# ---- risk: T5-Large model memory footprint


class Watched(StubEncoder):
    """Says when it is loaded and closed, and who else was still in memory when it was loaded."""

    events: list[str]
    alive: list

    @classmethod
    def load(cls, settings, *, spec, **given):
        gc.collect()
        cls.events += [f"beside {seen().spec.kind}" for seen in cls.alive if seen() is not None]
        encoder = super().load(settings, spec=spec, **given)
        cls.events.append(f"load {spec.kind}")
        cls.alive.append(weakref.ref(encoder))
        return encoder

    def close(self):
        self.events.append(f"close {self.spec.kind}")


@pytest.fixture
def watched(monkeypatch):
    monkeypatch.setattr(Watched, "events", [], raising=False)
    monkeypatch.setattr(Watched, "alive", [], raising=False)
    stub_every_kind(monkeypatch, Watched)
    return Watched.events


def test_mitigation_models_are_loaded_one_at_a_time(data_root, watched):
    """T5-Large Model Memory Footprint: Use three-pass architecture (only one model loaded at a time). In a run of all."""
    pictures(data_root, *"abc")

    assert passes_here(data_root, "abc", *embedding_assets).success

    kinds = [event.removeprefix("load ") for event in watched if event.startswith("load ")]
    assert sorted(kinds) == sorted(spec.kind for spec in embedding_specs())
    opened_and_closed = [event for event in watched if "beside" not in event]
    assert opened_and_closed == [f"{what} {kind}" for kind in kinds for what in ("load", "close")]


def test_mitigation_models_are_freed_between_passes(data_root, watched, monkeypatch):
    """T5-Large Model Memory Footprint: Explicit `del model; torch.cuda.empty_cache()` between passes."""
    pictures(data_root, *"abc")
    assert passes_here(data_root, "abc", *embedding_assets).success
    assert [event for event in watched if "beside" in event] == [], "no encoder is alive after its pass"
    monkeypatch.undo()

    import torch

    emptied = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for spec in embedding_specs():
        encoder = object.__new__(spec.encoder_class())
        encoder._model = torch.nn.Identity()
        model = weakref.ref(encoder._model)
        # The model is garbage by then, so the cache can be emptied.
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda model=model: emptied.append(model() is None))
        encoder.close()
    assert emptied == [True, True, True]


def test_mitigation_passes_run_independently(data_root):
    """T5-Large Model Memory Footprint: Allow `--passes` flag to run specific passes independently if needed."""
    photos(data_root.approved, 2)

    output = product(data_root, "stage2", "--passes", "t5,vae")

    assert made(output) == {"dinov3_npy": 0, "vae_latents": 2, "t5_hidden": 2}
    assert sorted(path.name for path in data_root.derived.iterdir()) == [NAME, JSONL, "t5_hidden", "vae_latents"]


# ---- trade-offs


def test_trade_off_external_files_versus_inline(samples, migrated, touched):
    """Trade-off: External Files vs Inline. 95% smaller JSONL, three files per image that NumPy reads, each made by itself."""
    assert migrated.root.stage2_jsonl.stat().st_size <= 0.05 * len(migrated.before)
    assert len(list(samples.root.derived.rglob("*.npy"))) == 3 * len(SAMPLES)
    for spec in embedding_specs():
        assert np.load(samples.root.derived / spec.folder / f"{PORTRAIT}.npy", allow_pickle=False, mmap_mode="r").size
    ran, before = touched
    again = ran.root.derived / "vae_latents" / "photo0001.npy"
    assert str(again) not in before
    assert again.read_bytes() == (migrated.root.derived / "vae_latents" / "photo0001.npy").read_bytes()


def test_trade_off_float16_precision_loss(samples):
    """Trade-off: Float16 Precision Loss. Half the bytes of float32; each value within half a step of what the model said."""
    root = samples.root
    inputs = {VAE: open_rgb(root.approved / "near_832x1216.jpg"), T5: "noise of 52 by 76 pixels"}
    for spec, item in inputs.items():
        full = replace(spec, dtype="float32")
        encoder = spec.encoder_class().load(EncoderSettings(), spec=full, threads=1, preview_root=root.preview_models)
        (exact,) = encoder.encode([encoder.prepare(item)])
        encoder.close()
        stored = load(root, spec, "near_832x1216")
        assert exact.dtype == np.float32
        assert 2 * stored.nbytes == exact.nbytes
        assert np.isfinite(stored).all()
        # float16 has 11 bits of precision; the rest is for the last bits of another number of threads.
        np.testing.assert_allclose(stored.astype(np.float32), exact, rtol=2**-11 + 1e-5, atol=1e-5)


# ---- migration plan


def test_phase_1_validation(samples):
    """Phase 1: Validation (Manual). Ten sample images: files of the right shape, not NaN or Inf; records with their fields."""
    found = records(samples.root)

    assert found.keys() == set(SAMPLES)
    for image_id, record in found.items():
        assert record.keys() == FIELDS
        assert record["format_version"] == 2
        for spec in embedding_specs():
            array = load(samples.root, spec, image_id)
            assert array.shape == spec.shape(record["height"], record["width"])
            assert array.dtype == spec.dtype
            assert np.isfinite(array).all()
            assert len(np.unique(array)) > 10, "computed, not filled in"


def test_phase_2_dinov3_extraction_pass(phases):
    """Phase 2: DINOv3 Extraction Pass (Safe). Cannot fail: no model, no image needed; the JSONL stays as it is."""
    step = phases.steps["dinov3"]

    assert "dinov3_npy 0 made in 0 model calls, 6 extracted" in step.output
    assert step.folders() == {"dinov3"}
    for number, image_id in enumerate(IDS):
        assert step.derived[f"dinov3/{image_id}.npy"].endswith(vector(number).tobytes())
    assert step.derived[JSONL] == phases.before


def test_phase_3_vae_latent_generation(phases):
    """Phase 3: VAE Latent Generation (Slow). Latents appear, nothing else changes. How slow: benchmarks/."""
    before, step = phases.steps["dinov3"], phases.steps["vae"]

    assert made(step.output) == {"dinov3_npy": 0, "vae_latents": STAGE_1_IMAGES, "t5_hidden": 0}
    new = {path: data for path, data in step.derived.items() if path not in before.derived}
    assert new.keys() == {f"vae_latents/{image_id}.npy" for image_id in WITH_IMAGE}
    assert {path: step.derived[path] for path in before.derived} == before.derived
    # The original's checkpoint, of all files: the images are 32 pixels high and 48 wide.
    latents = [np.load(io.BytesIO(data), allow_pickle=False) for data in new.values()]
    assert {(latent.shape, latent.dtype.name) for latent in latents} == {((16, 4, 6), "float16")}
    assert all(np.isfinite(latent).all() for latent in latents)


def test_phase_4_t5_hidden_state_generation(phases):
    """Phase 4: T5 Hidden State Generation (Moderate). Hidden states appear, nothing else changes."""
    before, step = phases.steps["vae"], phases.steps["t5"]

    assert made(step.output) == {"dinov3_npy": 0, "vae_latents": 0, "t5_hidden": STAGE_1_RECORDS}
    new = {path: data for path, data in step.derived.items() if path not in before.derived}
    assert new.keys() == {f"t5_hidden/{image_id}.npy" for image_id in IDS}
    assert {path: step.derived[path] for path in before.derived} == before.derived
    hidden = [np.load(io.BytesIO(data), allow_pickle=False) for data in new.values()]
    assert {(states.shape, states.dtype.name) for states in hidden} == {((77, 1024), "float16")}


def test_phase_5_jsonl_migration(phases):
    """Phase 5: JSONL Migration (Fast). `--pass migrate`: three fields more, the vector gone; no model, no npy touched."""
    before, step = phases.steps["t5"], phases.steps["migrate"]

    assert made(step.output) == {"dinov3_npy": 0, "vae_latents": 0, "t5_hidden": 0}
    lines = [json.loads(line) for line in step.derived[JSONL].splitlines()]
    assert [(line["image_id"], line["format_version"], line["aspect_bucket"]) for line in lines] == [
        (image_id, 2, "1216x832") for image_id in IDS
    ]
    assert not any("dinov3_embedding" in line for line in lines)
    changed = {path for path in step.derived if step.derived[path] != before.derived.get(path)}
    assert changed == {JSONL, f"{JSONL}.stage1.backup"}


def test_rollback_original_is_kept_as_stage_1_backup(migrated):
    """Rollback Strategy: Keep original JSONL as `approved_image_dataset.jsonl.stage1.backup`."""
    backup = migrated.root.derived / "approved_image_dataset.jsonl.stage1.backup"

    assert backup.read_bytes() == migrated.before


def test_rollback_backup_is_restored(migrated, tmp_path):
    """Rollback Strategy: If migration fails, restore backup and delete .npy directories.

    Departure: the npy files are deleted only on request, as here; the version 2 file is kept.
    """
    root = copy_of(migrated.root, tmp_path / "data")
    version_2 = root.stage2_jsonl.read_bytes()

    product(root, "stage2", "--rollback", "--delete-embeddings")

    assert derived_files(root) == {JSONL: migrated.before, f"{JSONL}.stage2.backup": version_2}


def test_rollback_inline_format_is_regenerated_from_npy_files(migrated, tmp_path):
    """Rollback Strategy: If Stage 2 proves problematic, can regenerate inline format from .npy files. Bit for bit."""
    root = copy_of(migrated.root, tmp_path / "data")
    stage1_backup(root).unlink()
    files = {path: data for path, data in derived_files(root).items() if path.endswith(".npy")}

    product(root, "stage2", "--rollback")

    for number, image_id in enumerate(IDS):
        record = records(root)[image_id]
        assert record.keys() == {*stage1_record(number), "score"}
        assert np.array(record["dinov3_embedding"], np.float32).tobytes() == vector(number).tobytes()
    assert {path: data for path, data in derived_files(root).items() if path.endswith(".npy")} == files


# ---- open questions


def test_open_question_1_vae_model_exact_name():
    """Open question 1: Flux VAE model exact name? The `vae` folder of `black-forest-labs/FLUX.1-dev`, said once, in the spec."""
    settings = Config(encoders={"vae_latents": {"model": "black-forest-labs/FLUX.1-dev"}}).encoder(VAE)

    assert (VAE.default_model, settings.subfolder) == ("black-forest-labs/FLUX.1-dev", "vae")


def test_open_question_2_latent_normalisation_is_a_separate_step(samples, data_root):
    """Open question 2: VAE latent normalization now or later? Later: an asset of its own; latents stay as the VAE gives them."""
    assert not (samples.root.derived / "latent_statistics").exists()
    assert identity_of(samples.root, "vae_latents").facts["scaled"] is False
    stage2_in_process(data_root, *"abc")
    latents = {path: path.read_bytes() for path in data_root.derived.glob("vae_latents/*.npy")}

    with history() as instance:
        assert materialize(data_root, instance, latent_statistics, keys=[BUCKETS[0], BUCKETS[-1]]).success

    values = np.stack([load(data_root, VAE, image_id) for image_id in "abc"]).astype(np.float64)
    counted = read_statistics(statistics_path(data_root.derived, "all"))
    np.testing.assert_allclose(counted.mean, values.mean(axis=(0, 2, 3)))
    np.testing.assert_allclose(counted.std, values.std(axis=(0, 2, 3)))
    assert {path: path.read_bytes() for path in latents} == latents


def test_open_question_3_unusual_aspect_ratio_is_a_warning(samples):
    """Open question 3: Aspect bucket validation? Outside [0.4, 2.5] a warning, never a failure: it gets its nearest bucket."""
    width, height = SAMPLES[PANORAMA]
    assert width / height > 2.5

    assert "checks     10 of 10 passed" in samples.output
    assert records(samples.root)[PANORAMA]["aspect_bucket"] == "1344x704"
    said = product(samples.root, "stage2", "--verify", code=0)
    assert f"unusual_ratio: {PANORAMA}: 120x40" in said
    assert "0 errors, 1 warnings" in said


def test_open_question_4_concurrent_processing(data_root, tmp_path):
    """Open question 4: Concurrent processing? Threads open images and write files beside the model; bytes do not tell."""
    pictures(data_root, *"abcdefghijkl")
    other = copy_of(data_root, tmp_path / "other")

    embed(data_root, decode_threads=1, write_threads=1)
    embed(other, decode_threads=8, write_threads=8)

    assert len(derived_files(data_root)) == 36
    assert derived_files(data_root) == derived_files(other)
