"""Locations of a dataset's own files. Spec: docs/spec/presets.md#presets-file"""

from pathlib import Path

import pytest

from imagemill.errors import WrongUsage
from imagemill.pipeline.presets.preset_config import read_presets
from imagemill.pipeline.presets.raw_source import RawSource, raw_source

NOTHING = dict.fromkeys(RawSource._fields)
FLAGS = {**NOTHING, "adapter": "lvis", "annotations": {"train": "/x/lvis.json"}, "images": "/x/images"}


@pytest.fixture
def configured(tmp_path):
    path = tmp_path / "presets.yaml"
    path.write_text(
        "datasets: {coco: {adapter: coco, annotations: {train: a/train.json, val: a/val.json}, images: /data/coco}}"
    )
    return read_presets(path)


def test_source_is_what_the_file_says_relative_to_it(configured, tmp_path):
    files = {"train": tmp_path / "a" / "train.json", "val": tmp_path / "a" / "val.json"}

    assert raw_source(configured, "coco", NOTHING) == RawSource("coco", files, Path("/data/coco"), "boxes", None)


def test_dataset_that_the_file_does_not_name_is_what_was_asked(configured):
    found = raw_source(configured, "lvis", {**FLAGS, "geometry": "polygons"})

    assert found == RawSource("lvis", {"train": Path("/x/lvis.json")}, Path("/x/images"), "polygons", None)


def test_one_split_of_the_file_may_be_asked_for(configured, tmp_path):
    asked = {**NOTHING, "annotations": {"val": str(tmp_path / "a" / "val.json")}, "adapter": "coco"}

    assert list(raw_source(configured, "coco", asked).annotations) == ["val"]


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"adapter": "lvis"}, "--adapter gives lvis, presets.yaml gives coco"),
        ({"images": "/other"}, "--images gives /other, presets.yaml gives /data/coco"),
        ({"geometry": "polygons"}, "--geometry gives polygons, presets.yaml gives boxes"),
        ({"annotations": {"train": "/x.json"}}, "--annotations gives train: /x.json, presets.yaml gives train: "),
    ],
)
def test_difference_names_both(configured, asked, says):
    with pytest.raises(WrongUsage, match="leave the flag out") as refused:
        raw_source(configured, "coco", {**NOTHING, **asked})
    assert says in str(refused.value)
    assert "PosixPath" not in str(refused.value)


@pytest.mark.parametrize("missing", ["adapter", "annotations", "images"])
def test_what_no_one_says_is_named(configured, missing):
    with pytest.raises(WrongUsage, match=f"no {missing} given"):
        raw_source(configured, "lvis", {**FLAGS, missing: None})


def test_split_rule_divides_one_file_only(tmp_path):
    given = {
        "adapter": "coco",
        "annotations": {"train": Path("a.json"), "val": Path("b.json")},
        "images": Path("images"),
    }

    with pytest.raises(WrongUsage, match="a split rule, and 2 files of annotations") as caught:
        raw_source(read_presets(tmp_path / "presets.yaml"), "coco", {**NOTHING, **given, "split_rule": "id % 20 == 0"})

    assert "name one file, or leave the rule out" in caught.value.do
