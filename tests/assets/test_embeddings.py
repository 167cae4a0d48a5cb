"""Embedding assets run by Dagster: ranges, configuration, errors that stop a step.

Spec: docs/spec/conventions.md#command-line
"""

import functools
import os
import subprocess
import sys
from pathlib import Path

import dagster as dg
import pytest

from assets.embeddings import embedding_assets
from assets.partitions import IMAGES_PER_RUN, images
from imagemill.domain.embedding_specs import DINOV3, T5, embedding_specs
from imagemill.formats.npy import NpyStore
from imagemill.fs.atomic import temporaries
from imagemill.store.ledger import Ledger
from tests.helpers.pool_workers import KilledEmbedWorker
from tests.helpers.product import PROJECT, SEARCH_PATH
from tests.helpers.stage2 import embed, photos
from tests.helpers.stubs import StubEncoder, stub_captioner
from tests.helpers.wiring import claims, failure_of, history, materialize, materialized, stub_every_kind

dinov3_npy, vae_latents, t5_hidden = embedding_assets

KEYS = ["a", "b", "c", "d"]
STUBBED = Path(__file__).parents[1] / "helpers" / "stubbed"


@pytest.fixture
def instance():
    with history(*KEYS) as instance:
        yield instance


@pytest.fixture(autouse=True)
def stubs(monkeypatch):
    stub_every_kind(monkeypatch)


def files(root, spec=DINOV3):
    return sorted(path.stem for path in (root.derived / spec.folder).glob("*.npy"))


def test_every_kind_has_an_asset_with_its_name_in_the_order_of_the_specs():
    assert [asset.key.to_user_string() for asset in embedding_assets] == [spec.kind for spec in embedding_specs()]
    for asset in embedding_assets:
        assert asset.partitions_def == images
        assert asset.backfill_policy.max_partitions_per_run == IMAGES_PER_RUN
        assert [key.to_user_string() for key in asset.dependency_keys] == ["approved_images"]


@pytest.mark.parametrize("deferred", [True, False])
def test_range_of_valid_images_is_embedded_and_materialised(data_root, instance, deferred):
    photos(data_root, *KEYS)

    result = materialize(data_root, instance, dinov3_npy, vae_latents, t5_hidden, keys=KEYS, deferred=deferred)

    assert result.success
    for spec in embedding_specs():
        assert files(data_root, spec) == KEYS
        assert sorted(materialized(instance, spec.kind)) == KEYS, "once each"


def test_range_with_an_invalid_image_fails_without_the_tag_after_reporting_valid_ones(data_root, instance):
    """If the step succeeded, Dagster would mark the entire range.

    Spec: docs/spec/conventions.md#completion-and-identity
    """
    photos(data_root, *KEYS)
    (data_root.approved / "b.png").write_bytes(b"no picture")

    result = materialize(data_root, instance, dinov3_npy, keys=KEYS)

    assert not result.success
    assert failure_of(result, "dinov3_npy").startswith(
        "1 image did not arrive, everything else of dinov3_npy is done\n  b: undec"
    )
    assert sorted(materialized(instance, "dinov3_npy")) == ["a", "c", "d"] == files(data_root)


def test_range_with_a_refused_image_succeeds_with_the_tag(data_root, instance):
    """Refusals never fail command-line runs."""
    photos(data_root, *KEYS)
    (data_root.approved / "b.png").write_bytes(b"no picture")

    result = materialize(data_root, instance, dinov3_npy, keys=KEYS, deferred=True)

    assert result.success
    assert sorted(materialized(instance, "dinov3_npy")) == ["a", "c", "d"]


def test_range_with_a_failed_image_fails_with_the_tag_too(data_root, instance, monkeypatch):
    """The step fails after all other images are done."""

    class Encoder(StubEncoder):
        def encode(self, batch):
            arrays = super().encode(batch)
            if self.calls > 1:
                raise RuntimeError("out of memory")
            return arrays

    stub_every_kind(monkeypatch, Encoder)
    photos(data_root, *KEYS)

    result = materialize(data_root, instance, dinov3_npy, keys=KEYS, deferred=True)

    assert not result.success
    assert "3 images did not arrive, " in failure_of(result, "dinov3_npy")
    assert materialized(instance, "dinov3_npy") == ["a"]


