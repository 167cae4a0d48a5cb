"""The code location loads, has the required names, and is one graph from the source to the shards."""

import os
import re
import subprocess
import sys

import dagster as dg
import pytest

from dagster_project.definitions import build_definitions
from dagster_project.deployments import chosen_resources, local_resources
from imagemill.errors import WrongUsage
from tests.helpers.product import PROJECT

ASSETS = {
    "approved_images", "dinov3_npy", "vae_latents", "t5_hidden", "stage2_jsonl", "bucket_shards",
    "latent_statistics", "near_duplicates", "raw_dataset", "rescale_preset", "derived_preset",
    "stage_a_ranks", "stage_a_groups",
}  # fmt: skip


@pytest.fixture(scope="module")
def graph():
    return build_definitions(local_resources("unused")).resolve_asset_graph()


def test_assets_have_the_names_of_the_card(graph):
    assert {key.to_user_string() for key in graph.get_all_asset_keys()} == ASSETS


def test_graph_begins_at_the_source_and_ends_at_the_shards(graph):
    def parents(name):
        return {key.to_user_string() for key in graph.get(dg.AssetKey(name)).parent_keys}

    embeddings = {"dinov3_npy", "vae_latents", "t5_hidden"}
    assert parents("approved_images") == set()
    assert all(parents(name) == {"approved_images"} for name in embeddings)
    assert parents("stage2_jsonl") == embeddings
    assert parents("latent_statistics") == {"vae_latents"}
    assert parents("near_duplicates") == {"dinov3_npy"}
    assert parents("bucket_shards") == {"stage2_jsonl"}


@pytest.mark.parametrize(("text", "upstream"), [("exclude: true", {"near_duplicates"}), ("exclude: false", set())])
def test_near_duplicates_are_upstream_of_shards_only_where_shards_leave_them_out(data_root, text, upstream):
    data_root.config_file.write_text(f"near_duplicates: {{{text}}}")

    graph = build_definitions(local_resources(str(data_root.path))).resolve_asset_graph()

    parents = {key.to_user_string() for key in graph.get(dg.AssetKey("bucket_shards")).parent_keys}
    assert parents == {"stage2_jsonl"} | upstream


def test_graph_of_public_data_is_by_itself(graph):
    chain = ["raw_dataset", "rescale_preset", "derived_preset"]
    parents = [{key.to_user_string() for key in graph.get(dg.AssetKey(name)).parent_keys} for name in chain]
    assert parents == [set(), {"raw_dataset"}, {"rescale_preset"}]


def test_graph_of_stage_a_goes_from_ranks_to_groups(graph):
    parents = [
        {key.to_user_string() for key in graph.get(dg.AssetKey(name)).parent_keys}
        for name in ("stage_a_ranks", "stage_a_groups")
    ]
    assert parents == [set(), {"stage_a_ranks"}]


def test_every_asset_that_is_made_has_a_check_a_description_and_an_owner(graph):
    checked = {key.asset_key.to_user_string() for key in graph.asset_check_keys}
    assert checked == ASSETS - {"approved_images"}
    for name in ASSETS:
        node = graph.get(dg.AssetKey(name))
        assert node.description, name
        assert node.owners, name


def test_sensor_that_starts_runs_is_off_by_default():
    """The others only register partitions."""
    status = {sensor.name: sensor.default_status for sensor in build_definitions(local_resources("unused")).sensors}
    assert status == {
        "new_images": dg.DefaultSensorStatus.STOPPED, "configured_presets": dg.DefaultSensorStatus.RUNNING,
        "found_missions": dg.DefaultSensorStatus.RUNNING,
    }  # fmt: skip


def test_workspace_is_valid_for_dagsters_own_command_without_a_warning(tmp_path):
    """But for that of Dagster about its command, for which `make check-defs` runs the successor."""
    done = subprocess.run(
        [sys.executable, "-m", "dagster", "definitions", "validate", "-w", "workspace.yaml"],
        cwd=PROJECT, env={**os.environ, "DAGSTER_HOME": str(tmp_path), "PYTHONWARNINGS": "default"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    said = [line for line in (done.stdout + done.stderr).splitlines() if "`definitions_validate_command`" not in line]
    ours = [line for line in said if re.search(r"\bWARN|Warning", line) and "site-packages" not in line]
    assert ours == []


def test_production_wants_its_data_root_named(monkeypatch):
    monkeypatch.setenv("IMAGEMILL_DEPLOYMENT", "production")
    with pytest.raises(WrongUsage, match="IMAGEMILL_DATA_ROOT"):
        chosen_resources()

    monkeypatch.setenv("IMAGEMILL_DATA_ROOT", "somewhere")
    assert "data_root" in chosen_resources()


def test_unknown_deployment_is_refused(monkeypatch):
    monkeypatch.setenv("IMAGEMILL_DEPLOYMENT", "nonsense")
    with pytest.raises(WrongUsage, match="local, production"):
        chosen_resources()


def test_assets_with_pictures_link_to_their_page_of_the_viewer(graph):
    pages = {key.to_user_string(): graph.get(key).metadata.get("look") for key in graph.get_all_asset_keys()}

    assert {name for name, page in pages.items() if page is None} == {
        "latent_statistics",
        "raw_dataset",
        "stage_a_ranks",
    }
    assert pages["bucket_shards"].value == "[samples as cropped](/imagemill/images?show=in_shards&crop=1)"


@pytest.mark.parametrize(("text", "expected"), [("", set()), ("push: s3://training/cats\n", {"published_shards"})])
def test_published_shards_exist_only_where_the_configuration_says_so(data_root, text, expected):
    data_root.config_file.write_text(text)

    graph = build_definitions(local_resources(str(data_root.path))).resolve_asset_graph()

    assert {key.to_user_string() for key in graph.get_all_asset_keys()} == ASSETS | expected
    assert ("published_complete" in {key.name for key in graph.asset_check_keys}) == bool(expected)
    if expected:
        assert graph.get(dg.AssetKey("published_shards")).parent_keys == {dg.AssetKey("bucket_shards")}
