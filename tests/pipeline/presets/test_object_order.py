"""The order of objects: by rescale, by coord, and in presets of the original system.

Spec: docs/spec/presets.md#object-order
"""

import json

import pytest

from imagemill.errors import ImagemillError, WrongUsage
from imagemill.formats.manifest import read_json, write_json
from imagemill.pipeline.presets.derive import BaseChanged
from imagemill.pipeline.presets.object_order import OrderConflict
from imagemill.pipeline.presets.rescale_plan import PresetConflict
from imagemill.store.public_data import SPACES
from imagemill.validation.validator import validate_preset
from tests.helpers import public
from tests.helpers.presets import SIZES, coord_here, rescale_here
from tests.helpers.public import put_records, record, records_of, snapshot

# In the order of the annotations; `tie` and `tie again` are at one place.
BOXES = {
    "low": [1, 30, 20, 38], "right": [20, 3, 30, 20], "tie": [2, 3, 9, 9], "tie again": [2, 3, 30, 30],
    "top": [30, 1, 40, 30],
}  # fmt: skip
OBJECTS = [{"desc": name, "bbox_2d": box, "score": 0.5} for name, box in BOXES.items()]
OBJECTS.append({"desc": "polygon", "poly": [30, 2, 12, 3, 30, 4], "poly_points": 3})
TOP_LEFT = ["top", "polygon", "tie", "tie again", "right", "low"]


@pytest.fixture
def dataset(tmp_path):
    dataset = public.raw_dataset(tmp_path / "coco", SIZES)
    put_records(dataset, [record(f"{n}.jpg", *size, *OBJECTS) for n, size in enumerate(SIZES)])
    return dataset


def names_in(preset, split="train"):
    """Return the names of the objects of each record, by space."""
    return {
        space: [[item["desc"] for item in one["objects"]] for one in records_of(preset.records(split, space))]
        for space in SPACES
    }


def order_in(preset):
    return read_json(preset.manifest)["stage_stats"]["rescale"].get("object_order")


def test_default_is_the_order_of_the_annotations(dataset):
    rescale_here(dataset)
    coord_here(dataset)

    assert names_in(dataset.preset("p")) == dict.fromkeys(SPACES, [[item["desc"] for item in OBJECTS]] * 3)
    assert order_in(dataset.preset("p")) == "annotation"


@pytest.mark.parametrize("name", ["p", "p_max6"])
def test_top_left_is_the_same_order_in_all_three_files(dataset, name):
    rescale_here(dataset, object_order="top_left")
    coord_here(dataset, name)

    preset = dataset.preset(name)
    assert names_in(preset) == dict.fromkeys(SPACES, [TOP_LEFT] * 3)
    assert order_in(preset) == "top_left"
    before = snapshot(dataset.path)
    rescale_here(dataset)
    coord_here(dataset, name)
    assert snapshot(dataset.path) == before, "the recorded order holds without a flag"
    assert all(report.passed for report in validate_preset(preset.path))


def test_derived_records_of_a_sorted_base_keep_their_bytes(dataset):
    rescale_here(dataset, object_order="top_left")
    coord_here(dataset, "p_max6")

    assert dataset.preset("p_max6").jsonl("train").read_bytes() == dataset.preset("p").jsonl("train").read_bytes()


def test_other_order_than_recorded_is_refused_before_any_write(dataset):
    rescale_here(dataset)
    before = snapshot(dataset.path)

    with pytest.raises(PresetConflict, match="object_order recorded annotation, requested top_left"):
        rescale_here(dataset, object_order="top_left")
    for name in ("p", "p_max6"):
        with pytest.raises(OrderConflict, match="object_order is annotation, requested top_left"):
            coord_here(dataset, name, order="top_left")
    assert snapshot(dataset.path) == before


def test_unknown_order_is_wrong_usage(dataset):
    with pytest.raises(WrongUsage, match="annotation, top_left"):
        rescale_here(dataset, object_order="size")
    rescale_here(dataset)
    with pytest.raises(WrongUsage, match="annotation, top_left"):
        coord_here(dataset, order="size")


def test_preset_of_an_earlier_release_keeps_the_order_of_the_annotations(dataset):
    rescale_here(dataset)
    coord_here(dataset)
    coord_here(dataset, "p_max6")
    for name in ("p", "p_max6"):
        manifest = read_json(dataset.preset(name).manifest)
        del manifest["stage_stats"]["rescale"]["object_order"]
        write_json(dataset.preset(name).manifest, manifest)
    before = snapshot(dataset.path)

    rescale_here(dataset)
    coord_here(dataset)
    coord_here(dataset, "p_max6")

    assert snapshot(dataset.path) == before
    with pytest.raises(PresetConflict, match="recorded annotation"):
        rescale_here(dataset, object_order="top_left")