def test_partition_without_its_image_is_not_materialised(data_root, instance):
    photos(data_root, "a", "c")

    assert materialize(data_root, instance, dinov3_npy, keys=KEYS, deferred=True).success
    assert sorted(materialized(instance, "dinov3_npy")) == ["a", "c"]

    result = materialize(data_root, instance, dinov3_npy, keys=KEYS)
    failure = failure_of(result, "dinov3_npy").splitlines()
    assert [line[:14] for line in failure] == ["2 images did n", "  b: no input:", "  d: no input:"]


def test_only_images_of_the_range_are_embedded(data_root, instance):
    photos(data_root, *KEYS)

    materialize(data_root, instance, dinov3_npy, keys=["b", "c"], deferred=True)

    assert files(data_root) == ["b", "c"]


def test_images_without_a_caption_are_captioned_first(data_root, instance, monkeypatch):
    """Only the step of T5 captions, also in the UI. Spec: docs/spec/stage2.md#caption-sources"""
    stub_captioner(monkeypatch.setattr)
    photos(data_root, *KEYS, captions=False)
    (data_root.approved / "b.txt").write_text("mine")
    data_root.config_file.write_text("captioner: {enabled: true, model: real}")

    result = materialize(data_root, instance, dinov3_npy, t5_hidden, keys=["b", "c"])

    assert result.success
    assert files(data_root, T5) == ["b", "c"] == sorted(materialized(instance, "t5_hidden"))
    with Ledger(data_root.ledger) as ledger:
        origins = {image_id: row.origin for image_id, row in ledger.captions().items()}
    assert origins == {"b": "sidecar", "c": "captioner"}
    for record in instance.fetch_materializations(dg.AssetKey("t5_hidden"), limit=2).records:
        assert "captioned" not in record.asset_materialization.metadata, "a figure of the run, not of the image"
    logged = [entry.message for entry in instance.all_logs(result.run_id)]
    assert any("real captioned 1 of 1 images without a caption" in message for message in logged)


def test_images_beyond_the_limit_are_left_for_another_run(data_root, instance):
    """`--limit N` selects at most N images that still have work, in name order."""
    photos(data_root, *KEYS)

    result = materialize(data_root, instance, dinov3_npy, keys=KEYS, deferred=True, dinov3_npy={"up_to": "b"})

    assert result.success
    assert files(data_root) == ["a", "b"]


def test_second_run_writes_nothing_and_loads_no_model(data_root, instance, monkeypatch):
    photos(data_root, *KEYS)
    materialize(data_root, instance, dinov3_npy, keys=KEYS, deferred=True)

    monkeypatch.setattr(StubEncoder, "load", classmethod(lambda *_, **__: pytest.fail("loaded")))
    result = materialize(data_root, instance, dinov3_npy, keys=KEYS, deferred=True)

    assert result.success
    with Ledger(data_root.ledger) as ledger:
        assert ledger.counts([result.run_id])["dinov3_npy"] == {"kept": 4, "refused": 0, "absent": 0}


def test_model_other_than_the_recorded_one_is_refused_even_without_work(data_root, instance):
    """Spec: docs/spec/conventions.md#provenance"""
    photos(data_root, *KEYS)
    embed(data_root)
    (data_root.path / "imagemill.yaml").write_text("encoders: {dinov3_npy: {model: org/other}}")

    result = materialize(data_root, instance, dinov3_npy, vae_latents, keys=KEYS, deferred=True)

    assert "ModelMismatch" in failure_of(result, "dinov3_npy")
    assert sorted(materialized(instance, "vae_latents")) == KEYS, "the other kind is still done"


def test_settings_of_the_configuration_file_reach_the_encoder(data_root, instance, monkeypatch):
    seen = []

    class Encoder(StubEncoder):
        @classmethod
        def load(cls, settings, **given):
            seen.append((settings.model, settings.batch_size, given["threads"]))
            return super().load(settings, **given)

    stub_every_kind(monkeypatch, Encoder)
    (data_root.path / "imagemill.yaml").write_text("encoders: {dinov3_npy: {model: org/m, batch_size: 3}}\nthreads: 2")
    photos(data_root, *KEYS)

    assert materialize(data_root, instance, dinov3_npy, keys=KEYS, deferred=True).success
    assert seen == [("org/m", 3, 2)]


