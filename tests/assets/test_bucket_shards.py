"""The shards asset: run configuration, counters, conflicts, rows in the ledger.

Spec: docs/spec/shards.md#updating-a-set, docs/spec/shards.md#automatic-updates
"""

import json
import os

import dagster as dg
import pytest

from assets.bucket_shards import bucket_shards
from assets.partitions import buckets
from dagster_project.cli.shards import command
from dagster_project.definitions import build_definitions
from dagster_project.deployments import test_resources as resources_of
from imagemill.domain.buckets import BUCKETS
from imagemill.formats.tar import read_shard
from imagemill.pipeline.shards.shard_sets import ShardParameters, read_manifest
from imagemill.store.ledger import Ledger
from tests.helpers.product import snapshot
from tests.helpers.shard_runs import written
from tests.helpers.spec_runs import product
from tests.helpers.stage2 import embed, photos, picture, stage2, write_records
from tests.helpers.wiring import QUIET, claims, failure_of, history, materialize, materialized

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
    if "shuffle" in config:
        config["shuffle"] = {True: "yes", False: "no"}[config["shuffle"]]
    return materialize(root, instance, bucket_shards, keys=[chosen[0], chosen[-1]], deferred=True, bucket_shards=config)


def shards(root, bucket=SQUARE):
    """Return the ids in each shard."""
    tars = sorted((root.shards / f"bucket_{bucket}").glob("*.tar"))
    return [[json.loads(members["json"])["image_id"] for _, members in read_shard(tar)] for tar in tars]


def problems(root):
    with Ledger(root.ledger) as ledger:
        return {(p.item, p.reason) for p in ledger.problems() if p.asset == "bucket_shards"}


def counts(root, result):
    with Ledger(root.ledger) as ledger:
        return ledger.counts([result.run_id])["bucket_shards"]


def test_partitions_are_the_seven_buckets_in_specified_order():
    assert bucket_shards.partitions_def == buckets
    assert buckets.get_partition_keys() == list(BUCKETS)


def test_every_ready_sample_is_packed(root, instance):
    result = pack(root, instance)

    assert result.success
    assert (shards(root), shards(root, TALL)) == ([list("abcd")], [["tall"]])
    assert counts(root, result) == {"total_records": 5, "ready_records": 5, "skipped_incomplete": 0, "filtered": 0}


def test_run_of_one_bucket_packs_that_bucket(root, instance):
    result = pack(root, instance, TALL)

    assert [path.name for path in root.shards.glob("bucket_*")] == [f"bucket_{TALL}"]
    assert counts(root, result)["filtered"] == 4
    assert materialized(instance, "bucket_shards") == [TALL]


def test_only_chosen_buckets_of_a_range_are_packed_and_reported(root, instance):
    """A run has one range of partitions, and the chosen ones may be scattered in it."""
    pack(root, instance, SQUARE, "1344x704", only=[SQUARE, "1344x704"])

    assert materialized(instance, "bucket_shards") == [SQUARE, "1344x704"]
    assert [path.name for path in root.shards.glob("bucket_*")] == [f"bucket_{SQUARE}"]


def test_parameters_reach_the_plan(root, instance):
    pack(root, instance, shard_size=3, shuffle=True, seed=7, limit=4)

    manifest = read_manifest(root.shards / f"bucket_{SQUARE}")
    assert manifest
    assert manifest.parameters == ShardParameters(3, True, 7, 4)
    assert sum(map(len, [*shards(root), *shards(root, TALL)])) == 4


def test_shard_size_of_the_configuration_file_is_the_default(root, instance):
    (root.path / "imagemill.yaml").write_text("shard_size: 2")
    pack(root, instance)
    assert [len(shard) for shard in shards(root)] == [2, 2]

    pack(root, instance, shard_size=3)
    assert [len(shard) for shard in shards(root)] == [3, 1]


def test_second_run_republishes_changed_sets(root, instance):
    """By default, a run updates existing sets written by imagemill."""
    pack(root, instance)
    before = os.stat(root.shards / f"bucket_{SQUARE}" / "shard-000000.tar")
    picture(root.approved / "tall.png", size=(24, 36))
    embed(root)

    assert pack(root, instance).success
    assert os.stat(root.shards / f"bucket_{SQUARE}" / "shard-000000.tar") == before


def test_existing_shards_are_refused_before_any_write_if_requested(root, instance):
    pack(root, instance, TALL)

    result = pack(root, instance, existing="refuse")

    message = failure_of(result, "bucket_shards")
    assert all(text in message for text in ("ShardExists", "bucket_832x1216", "--overwrite"))
    assert [path.name for path in root.shards.glob("bucket_*")] == [f"bucket_{TALL}"]
    with Ledger(root.ledger) as ledger:
        assert claims(ledger) == []


