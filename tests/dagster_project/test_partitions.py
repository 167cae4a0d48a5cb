"""Presets and missions as partitions. Spec: docs/spec/presets.md#presets-file"""

import dagster as dg
import pytest

from assets.partitions import coord_presets, datasets, missions, presets, ranks
from dagster_project import sensors
from dagster_project.definitions import build_definitions
from dagster_project.deployments import test_resources
from dagster_project.partitions import register_presets
from dagster_project.work import open_command
from imagemill.pipeline.presets.preset_config import read_presets
from imagemill.pipeline.session import open_session
from resources.data_root import DataRootResource

TEXT = """
datasets:
  lvis: {adapter: lvis, annotations: {train: lvis.json}, images: images}
presets:
  coco/rescale_32_768: {max_objects: 60}
  coco/rescale_28_768: {image_factor: 28}
"""


@pytest.fixture
def instance():
    with dg.DagsterInstance.ephemeral() as instance:
        yield instance


@pytest.fixture
def presets_yaml(data_root):
    path = data_root.public_data / "presets.yaml"
    path.parent.mkdir()
    path.write_text(TEXT)
    return path


def keys(instance):
    return [instance.get_dynamic_partitions(kind.name) for kind in (datasets, presets, coord_presets)]


def tick(root, instance, sensor=sensors.configured_presets):
    resources = {"data_root": DataRootResource(path=str(root.path), config_file=None)}
    repository = build_definitions(test_resources("unused")).get_repository_def()
    with dg.build_sensor_context(instance=instance, resources=resources, repository_def=repository) as context:
        return sensor.evaluate_tick(context)


def test_file_gives_the_partitions_of_the_three_assets(presets_yaml, instance):
    assert register_presets(instance, read_presets(presets_yaml)) == 7
    bases = ["coco/rescale_32_768", "coco/rescale_28_768"]
    assert [sorted(keys(instance)[0]), *keys(instance)[1:]] == [
        ["coco", "lvis"], bases, [bases[0], f"{bases[0]}_max60", bases[1]],
    ]  # fmt: skip


def test_known_partitions_are_left_and_those_taken_out_of_the_file_keep_their_history(presets_yaml, instance):
    register_presets(instance, read_presets(presets_yaml))
    before = keys(instance)
    presets_yaml.write_text("presets: {coco/rescale_32_768: {max_objects: 60}}")

    assert register_presets(instance, read_presets(presets_yaml)) == 0
    assert keys(instance) == before


def test_sensor_makes_partitions_of_what_is_new_and_runs_nothing(data_root, presets_yaml, instance):
    data = tick(data_root, instance)

    assert not data.run_requests
    assert data.skip_message.startswith("7 new partitions")
    presets_yaml.write_text(TEXT + "  coco/new: {}\n")
    assert tick(data_root, instance).skip_message.startswith("2 new partitions")
    assert "coco/new" in keys(instance)[1]


def test_sensor_is_content_without_a_file(data_root, instance):
    assert tick(data_root, instance).skip_message.startswith("0 new partitions")


def test_preset_made_by_flags_registers_its_partition(data_root):
    with open_session(data_root.path) as session, open_command(session) as work:
        work.make_preset("rescale_preset", "coco/by_flags", max_pixels=602112)

        assert work.instance.get_dynamic_partitions(presets.name) == ["coco/by_flags"]
    assert work.error
    assert "no dataset coco" in work.error


def test_sensor_makes_partitions_of_missions_with_the_configured_number_of_ranks(data_root, instance):
    """Ranks are registered too; a folder whose name cannot be a mission's is skipped."""
    for name in ("铁塔", ".hidden", "a\nb"):
        (data_root.stage_a_input / name).mkdir(parents=True)
    data_root.config_file.write_text("stage_a_ranks: 2\n")

    data = tick(data_root, instance, sensors.found_missions)

    assert not data.run_requests
    assert instance.get_dynamic_partitions(missions.name) == ["铁塔"]
    assert instance.get_dynamic_partitions(ranks.name) == ["铁塔/0of2", "铁塔/1of2"]
    assert tick(data_root, instance, sensors.found_missions).skip_message.startswith("0 new partitions")