def test_temporary_files_of_a_killed_run_are_removed(data_root, instance):
    """Only temporary files of dead runs are removed."""
    photos(data_root, "a")
    folder = data_root.derived / DINOV3.folder
    folder.mkdir(parents=True)
    script = f"import pathlib, imagemill.fs.atomic as a; a.temporary_path(pathlib.Path({str(folder)!r})).touch()"
    subprocess.run([sys.executable, "-c", script], check=True, cwd=PROJECT)
    assert len(temporaries(folder)) == 1

    materialize(data_root, instance, dinov3_npy, keys=["a", "a"], deferred=True)

    assert temporaries(folder) == []


def test_temporary_files_of_a_killed_worker_are_removed_at_the_end_of_the_run(
    data_root, instance, monkeypatch, tmp_path
):
    """They belong to the run, which succeeds: a next one without work would leave them."""
    photos(data_root, *KEYS)
    data_root.config_file.write_text("devices: [cpu, cpu]\nencoders: {dinov3_npy: {batch_size: 1}}\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(STUBBED), SEARCH_PATH]))
    worker = functools.partial(KilledEmbedWorker, log=tmp_path, dies="b", times=1)
    monkeypatch.setattr("assets.embeddings.EmbedWorker", worker)
    left = []
    monkeypatch.setattr(
        NpyStore,
        "sweep_own",
        lambda store, sweep=NpyStore.sweep_own: left.extend(temporaries(store.folder)) or sweep(store),
    )

    assert materialize(data_root, instance, dinov3_npy, keys=KEYS, deferred=True).success

    assert left, "the killed worker left staged files"
    assert temporaries(data_root.derived / DINOV3.folder) == []
    assert files(data_root) == KEYS


@pytest.mark.parametrize("why", ["no folder", "wrong configuration", "other model"])
def test_step_that_cannot_start_leaves_no_claim(data_root, instance, why):
    """All other runs would wait for a remaining claim."""
    photos(data_root, "a")
    match why:
        case "no folder":
            (data_root.approved / "a.png").unlink()
            (data_root.approved / "a.txt").unlink()
            data_root.approved.rmdir()
        case "wrong configuration":
            (data_root.path / "imagemill.yaml").write_text("encoders: {dinov3_npy: {nonsense: 1}}")
        case "other model":
            embed(data_root, DINOV3, model="org/one")

    result = materialize(data_root, instance, dinov3_npy, keys=["a", "a"], deferred=True)

    assert not result.success
    with Ledger(data_root.ledger) as ledger:
        assert claims(ledger) == []


def test_run_configuration_starts_a_regeneration_that_ends_with_the_last_file(data_root, instance):
    """Two chunks of a backfill with equal configuration write each file once.

    Spec: docs/spec/conventions.md#provenance
    """
    photos(data_root, *KEYS)
    materialize(data_root, instance, dinov3_npy, keys=KEYS, deferred=True)
    chunks = [KEYS[:2], KEYS[2:]]

    for number, chunk in enumerate(chunks):
        result = materialize(
            data_root, instance, dinov3_npy, keys=chunk, deferred=True, dinov3_npy={"regenerate": True}
        )
        assert result.success
        with Ledger(data_root.ledger) as ledger:
            assert ledger.counts([result.run_id])["dinov3_npy"]["computed"] == 2
            assert bool(ledger.regenerating()) == (number == 0)


def test_step_stops_before_any_work_if_the_disk_is_too_small(data_root, instance, monkeypatch):
    photos(data_root, *KEYS)
    monkeypatch.setattr("imagemill.pipeline.forecast.free_bytes", lambda folder: 1000)

    result = materialize(data_root, instance, dinov3_npy, keys=KEYS, deferred=True)

    assert "NotEnoughSpace" in failure_of(result, "dinov3_npy")
    assert not list(data_root.derived.rglob("*.npy"))