def test_damaged_order_in_a_manifest_is_named(dataset):
    rescale_here(dataset)
    manifest = read_json(dataset.preset("p").manifest)
    manifest["stage_stats"]["rescale"]["object_order"] = 3
    write_json(dataset.preset("p").manifest, manifest)

    with pytest.raises(ImagemillError, match="object_order is 3"):
        coord_here(dataset)


# ---- presets of the original system


@pytest.fixture
def original(dataset):
    """A preset as CoordExp writes it, with its own manifest and JSON.

    Objects are sorted by (y, x) of the first point in norm and coord, but not in pixel records.
    """
    rescale_here(dataset, "sorted", object_order="top_left")
    coord_here(dataset, "sorted")
    rescale_here(dataset)
    preset = dataset.preset("p")
    (preset.path / ".images.jsonl").unlink()
    for space in ("norm", "coord"):
        lines = [json.dumps(one) for one in records_of(dataset.preset("sorted").records("train", space))]
        preset.records("train", space).write_text("".join(line + "\n" for line in lines))
    rescale = {"image_factor": 32, "max_pixels": 786432, "min_pixels": 4096, "num_workers": 8, "records": {"train": 3}}
    manifest = {
        "dataset_id": "coco",
        "preset": "p",
        "max_objects": None,
        "splits": {},
        "stage_stats": {"rescale": rescale},
    }
    preset.manifest.write_text(json.dumps(manifest, indent=2))
    return preset


def files_of(preset):
    return {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in preset.path.glob("*.jsonl")}


def test_files_of_the_original_system_are_kept_and_top_left_is_recorded(dataset, original):
    before = files_of(original)

    coord_here(dataset)
    coord_here(dataset)

    assert files_of(original) == before
    assert order_in(original) == "top_left"
    assert names_in(original)["pixel"][0] == [item["desc"] for item in OBJECTS], (
        "pixel records are left as they are, too"
    )
    with pytest.raises(OrderConflict, match="object_order is top_left, requested annotation"):
        coord_here(dataset, order="annotation")
    assert all(report.passed for report in validate_preset(original.path))


@pytest.mark.parametrize("base_first", [True, False])
def test_preset_derived_from_one_of_the_original_system_is_top_left(dataset, original, base_first):
    if base_first:
        coord_here(dataset)
    coord_here(dataset, "p_max6")

    derived = dataset.preset("p_max6")
    assert names_in(derived) == dict.fromkeys(SPACES, [TOP_LEFT] * 3)
    assert order_in(derived) == "top_left"
    before = snapshot(dataset.path)
    coord_here(dataset, "p_max6")
    assert snapshot(dataset.path) == before
    coord_here(dataset)
    coord_here(dataset, "p_max6")
    assert all(report.passed for report in validate_preset(derived.path))


def test_sorted_files_with_other_values_are_replaced_in_the_same_order(dataset, original):
    """A trainer that accepted the order of the old files also accepts that of the new ones."""
    text = original.records("train", "norm").read_text()
    original.records("train", "norm").write_text(text.replace('"desc": "low"', '"desc": "lower"'))

    coord_here(dataset)

    assert names_in(original)["norm"] == names_in(original)["coord"] == [TOP_LEFT] * 3
    assert order_in(original) == "top_left"


@pytest.mark.parametrize(("asked", "expected"), [(None, "annotation"), ("top_left", "top_left")])
def test_preset_of_the_original_system_without_norm_and_coord_takes_the_requested_order(
    dataset, original, asked, expected
):
    for space in ("norm", "coord"):
        original.records("train", space).unlink()

    coord_here(dataset, order=asked)

    assert names_in(original)["norm"][0] == (TOP_LEFT if asked else [item["desc"] for item in OBJECTS])
    assert order_in(original) == expected


def test_derived_preset_of_another_order_than_its_base_is_refused(dataset, original):
    coord_here(dataset, "p_max6")
    manifest = read_json(dataset.preset("p_max6").manifest)
    manifest["stage_stats"]["rescale"]["object_order"] = "annotation"
    write_json(dataset.preset("p_max6").manifest, manifest)

    with pytest.raises(BaseChanged, match="object_order"):
        coord_here(dataset, "p_max6")
