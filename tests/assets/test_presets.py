"""The assets of public data: partitions, parameters, ledger rows, claims, and metadata for the UI.

Spec: docs/spec/presets.md#rescale-parameters
"""

import time
from types import SimpleNamespace

import dagster as dg
import pytest

from assets import partitions
from assets.presets import derived_preset, raw_dataset, rescale_preset
from imagemill.pipeline import leases as claims_module
from imagemill.store.ledger import Ledger
from imagemill.store.public_data import read_preset_manifest
from tests.helpers import public
from tests.helpers.another_run import another_run
from tests.helpers.presets import SIZES, coco_annotations, make_here, public_data
from tests.helpers.public import put_records, record, records_of, snapshot
from tests.helpers.wiring import claims, failure_of, history, materialized

KEY = "coco/p"


@pytest.fixture
def instance():
    with history() as instance:
        yield instance


@pytest.fixture
def dataset(data_root):
    return public.raw_dataset(public_data(data_root).path / "coco", SIZES)


def presets_yaml(root, text):
    place = public_data(root)
    place.path.mkdir(parents=True, exist_ok=True)
    place.presets_yaml.write_text(text)


def rescale(root, instance, key=KEY, **config):
    return make_here(root, instance, rescale_preset, key, **{"library": "pillow", "workers": 1, **config})


def parameters(dataset, preset="p"):
    manifest = read_preset_manifest(dataset.preset(preset))
    assert manifest
    return manifest["stage_stats"]["rescale"]


def problems(root):
    with Ledger(root.ledger) as ledger:
        return {p.item: (p.reason, p.remedy) for p in ledger.problems() if p.asset == "rescale_preset"}


def metadata(instance, asset):
    (event,) = instance.fetch_materializations(dg.AssetKey(asset), limit=1).records
    return {name: value.value for name, value in event.asset_materialization.metadata.items()}


# ---- partitions


def test_datasets_base_presets_and_coordinate_presets_have_separate_partitions():
    """A derived preset is never rescaled, so the rescaling asset has no partition for it."""
    assert raw_dataset.partitions_def == partitions.datasets
    assert rescale_preset.partitions_def == partitions.presets
    assert derived_preset.partitions_def == partitions.coord_presets


def test_each_preset_has_its_own_history(data_root, instance, dataset):
    assert rescale(data_root, instance, "coco/p").success
    assert rescale(data_root, instance, "coco/q", image_factor=16).success
    assert make_here(data_root, instance, derived_preset, "coco/p").success
    assert make_here(data_root, instance, derived_preset, "coco/p_max1").success

    assert materialized(instance, "rescale_preset") == ["coco/p", "coco/q"]
    assert materialized(instance, "derived_preset") == ["coco/p", "coco/p_max1"]


# ---- raw


def test_raw_records_are_converted_from_sources_in_presets_yaml(data_root, instance):
    source = data_root.path / "source"
    coco_annotations(source)
    coco_annotations(source, SIZES[:1], split="val")
    files = f"{{train: {source}/instances_train.json, val: {source}/instances_val.json}}"
    presets_yaml(data_root, f"datasets: {{coco: {{adapter: coco, annotations: {files}, images: {source}/images}}}}")

    assert make_here(data_root, instance, raw_dataset, "coco").success

    dataset = public_data(data_root).dataset("coco")
    assert [len(records_of(dataset.raw_jsonl(split))) for split in ("train", "val")] == [3, 1]
    found = metadata(instance, "raw_dataset")
    assert (found["train records"], found["val records"], found["train objects"]) == (3, 1, 6)


def test_raw_records_are_converted_from_sources_in_run_configuration(data_root, instance):
    annotations = coco_annotations(data_root.path / "source")

    result = make_here(
        data_root, instance, raw_dataset, "coco", adapter="coco", annotations={"train": str(annotations)},
        images=str(annotations.parent / "images"),
    )  # fmt: skip

    assert result.success
    assert public_data(data_root).dataset("coco").splits() == ["train"]


def test_dropped_raw_records_are_listed_in_the_ui(data_root, instance):
    annotations = coco_annotations(data_root.path / "source")
    (data_root.path / "source" / "images" / "train0.jpg").unlink()
    given = {
        "adapter": "coco",
        "annotations": {"train": str(annotations)},
        "images": str(annotations.parent / "images"),
    }

    assert make_here(data_root, instance, raw_dataset, "coco", **given, split_rule="id % 2 == 0").success

    found = metadata(instance, "raw_dataset")
    assert (found["missing image"], found["train records"], found["val records"]) == (1, 1, 1)
    listing = public_data(data_root).dataset("coco").raw / "train.dropped.jsonl"
    assert found["train left out"] == str(listing)


# ---- parameters


def test_object_order_is_recorded_and_a_different_one_is_refused(data_root, instance, dataset):
    """The launchpad offers only existing orders and rejects other names."""
    assert rescale(data_root, instance, object_order="top_left").success
    assert parameters(dataset)["object_order"] == "top_left"
    other = make_here(data_root, instance, derived_preset, "coco/p", object_order="annotation")
    assert "object_order is top_left, requested annotation" in str(failure_of(other, "derived_preset"))


