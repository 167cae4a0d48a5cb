"""The shards asset: run configuration, counters, conflicts, what the ledger keeps. Source: seed 001; CONTRACTS section 2."""

import json
import os

import pytest

from assets.bucket_shards import bucket_shards
from assets.partitions import buckets
from imagemill.buckets import BUCKETS
from imagemill.formats.tar import read_shard
from imagemill.ledger import Ledger
from imagemill.pipeline.shard_sets import read_manifest
from tests.helpers.stage2 import embed, photos, picture, stage2, write_records
from tests.helpers.wiring import claims, failure_of, history, materialize, materialized

SQUARE, TALL = "1024x1024", "832x1216"


@pytest.fixture
def instance():
    with history() as instance:
        yield instance


@pytest.fixture
def root(data_root):
    stage2(data_root, *"abcd", size=(24, 24))
    stage2(data_root, "tall", size=(24, 36))
    return data_root


def pack(root, instance, *chosen, **config):
    chosen = chosen or BUCKETS
    return materialize(root, instance, bucket_shards, keys=[chosen[0], chosen[-1]], deferred=True, bucket_shards=config)


def shards(root, bucket=SQUARE):
    """Ids shard by shard."""
    tars = sorted((root.shards / f"bucket_{bucket}").glob("*.tar"))
    return [[json.loads(members["json"])["image_id"] for _, members in read_shard(tar)] for tar in tars]


def problems(root):
    with Ledger(root.ledger) as ledger:
        return {(p.item, p.reason) for p in ledger.problems() if p.asset == "bucket_shards"}


def counts(root, result):
    with Ledger(root.ledger) as ledger:
        return ledger.counts([result.run_id])["bucket_shards"]


def test_partitions_are_the_seven_buckets_in_the_seeds_order():
    assert bucket_shards.partitions_def == buckets
    assert buckets.get_partition_keys() == list(BUCKETS)


def test_every_ready_sample_is_packed(root, instance):
    result = pack(root, instance)

    assert result.success
    assert (shards(root), shards(root, TALL)) == ([list("abcd")], [["tall"]])
    assert counts(root, result) == {"total_records": 5, "ready_records": 5, "skipped_incomplete": 0, "filtered": 0}


def test_run_of_one_bucket_packs_that_bucket(root, instance):
    result = pack(root, instance, TALL)

    assert [path.name for path in root.shards.iterdir()] == [f"bucket_{TALL}"]
    assert counts(root, result)["filtered"] == 4
    assert materialized(instance, "bucket_shards") == [TALL]


def test_only_the_chosen_buckets_of_a_range_are_packed_and_reported(root, instance):
    """A run takes one range of partitions; the chosen ones may be scattered in it."""
    pack(root, instance, SQUARE, "1344x704", only=[SQUARE, "1344x704"])

    assert materialized(instance, "bucket_shards") == [SQUARE, "1344x704"]
    assert [path.name for path in root.shards.iterdir()] == [f"bucket_{SQUARE}"]


def test_parameters_reach_the_plan(root, instance):
    pack(root, instance, shard_size=3, shuffle=True, seed=7, limit=4)

    manifest = read_manifest(root.shards / f"bucket_{SQUARE}")
    assert manifest
    assert manifest["parameters"] == {"shard_size": 3, "shuffle": True, "seed": 7, "limit": 4}
    assert sum(map(len, [*shards(root), *shards(root, TALL)])) == 4


def test_shard_size_of_the_configuration_file_is_the_default(root, instance):
    (root.path / "imagemill.yaml").write_text("shard_size: 2")
    pack(root, instance)
    assert [len(shard) for shard in shards(root)] == [2, 2]

    pack(root, instance, shard_size=3)
    assert [len(shard) for shard in shards(root)] == [3, 1]


def test_run_of_the_outcome_republishes_what_changed(root, instance):
    """By default sets of ours are brought up to date."""
    pack(root, instance)
    before = os.stat(root.shards / f"bucket_{SQUARE}" / "shard-000000.tar")
    picture(root.approved / "tall.png", size=(24, 36))
    embed(root)

    assert pack(root, instance).success
    assert os.stat(root.shards / f"bucket_{SQUARE}" / "shard-000000.tar") == before


def test_existing_shards_are_refused_before_a_byte_is_written_where_asked(root, instance):
    pack(root, instance, TALL)

    result = pack(root, instance, existing="refuse")

    message = failure_of(result, "bucket_shards")
    assert all(text in message for text in ("ShardExists", "bucket_832x1216", "--overwrite"))
    assert [path.name for path in root.shards.iterdir()] == [f"bucket_{TALL}"]
    with Ledger(root.ledger) as ledger:
        assert claims(ledger) == []


def test_existing_shards_are_replaced_where_asked(root, instance):
    pack(root, instance, shard_size=1)

    assert pack(root, instance, existing="replace", shard_size=4).success
    assert shards(root) == [list("abcd")]


@pytest.mark.parametrize("config", [{"existing": "Replace"}, {"only": ["512x512"]}])
def test_value_that_is_none_of_the_choices_is_refused(root, instance, config):
    assert "WrongUsage" in failure_of(pack(root, instance, **config), "bucket_shards")
    assert not root.shards.exists()


def test_folder_given_for_the_shards_is_remembered(root, instance, tmp_path):
    """A run with another place than the remembered one says so. Source: CONTRACTS, after its first table."""
    elsewhere = tmp_path / "elsewhere"
    pack(root, instance, output_dir=str(elsewhere))
    assert (elsewhere / f"bucket_{SQUARE}").is_dir()
    assert not root.shards.exists()

    pack(root, instance, existing="replace")
    assert not root.shards.exists()
    with Ledger(root.ledger) as ledger:
        assert ledger.place("shards") == elsewhere


def test_records_that_are_not_packed_have_a_row_until_they_are(root, instance):
    (root.derived / "vae_latents" / "a.npy").unlink()
    result = pack(root, instance)
    assert problems(root) == {("a", "missing_file")}
    assert counts(root, result)["skipped_incomplete"] == 1

    embed(root)
    pack(root, instance)
    assert problems(root) == set()


def test_run_of_one_bucket_forgets_what_it_packs_and_nothing_of_the_others(root, instance):
    """Else `explain` would tell of a sample in the shards that it was refused."""
    for image_id in ("a", "tall"):
        (root.derived / "vae_latents" / f"{image_id}.npy").unlink()
    pack(root, instance)
    assert problems(root) == {("a", "missing_file"), ("tall", "missing_file")}

    embed(root)
    pack(root, instance, SQUARE)
    assert problems(root) == {("tall", "missing_file")}


def test_files_of_another_program_are_adopted_with_the_packing(root, instance):
    """They are not read again by the next run."""
    photos(root, "new", size=(24, 24))
    embed(root)
    write_records(root)
    root.ledger.unlink()

    assert pack(root, instance).success
    with Ledger(root.ledger) as ledger:
        assert len(ledger.files("vae_latents")) == 6
    assert shards(root) == [[*"abcd", "new"]]


def test_data_root_without_records_says_what_to_run(data_root, instance):
    result = pack(data_root, instance)

    assert "imagemill stage2" in failure_of(result, "bucket_shards")
    with Ledger(data_root.ledger) as ledger:
        assert claims(ledger) == []


def test_progress_is_told_every_so_many_ready_records(root, instance, capfd):
    pack(root, instance, progress_every=2)

    lines = [line for line in capfd.readouterr().out.splitlines() if line.startswith("total_records=")]
    assert [line.split()[1] for line in lines] == ["ready_records=2", "ready_records=4"]