def test_existing_shards_are_replaced_if_requested(root, instance):
    pack(root, instance, shard_size=1)

    assert pack(root, instance, existing="replace", shard_size=4).success
    assert shards(root) == [list("abcd")]


def test_unknown_choice_is_refused(root, instance):
    with pytest.raises(dg.DagsterInvalidConfigError, match="Replace"):
        pack(root, instance, existing="Replace")
    assert "WrongUsage" in failure_of(pack(root, instance, only=["512x512"]), "bucket_shards")
    assert not root.shards.exists()


def test_configured_shards_folder_is_remembered(root, instance, tmp_path):
    """A run whose folder differs from the remembered one reports it. Spec: docs/spec/conventions.md#locations"""
    elsewhere = tmp_path / "elsewhere"
    pack(root, instance, output_dir=str(elsewhere))
    assert (elsewhere / f"bucket_{SQUARE}").is_dir()
    assert not root.shards.exists()

    pack(root, instance, existing="replace")
    assert not root.shards.exists()
    with Ledger(root.ledger) as ledger:
        assert ledger.setting("place.shards") == str(elsewhere)


def test_unpacked_records_have_a_row_until_they_are_packed(root, instance):
    (root.derived / "vae_latents" / "a.npy").unlink()
    result = pack(root, instance)
    assert problems(root) == {("a", "missing_file")}
    assert counts(root, result)["skipped_incomplete"] == 1

    embed(root)
    pack(root, instance)
    assert problems(root) == set()


def test_run_of_one_bucket_removes_only_the_rows_of_its_packed_samples(root, instance):
    """Otherwise `explain` would report a sample in the shards as refused."""
    for image_id in ("a", "tall"):
        (root.derived / "vae_latents" / f"{image_id}.npy").unlink()
    pack(root, instance)
    assert problems(root) == {("a", "missing_file"), ("tall", "missing_file")}

    embed(root)
    pack(root, instance, SQUARE)
    assert problems(root) == {("tall", "missing_file")}


def test_packing_adopts_files_of_another_program(root, instance):
    """The next run does not read them again."""
    photos(root, "new", size=(24, 24))
    embed(root)
    write_records(root)
    root.ledger.unlink()

    assert pack(root, instance).success
    with Ledger(root.ledger) as ledger:
        assert len(ledger.files("vae_latents")) == 6
    assert shards(root) == [[*"abcd", "new"]]


def test_data_root_without_records_names_the_command_to_run(data_root, instance):
    result = pack(data_root, instance)

    assert "imagemill stage2" in failure_of(result, "bucket_shards")
    with Ledger(data_root.ledger) as ledger:
        assert claims(ledger) == []


def test_progress_is_reported_at_intervals_of_ready_records(root, instance, capfd):
    pack(root, instance, progress_every=2)

    lines = [line for line in capfd.readouterr().out.splitlines() if line.startswith("total_records=")]
    assert [line.split()[1] for line in lines] == ["ready_records=2", "ready_records=4"]


# ---- one bucket after another


FLAGS = [{}, {"shuffle": True}, {"limit": 2}, {"shuffle": True, "limit": 3, "seed": 7}, {"shard_size": 1, "limit": 3}]


@pytest.mark.parametrize("flags", FLAGS, ids=str)
def test_run_of_one_partition_equals_the_command_for_that_bucket(root, instance, flags):
    """Shuffle and limit apply to all buckets of the run together. Spec: docs/spec/shards.md#order"""
    for bucket in (SQUARE, TALL):
        assert pack(root, instance, bucket, **flags).success
    by_partition = written(root.shards)

    options = [text for name, value in flags.items() for text in option(name, value)]
    for bucket in (SQUARE, TALL):
        product(root, "shards", "--overwrite", "--bucket", bucket, *options)

    assert written(root.shards) == by_partition
    assert len(shards(root)) * len(shards(root, TALL)) > 0


@pytest.mark.parametrize("flags", FLAGS, ids=str)
def test_run_of_several_partitions_equals_the_command_for_those_buckets(root, instance, flags, tmp_path):
    """The order is global: a limit of three applies to all buckets together, not to each."""
    assert pack(root, instance, SQUARE, TALL, **flags).success
    by_partitions = written(root.shards)

    options = [text for name, value in flags.items() for text in option(name, value)]
    product(root, "shards", "--overwrite", "--bucket", SQUARE, "--bucket", TALL, *options)

    assert written(root.shards) == by_partitions
    live = sum(map(len, [*shards(root), *shards(root, TALL)]))
    assert live == min(5, flags.get("limit", 5))