def test_parameters_come_from_presets_yaml_the_run_and_the_defaults(data_root, instance, dataset):
    presets_yaml(data_root, "presets: {coco/p: {image_factor: 16, splits: [train]}}")

    assert rescale(data_root, instance, min_pixels=1024).success

    found = parameters(dataset)
    assert (found["image_factor"], found["min_pixels"], found["max_pixels"]) == (16, 1024, 786432)
    assert [(r["width"], r["height"]) for r in records_of(dataset.preset("p").jsonl("train"))][2] == (48, 48)


def test_omitted_parameters_equal_the_recorded_ones(data_root, instance, dataset):
    assert rescale(data_root, instance, image_factor=16).success
    before = snapshot(dataset.preset("p").path)

    assert rescale(data_root, instance).success

    assert parameters(dataset)["image_factor"] == 16
    assert snapshot(dataset.preset("p").path) == before


def test_run_that_contradicts_presets_yaml_fails_before_any_write_and_names_both(data_root, instance, dataset):
    presets_yaml(data_root, "presets: {coco/p: {max_pixels: 786432}}")

    result = rescale(data_root, instance, max_pixels=602112)

    assert "--max-pixels gives 602112, presets.yaml gives 786432" in failure_of(result, "rescale_preset")
    assert not dataset.preset("p").path.exists()


def test_run_with_other_parameters_than_recorded_fails_before_any_write(data_root, instance, dataset):
    assert rescale(data_root, instance).success
    dataset.preset("p").images.joinpath("0.jpg").unlink()
    before = snapshot(dataset.path)

    result = rescale(data_root, instance, max_pixels=602112)

    said = failure_of(result, "rescale_preset")
    assert "max_pixels recorded 786432, requested 602112" in said
    assert "choose a new preset name" in said
    assert snapshot(dataset.path) == before
    with Ledger(data_root.ledger) as ledger:
        assert claims(ledger) == []


# ---- refused lines


def test_refused_lines_are_in_the_ledger_until_they_are_repaired(data_root, instance, dataset):
    put_records(dataset, [record("0.jpg", 101, 67), "{", record("1.jpg", 99, 64)])

    assert not rescale(data_root, instance).success

    found = problems(data_root)
    assert list(found) == ["coco/p/train.jsonl:2", "coco/p/train.jsonl:3"]
    assert found["coco/p/train.jsonl:2"][0] == "line"
    assert all(remedy for _, remedy in found.values())
    assert not dataset.preset("p").jsonl("train").exists()

    put_records(dataset, [record("0.jpg", 101, 67), record("1.jpg", 96, 64)])
    assert rescale(data_root, instance).success
    assert problems(data_root) == {}


def test_refused_lines_of_another_split_or_preset_are_kept_until_it_is_rescaled(data_root, instance, dataset):
    put_records(dataset, ["{"], split="val")
    assert not rescale(data_root, instance).success
    assert not rescale(data_root, instance, "coco/p2").success

    assert rescale(data_root, instance, splits=["train"]).success

    assert sorted(problems(data_root)) == ["coco/p/val.jsonl:1", "coco/p2/val.jsonl:1"]


# ---- claims


@pytest.mark.parametrize(
    ("asset", "key"), [(rescale_preset, KEY), (derived_preset, KEY), (derived_preset, "coco/p_max1")]
)
def test_rescale_and_coord_of_one_base_wait_for_each_other(
    data_root, instance, dataset, asset, key, monkeypatch, capfd
):
    """Both write the base's manifest, and coord reads its records. Spec: docs/spec/conventions.md#leases"""
    assert rescale(data_root, instance).success
    with another_run(data_root, "presets", KEY) as process:
        # The wait ends as soon as there is one.
        monkeypatch.setattr(
            claims_module,
            "time",
            SimpleNamespace(sleep=lambda seconds: process.communicate(), monotonic=time.monotonic),
        )
        result = make_here(data_root, instance, asset, key)

    assert result.success
    assert capfd.readouterr().err.count("waiting for run another") == 1
    with Ledger(data_root.ledger) as ledger:
        assert claims(ledger) == []


def test_another_preset_of_the_dataset_does_not_wait(data_root, instance, dataset, capfd):
    with another_run(data_root, "presets", "coco/other"):
        assert rescale(data_root, instance).success

    assert "waiting" not in capfd.readouterr().err


# ---- metadata


def test_materialisation_has_counts_and_contact_sheet(data_root, instance, dataset):
    assert rescale(data_root, instance).success

    found = metadata(instance, "rescale_preset")
    assert (found["resized (images)"], found["copied (images)"], found["kept (images)"], found["train records"]) == (
        2,
        1,
        0,
        3,
    )
    assert found["path"] == str(dataset.preset("p").path)
    assert "](data:image/" in found["boxes"]
    assert (dataset.preset("p").path / "contact_sheet.png").is_file()


def test_ledger_records_the_counts_of_a_run(data_root, instance, dataset):
    result = rescale(data_root, instance)

    with Ledger(data_root.ledger) as ledger:
        counts = ledger.counts([result.run_id])["rescale_preset"]
    assert {name: count for name, count in counts.items() if count} == {"resized": 2, "copied": 1}


def test_derived_preset_without_its_base_fails_with_the_command_to_run(data_root, instance, dataset):
    result = make_here(data_root, instance, derived_preset, "coco/p_max1")

    assert "imagemill preset rescale coco --preset p" in failure_of(result, "derived_preset")
    assert not dataset.preset("p_max1").path.exists()
    with Ledger(data_root.ledger) as ledger:
        assert claims(ledger) == []
