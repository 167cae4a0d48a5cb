"""Names and locations of public data. Spec: docs/spec/presets.md#dataset-layout"""

import pytest

from imagemill.errors import ImagemillError, WrongUsage
from imagemill.formats.manifest import write_json
from imagemill.store.public_data import PublicData, read_preset_manifest, space_of


@pytest.fixture
def preset(tmp_path):
    return PublicData(tmp_path).dataset("coco").preset("rescale_32_768")


def test_layout_is_the_contracts(tmp_path, preset):
    relative = [
        preset.jsonl("train"), preset.records("val", "norm"), preset.records("val", "coord"), preset.filter_stats("val"),
        preset.images, preset.manifest,
    ]  # fmt: skip
    dataset = PublicData(tmp_path).dataset("coco")

    assert [str(path.relative_to(tmp_path / "coco/rescale_32_768")) for path in relative] == [
        "train.jsonl", "val.norm.jsonl", "val.coord.jsonl", "val.filter_stats.json", "images", "pipeline_manifest.json",
    ]  # fmt: skip
    assert (tmp_path / "coco/raw/val.jsonl", tmp_path / "coco/raw/images") == (
        dataset.raw_jsonl("val"), dataset.raw_images,
    )  # fmt: skip


def test_splits_are_those_with_records(tmp_path, preset):
    """A norm file alone is not a published split."""
    dataset = PublicData(tmp_path).dataset("coco")
    assert (dataset.splits(), preset.splits()) == ([], [])

    dataset.raw.mkdir(parents=True)
    dataset.raw_jsonl("val").touch()
    dataset.raw_jsonl("train").touch()
    preset.path.mkdir()
    preset.records("train", "norm").touch()
    preset.jsonl("val").touch()

    assert (dataset.splits(), preset.splits()) == (["train", "val"], ["val"])


@pytest.mark.parametrize(
    ("name", "space"),
    [("train.jsonl", "pixel"), ("a/b/val.norm.jsonl", "norm"), ("val.coord.jsonl", "coord"), ("coord.jsonl", "pixel")],
)
def test_space_is_reported_by_the_name(name, space):
    assert space == space_of(name)


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "a\\b", ".hidden", "line\nbreak", " x", "x "])
def test_name_that_is_no_folder_is_refused(tmp_path, name):
    with pytest.raises(WrongUsage, match="dataset"):
        PublicData(tmp_path).dataset(name)
    with pytest.raises(WrongUsage, match="preset"):
        PublicData(tmp_path).dataset("coco").preset(name)


def test_raw_is_a_dataset_like_any_other_but_no_preset(tmp_path):
    with pytest.raises(WrongUsage):
        PublicData(tmp_path).dataset("coco").preset("raw")
    assert PublicData(tmp_path).dataset("raw").name == "raw"


def test_relative_folder_becomes_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert tmp_path / "public" == PublicData.at("public").path


def test_manifest_that_is_missing_is_none_and_one_that_is_broken_is_reported(preset):
    assert read_preset_manifest(preset) is None

    preset.path.mkdir(parents=True)
    write_json(preset.manifest, {"format": 1, "stage_stats": {}})
    assert read_preset_manifest(preset) == {"format": 1, "stage_stats": {}}

    for broken in (b"[]", b"{", b'{"stage_stats": 1}'):
        preset.manifest.write_bytes(broken)
        with pytest.raises(ImagemillError) as error:
            read_preset_manifest(preset)
        assert str(preset.manifest) in str(error.value)
