"""The statistics asset and its check: partitions, metadata, and a second run."""

import json

import dagster as dg
import pytest

from assets.latent_statistics import latent_statistics
from assets.partitions import buckets
from checks.latent_statistics import statistics_agree
from imagemill.domain.buckets import BUCKETS
from imagemill.pipeline.curation.latent_statistics import read_statistics, statistics_path
from imagemill.store.ledger import Ledger
from imagemill.store.provenance import ModelIdentity
from tests.helpers.stage2 import embed, photos, record_identity_of
from tests.helpers.wiring import check, checks_of, claims, history, materialize, materialized

SQUARE, TALL = "1024x1024", "832x1216"
NAME = "latent_statistics:statistics_agree"


@pytest.fixture
def instance():
    with history() as instance:
        yield instance


@pytest.fixture
def root(data_root):
    photos(data_root, *"abc", size=(24, 24))
    photos(data_root, "tall", size=(24, 36))
    embed(data_root)
    return data_root


def count(root, instance, *chosen, deferred=False):
    chosen = chosen or BUCKETS
    return materialize(
        root, instance, latent_statistics, statistics_agree, keys=[chosen[0], chosen[-1]], deferred=deferred
    )


def documents(root):
    return {path.stem: path for path in (root.derived / "latent_statistics").iterdir()}


def metadata(instance, bucket):
    records = instance.fetch_materializations(dg.AssetKey("latent_statistics"), limit=100).records
    (newest, *_) = [r.asset_materialization.metadata for r in records if r.partition_key == bucket]
    return {name: value.value for name, value in newest.items()}


def test_partitions_are_the_buckets():
    assert latent_statistics.partitions_def == buckets


@pytest.mark.parametrize("deferred", [False, True])
def test_run_writes_a_document_per_bucket_and_a_merged_one(root, instance, deferred):
    result = count(root, instance, deferred=deferred)

    assert result.success
    assert documents(root).keys() == {*BUCKETS, "all"}
    assert read_statistics(statistics_path(root.derived, "all")).images == 4
    assert set(materialized(instance, "latent_statistics")) == set(BUCKETS)
    assert metadata(instance, SQUARE)["images"] == 3
    assert metadata(instance, SQUARE)["channels"].count("\n") == 17
    assert checks_of(result)[NAME].passed
    with Ledger(root.ledger) as ledger:
        assert claims(ledger) == []


def test_run_of_one_bucket_keeps_the_others_and_merges_existing_documents(root, instance):
    count(root, instance, TALL)
    assert documents(root).keys() == {TALL, "all"}
    before = documents(root)[TALL].read_bytes(), documents(root)[TALL].stat().st_mtime_ns

    count(root, instance, SQUARE)

    assert (documents(root)[TALL].read_bytes(), documents(root)[TALL].stat().st_mtime_ns) == before
    assert read_statistics(documents(root)["all"]).buckets == [SQUARE, TALL]
    assert "all buckets" in metadata(instance, SQUARE)


def test_second_run_changes_no_byte_and_no_mtime(root, instance):
    count(root, instance)
    before = {name: (path.read_bytes(), path.stat().st_mtime_ns) for name, path in documents(root).items()}

    result = count(root, instance)

    assert {name: (path.read_bytes(), path.stat().st_mtime_ns) for name, path in documents(root).items()} == before
    with Ledger(root.ledger) as ledger:
        assert ledger.counts([result.run_id])["latent_statistics"] == {"reports": 8, "rewritten": 0}


def test_factors_of_the_recorded_model_are_used(root, instance):
    record_identity_of(
        root,
        ModelIdentity(kind="vae_latents", model="m", facts={"scaling_factor": 0.25, "shift_factor": 1.0}),
    )

    count(root, instance)

    statistics = read_statistics(documents(root)["all"])
    assert statistics.scaled.mean == [(mean - 1.0) * 0.25 for mean in statistics.mean]
    assert "mean scaled" in metadata(instance, SQUARE)["channels"]


def test_damaged_file_is_left_out_and_counted_in_the_metadata(root, instance):
    (root.derived / "vae_latents" / "a.npy").write_bytes(b"torn")

    assert count(root, instance).success

    assert metadata(instance, SQUARE)["images"] == 2
    assert metadata(instance, SQUARE)["left out: truncated"] == 1


def test_empty_data_root_has_documents_without_numbers(data_root, instance):
    assert count(data_root, instance).success
    assert read_statistics(statistics_path(data_root.derived, "all")).images == 0


# ---- the check


def test_check_passes_without_documents(data_root, instance):
    assert check(data_root, instance, latent_statistics, statistics_agree)[NAME].passed


def test_check_warns_of_a_channel_with_zero_variance(data_root, instance):
    """A stub fills each latent with one value, so a single image has zero variance in every channel."""
    photos(data_root, "a", size=(24, 24))
    embed(data_root)
    result = count(data_root, instance)

    assert checks_of(result)[NAME].passed
    assert "constant_channel: 2" in checks_of(result)[NAME].description


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"format": "other"}, "unreadable"), ({"mean": [1.0]}, "unreadable"), ({"m2": [-1.0] * 16}, "impossible"),
        ({"mean": [1e9] * 16}, "impossible"), ({"images": 7}, "not_the_merge"),
        ({"m2": [0.5] * 16}, "not_the_merge"), ({"std": [-1.0] * 16}, "impossible"),
    ],
)  # fmt: skip
def test_check_fails_on_a_damaged_document(root, instance, change, rule):
    count(root, instance)
    path = documents(root)[SQUARE]
    path.write_text(json.dumps(json.loads(path.read_text()) | change))

    evaluation = check(root, instance, latent_statistics, statistics_agree)[NAME]

    assert not evaluation.passed
    assert rule in evaluation.description


@pytest.mark.parametrize("name", ["all", SQUARE])
def test_check_fails_if_a_document_is_missing(root, instance, name):
    count(root, instance)
    documents(root)[name].unlink()

    assert not check(root, instance, latent_statistics, statistics_agree)[NAME].passed
