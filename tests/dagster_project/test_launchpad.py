"""The launchpad's options of each asset: choices, descriptions, and no options that only commands use."""

import dagster as dg
import pytest
import yaml
from dagster._core.snap.snap_to_yaml import default_values_yaml_from_type_snap

from assets.bucket_shards import ShardConfig
from assets.near_duplicates import NearDuplicateConfig
from assets.presets import RawConfig, RescaleConfig
from assets.stage_a_groups import GroupsConfig
from dagster_project.definitions import build_definitions
from dagster_project.deployments import test_resources as resources_of
from imagemill.domain.ranks import ShardingMode
from imagemill.pipeline.shards.shard_plan import WriteMode

OFFERED = {
    "dinov3_npy": {"regenerate"},
    "vae_latents": {"regenerate"},
    "t5_hidden": {"regenerate", "recaption"},
    "near_duplicates": {"threshold"},
    "bucket_shards": {
        "only", "shard_size", "shuffle", "seed", "limit", "existing", "dry_run", "output_dir", "workers", "allow_preview",
        "progress_every",
    },
    "raw_dataset": {"adapter", "annotations", "images", "geometry", "split_rule"},
    "rescale_preset": {"image_factor", "max_pixels", "min_pixels", "library", "object_order", "splits", "workers"},
    "derived_preset": {"splits", "object_order"},
    "stage_a_ranks": {"mode", "passes", "fails", "seed", "input_dir", "output_dir", "batch_size", "workers", "fresh"},
    "stage_a_groups": {"mode", "passes", "fails", "seed", "input_dir", "output_dir", "world_size", "keep"},
}  # fmt: skip


@pytest.fixture(scope="module")
def definitions(tmp_path_factory):
    return build_definitions(resources_of(str(tmp_path_factory.mktemp("root"))))


def fields(definitions, asset):
    return definitions.get_assets_def(asset).op.config_schema.config_type.fields


def valid(definitions, asset, **config):
    job = definitions.resolve_implicit_job_def_def_for_assets([dg.AssetKey(asset)])
    try:
        dg.validate_run_config(job, {"ops": {asset: {"config": config}}})
    except dg.DagsterInvalidConfigError:
        return False
    return True


@pytest.mark.parametrize("asset", OFFERED)
def test_options_are_those_that_have_an_effect_each_with_a_description(definitions, asset):
    found = fields(definitions, asset)

    assert set(found) == OFFERED[asset]
    assert all(field.description for field in found.values())


@pytest.mark.parametrize("asset", OFFERED)
def test_every_option_is_scaffolded(definitions, asset):
    """The launchpad starts with this text, in which Dagster omits options whose default is null."""
    job = definitions.resolve_implicit_job_def_def_for_assets([dg.AssetKey(asset)])
    snapshot = job.get_job_snapshot()
    root = snapshot.config_schema_snapshot.get_config_snap(snapshot.mode_def_snaps[0].root_config_key)

    shown = yaml.safe_load(default_values_yaml_from_type_snap(snapshot.config_schema_snapshot, root))

    assert shown["ops"][asset]["config"].keys() == OFFERED[asset]
    assert shown["resources"]["data_root"]["config"].keys() == {"path", "config_file", "output_base_dir"}


@pytest.mark.parametrize(
    ("config_class", "given"),
    [
        (ShardConfig, {"shard_size": 3, "shuffle": "yes", "seed": 0, "limit": 1, "output_dir": "out", "workers": 2}),
        (RescaleConfig, {"image_factor": 16, "library": "torch", "object_order": "top_left", "splits": ["val"]}),
        (RawConfig, {"adapter": "coco", "annotations": {"train": "a"}, "images": "i", "geometry": "boxes", "split_rule": "r"}),
        (GroupsConfig, {"passes": 0, "fails": 0, "world_size": 2, "input_dir": "i", "output_dir": "o"}),
        (NearDuplicateConfig, {"threshold": 0.5}),
    ],
)  # fmt: skip
def test_option_is_none_until_it_is_set(config_class, given):
    unset = config_class()
    defaults = config_class(**{name: config_class.model_fields[name].default for name in given})

    assert all(getattr(config, name) in (None, [], {}) for config in (unset, defaults) for name in given)
    assert {name: getattr(config_class(**given), name) for name in given} == given


@pytest.mark.parametrize(
    ("asset", "field", "good", "bad"),
    [
        ("bucket_shards", "existing", [*WriteMode.__args__], "overwrite"),
        ("rescale_preset", "library", ["torch", "pillow", None], "numpy"),
        ("raw_dataset", "geometry", ["boxes", "polygons", None], "points"),
        ("raw_dataset", "adapter", ["coco", "lvis", "visual_genome", None], "voc"),
        ("stage_a_ranks", "mode", [*ShardingMode.__args__], "per_rank"),
        ("stage_a_groups", "mode", [*ShardingMode.__args__], "per_rank"),
    ],
)
def test_choices_are_checked_before_a_run_starts(definitions, asset, field, good, bad):
    assert [value for value in good if not valid(definitions, asset, **{field: value})] == []
    assert not valid(definitions, asset, **{field: bad})


def test_resource_has_no_options_that_assets_override(definitions):
    """The number of worker processes is an option of each asset."""
    job = definitions.resolve_implicit_job_def_def_for_assets([dg.AssetKey("rescale_preset")])
    resources = job.run_config_schema.config_type.fields["resources"].config_type.fields

    offered = resources["processes"].config_type.fields["config"].config_type
    assert "workers" not in getattr(offered, "fields", {})
    assert resources["data_root"].config_type.fields["config"].config_type.fields.keys() == {
        "path", "config_file", "output_base_dir",
    }  # fmt: skip
