"""io_managers/hardlink.py: a request becomes a preset, reported with counts. Spec: docs/spec/presets.md#hardlinks"""

import os

import dagster as dg
import pytest

from assets.partitions import coord_presets
from assets.presets import derived_preset, rescale_preset
from dagster_project.deployments import test_resources as resources_of
from imagemill.store.ledger import Ledger
from tests.helpers import public
from tests.helpers.presets import SIZES, inodes, make_here, public_data
from tests.helpers.public import put_records, record, records_of
from tests.helpers.wiring import QUIET, claims, failure_of, history

THING = {"desc": "thing", "bbox_2d": [1, 2, 30, 31]}


@pytest.fixture
def instance():
    with history() as instance:
        yield instance


@pytest.fixture
def dataset(data_root, instance):
    """A rescaled base: one, two and three objects in its images."""
    dataset = public.raw_dataset(public_data(data_root).path / "coco", SIZES)
    put_records(dataset, [record(f"{n}.jpg", *size, *[THING] * (n + 1)) for n, size in enumerate(SIZES)])
    assert make_here(data_root, instance, rescale_preset, "coco/p", library="pillow", workers=1).success
    return dataset


def coord(root, instance, key, **config):
    return make_here(root, instance, derived_preset, key, **config)


def metadata(result):
    (event,) = result.get_asset_materialization_events()
    return {name: value.value for name, value in event.materialization.metadata.items()}


def test_base_preset_gets_records_in_place_without_changing_images(data_root, instance, dataset):
    base = dataset.preset("p")
    before = inodes(base)

    result = coord(data_root, instance, "coco/p")

    assert result.success
    assert [len(records_of(base.records("train", space))) for space in ("pixel", "norm", "coord")] == [3, 3, 3]
    assert inodes(base) == before
    assert "boxes" not in metadata(result), "its sheet is rescale's"


def test_derived_preset_shares_only_the_images_of_its_records(data_root, instance, dataset):
    result = coord(data_root, instance, "coco/p_max2")

    base, derived = dataset.preset("p"), dataset.preset("p_max2")
    assert result.success
    assert sorted(inodes(derived)) == ["images/0.jpg", "images/1.jpg"]
    assert inodes(derived).items() <= inodes(base).items(), "inode for inode"
    found = metadata(result)
    assert [found[name] for name in ("train records", "train dropped (records)", "train largest (objects)")] == [
        2,
        1,
        3,
    ]
    assert (found["linked (images)"], found["present (images)"]) == (2, 0)
    assert found["path"] == str(derived.path)


def test_derived_preset_has_its_own_contact_sheet(data_root, instance, dataset):
    found = metadata(coord(data_root, instance, "coco/p_max2"))

    assert "](data:image/" in found["boxes"]
    assert (dataset.preset("p_max2").path / "contact_sheet.png").is_file()


def test_counts_are_recorded_and_a_second_run_has_nothing_to_write(data_root, instance, dataset):
    results = [coord(data_root, instance, "coco/p_max2") for _ in range(2)]

    with Ledger(data_root.ledger) as ledger:
        first, second = (ledger.counts([result.run_id])["derived_preset"] for result in results)
    assert (first["records"], first["dropped"], first["linked"]) == (2, 1, 2)
    assert (second["linked"], second["present"], second["files_written"]) == (0, 2, 0)


def test_only_chosen_splits_are_written(data_root, instance, dataset):
    put_records(dataset, [record("0.jpg", *SIZES[0])], split="val")
    assert make_here(data_root, instance, rescale_preset, "coco/p", library="pillow", workers=1).success

    assert coord(data_root, instance, "coco/p", splits=["val"]).success

    assert dataset.preset("p").records("val", "coord").is_file()
    assert not dataset.preset("p").records("train", "coord").exists()


def test_failed_run_releases_its_claims_and_reports_the_cause(data_root, instance, dataset):
    os.unlink(dataset.preset("p").images / "1.jpg")

    result = coord(data_root, instance, "coco/p_max2")

    assert "images/1.jpg" in failure_of(result, "derived_preset")
    assert not dataset.preset("p_max2").path.exists()
    with Ledger(data_root.ledger) as ledger:
        assert claims(ledger) == []


def test_downstream_asset_gets_the_folder_of_its_preset(data_root, instance, dataset):
    assert coord(data_root, instance, "coco/p_max2").success

    @dg.asset(partitions_def=coord_presets, io_manager_key="plain")
    def trainer(derived_preset):
        return derived_preset

    result = dg.materialize(
        [derived_preset.to_source_assets()[0], trainer], partition_key="coco/p_max2", instance=instance,
        resources={**resources_of(str(data_root.path)), "plain": dg.InMemoryIOManager()}, run_config=QUIET,
    )  # fmt: skip

    assert result.output_for_node("trainer") == dataset.preset("p_max2")