def option(name, value):
    flag = f"--{name.replace('_', '-')}"
    return [flag] if value is True else [flag, value]


def test_every_flag_of_the_command_has_a_configuration_field(root):
    """The UI offers every feature of the command."""
    named = {
        "chosen": "only",
        "overwrite": "existing",
        "append": "existing",
        "repack": "existing",
        "rehearse": "dry_run",
    }
    flags = {parameter.name for parameter in command.params} - {"data_root", "config"}

    fields = set(bucket_shards.op.config_schema.as_field().config_type.fields)
    assert {named.get(name, name) for name in flags} == fields


def test_run_configuration_updates_and_repacks(root, instance):
    pack(root, instance, shard_size=2)
    tar = root.shards / f"bucket_{SQUARE}" / "shard-000000.tar"
    before = tar.stat().st_ino
    photos(root, "aa", size=(24, 24))
    embed(root)
    write_records(root)

    assert pack(root, instance, existing="append").success
    assert shards(root) == [["a", "b"], ["c", "d"], ["aa"]]
    assert tar.stat().st_ino == before

    assert pack(root, instance, existing="repack").success
    assert shards(root) == [["a", "aa"], ["b", "c"], ["d"]]


@pytest.mark.parametrize("flag", ["--repack", "--append"])
def test_updated_set_keeps_its_shuffle_shard_size_and_limit(root, flag):
    """As in `imagemill run` and in the UI, parameters that are not given stay unchanged."""
    product(root, "shards", "--bucket", SQUARE, "--shuffle", "--seed", 5, "--shard-size", 2, "--limit", 3)
    before = written(root.shards)

    product(root, "shards", "--bucket", SQUARE, flag)

    assert written(root.shards) == before


@pytest.mark.parametrize("workers", [1, 3])
def test_number_of_workers_does_not_change_the_shards(root, instance, workers, tmp_path):
    pack(root, instance, shard_size=1, workers=workers)
    here = written(root.shards)
    pack(root, instance, shard_size=1, output_dir=str(tmp_path / "two"), workers=2)

    assert here == written(tmp_path / "two")
    assert len(shards(root)) == 4


# ---- dry runs


def test_dry_run_reports_the_counters_and_writes_nothing(root, instance):
    before = snapshot(root.path)

    result = pack(root, instance, dry_run=True, shard_size=3)

    assert result.success
    assert materialized(instance, "bucket_shards") == []
    after = {path: kept for path, kept in snapshot(root.path).items() if not path.endswith(("-shm", "-wal"))}
    assert after == before, "but for what SQLite lays beside a ledger that is open"
    said = [entry.user_message for entry in instance.all_logs(result.run_id)]
    assert [line for line in said if line.startswith("dry run")] == [
        "dry run, nothing written: total_records=5 ready_records=5 skipped_incomplete=0 filtered=0 "
        "written_samples=5 written_shards=3"
    ]


def test_dry_run_fails_if_the_real_one_would_refuse(root, instance):
    pack(root, instance)
    before = snapshot(root.shards)

    said = failure_of(pack(root, instance, dry_run=True, existing="refuse"), "bucket_shards")

    assert "shard-000000.tar exists" in said
    assert snapshot(root.shards) == before


def test_dry_run_does_not_remember_the_folder(root, instance, tmp_path):
    assert pack(root, instance, dry_run=True, output_dir=str(tmp_path / "elsewhere")).success

    with Ledger(root.ledger) as ledger:
        assert ledger.setting("place.shards") is None


# ---- as the UI launches it


def test_job_runs_as_launched_by_the_ui(root, instance):
    """Launchpad configuration and one partition key, in the repository's job of all assets."""
    job = build_definitions(resources_of(str(root.path))).resolve_implicit_global_asset_job_def()
    config = {"ops": {"bucket_shards": {"config": {"shuffle": "yes", "limit": 2, "existing": "replace", "workers": 1}}}}

    result = job.execute_in_process(
        run_config={**QUIET, **config}, partition_key=SQUARE, asset_selection=[bucket_shards.key], instance=instance,
    )  # fmt: skip

    assert result.success
    assert [len(shard) for shard in shards(root)] == [2]
    assert materialized(instance, "bucket_shards") == [SQUARE]
    assert not (root.shards / f"bucket_{TALL}").exists()


@pytest.mark.parametrize("config", [{"limit": -1}, {"shard_size": -1}, {"workers": -1}, {"progress_every": 0}])
def test_value_out_of_range_is_refused(root, instance, config):
    assert f"{next(iter(config))}" in failure_of(pack(root, instance, **config), "bucket_shards")
    assert not root.shards.exists()
