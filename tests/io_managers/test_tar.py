"""io_managers/tar.py: planned buckets become sets, and each is reported when it is published.

Spec: docs/spec/shards.md#updating-a-set
"""

import dagster as dg
import pytest
from dagster._core.definitions.data_version import extract_data_version_from_entry

from assets.bucket_shards import bucket_shards
from assets.partitions import buckets
from imagemill.domain.buckets import BUCKETS
from imagemill.pipeline.shards.shard_sets import read_manifest
from imagemill.pipeline.stage2.models_in_use import PREVIEW_TEXT
from imagemill.store.ledger import Ledger
from io_managers import tar as tar_module
from tests.helpers.rot import rot
from tests.helpers.stage2 import stage2
from tests.helpers.wiring import claims, failure_of, history, materialize, materialized

SQUARE, TALL = "1024x1024", "832x1216"


@pytest.fixture
def instance():
    with history() as instance:
        yield instance


@pytest.fixture
def root(data_root):
    stage2(data_root, "a", "b", size=(24, 24))
    stage2(data_root, "tall", size=(24, 36))
    return data_root


def pack(root, instance, *chosen, deferred=True, **config):
    """Run as the command line does: the range spans the chosen buckets, but only those are reported."""
    chosen = chosen or BUCKETS
    return materialize(
        root, instance, bucket_shards, keys=[chosen[0], chosen[-1]], deferred=deferred, bucket_shards={**config}
    )


def written(root, result):
    with Ledger(root.ledger) as ledger:
        return ledger.counts([result.run_id])["written"]


def test_counters_equal_what_was_written(root, instance):
    result = pack(root, instance)

    assert result.success
    found = written(root, result)
    assert (found["written_samples"], found["written_shards"], found["written_buckets"]) == (3, 2, 2)
    assert found["bytes"] == sum(tar.stat().st_size for tar in root.shards.rglob("*.tar"))
    again = written(root, pack(root, instance))
    assert (again["written_samples"], again["unchanged_buckets"], again["samples"]) == (0, 2, 3)


def test_every_bucket_of_the_run_is_reported_with_its_digest(root, instance):
    pack(root, instance)

    assert materialized(instance, "bucket_shards") == list(BUCKETS)
    records = {
        r.partition_key: r for r in instance.fetch_materializations(dg.AssetKey("bucket_shards"), limit=100).records
    }  # fmt: skip
    manifest = read_manifest(root.shards / f"bucket_{SQUARE}")
    assert manifest
    entry = records[SQUARE].event_log_entry
    assert extract_data_version_from_entry(entry) == dg.DataVersion(manifest.digest)
    metadata = records[SQUARE].asset_materialization.metadata
    assert {name: metadata[name].value for name in ("status", "samples", "shards")} == {
        "status": "written", "samples": 2, "shards": 1,
    }  # fmt: skip
    assert records["704x1344"].asset_materialization.metadata["status"].value == "empty"


@pytest.mark.parametrize("deferred", [True, False])
def test_bucket_is_reported_once_with_and_without_the_tag(root, instance, deferred):
    assert pack(root, instance, deferred=deferred).success
    assert sorted(materialized(instance, "bucket_shards")) == sorted(BUCKETS)


def test_bucket_that_fails_leaves_the_earlier_ones_in_place_and_reported(root, instance, monkeypatch):
    write = tar_module.write_bucket

    def fail_at_tall(shard_set, plan, *rest, **more):
        if plan.bucket == TALL:
            raise OSError(28, "No space left on device")
        return write(shard_set, plan, *rest, **more)

    monkeypatch.setattr(tar_module, "write_bucket", fail_at_tall)
    result = pack(root, instance)

    assert "No space left" in failure_of(result, "bucket_shards")
    assert materialized(instance, "bucket_shards") == [SQUARE]
    assert [path.name for path in root.shards.iterdir()] == [f"bucket_{SQUARE}"]
    with Ledger(root.ledger) as ledger:
        assert claims(ledger) == []


def test_downstream_asset_gets_the_urls_of_its_buckets(root, instance):
    """The URLs are for a WebDataset pipeline."""

    @dg.asset(partitions_def=buckets, io_manager_key="plain")
    def urls(bucket_shards):
        return bucket_shards

    pack(root, instance, shard_size=1)
    result = materialize(
        root, instance, bucket_shards.to_source_assets()[0], urls, keys=[SQUARE, SQUARE],
        resources={"plain": dg.InMemoryIOManager()},
    )  # fmt: skip

    assert result.success
    assert result.output_for_node("urls") == [
        str(root.shards / f"bucket_{SQUARE}" / f"shard-00000{n}.tar") for n in range(2)
    ]  # fmt: skip


def test_damaged_file_is_recorded_and_fails_the_run_after_all_other_work(root, instance):
    """No tar contains its recorded bytes: the sample is left out, and the other bucket is written."""
    rot(root.derived / "vae_latents" / "a.npy")

    result = pack(root, instance)

    assert "vae_latents/a.npy" in failure_of(result, "bucket_shards")
    assert written(root, result)["written_samples"] == 2
    assert materialized(instance, "bucket_shards") == list(BUCKETS)
    with Ledger(root.ledger) as ledger:
        found = {(p.asset, p.item, p.reason) for p in ledger.problems()}
        assert not claims(ledger)
    assert found == {("vae_latents", "a", "damaged"), ("bucket_shards", "a", "damaged")}


@pytest.mark.parametrize("deferred", [True, False])
def test_bucket_has_its_own_counters_and_folder(root, instance, deferred):
    """The totals of the run are never displayed, with or without the defer tag."""
    pack(root, instance, deferred=deferred)

    records = instance.fetch_materializations(dg.AssetKey("bucket_shards"), limit=100).records
    shown = {
        r.partition_key: {k: v.value for k, v in r.asset_materialization.metadata.items()} for r in records
    }  # fmt: skip
    folder = root.shards / f"bucket_{SQUARE}"
    size = sum(tar.stat().st_size for tar in folder.glob("*.tar"))
    preview = ", ".join(f"{kind}: {PREVIEW_TEXT}" for kind in ("dinov3_npy", "t5_hidden", "vae_latents"))
    assert shown[SQUARE] == {
        "status": "written", "samples": 2, "shards": 1, "shards written": 1,
        "samples added": 2, "samples changed": 0, "samples removed": 0,
        "size (MB)": round(size / 1e6, 3), "models": preview, "path": str(folder),
        "pixels.color": "ignore", "colours": "no profiles",
        "look": f"[![bucket {SQUARE}](/imagemill/montage?bucket={SQUARE}&crop=1&show=in_shards)]"
        f"(/imagemill/images?bucket={SQUARE}&crop=1&show=in_shards)",
    }  # fmt: skip
    assert shown["704x1344"] == {
        "status": "empty", "samples": 0, "shards": 0, "shards written": 0,
        "samples added": 0, "samples changed": 0, "samples removed": 0, "size (MB)": 0.0,
    }  # fmt: skip
