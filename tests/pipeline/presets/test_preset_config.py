"""`presets.yaml`. Spec: docs/spec/presets.md#presets-file"""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from imagemill.errors import WrongUsage
from imagemill.pipeline.presets.preset_config import PresetSettings, read_presets, split_key

WHOLE = """\
datasets:
  coco:
    adapter: coco
    annotations: {train: coco/train.json, val: /abs/val.json}
    images: photos
presets:
  coco/rescale_32_768: {max_pixels: 602112, max_objects: 60, splits: [train]}
  coco/plain:
  vg/other: {image_factor: 28, library: pillow}
"""


@pytest.fixture
def read(tmp_path):
    def read_text(text):
        (tmp_path / "presets.yaml").write_text(text, encoding="utf-8")
        return read_presets(tmp_path / "presets.yaml")

    return read_text


def test_file_gives_datasets_and_presets(read, tmp_path):
    presets = read(WHOLE)

    coco = presets.datasets["coco"]
    assert [presets.place(path) for path in (*coco.annotations.values(), coco.images)] == [
        tmp_path / "coco/train.json", tmp_path.__class__("/abs/val.json"), tmp_path / "photos",
    ]  # fmt: skip
    assert presets.presets["coco/plain"] == PresetSettings()
    assert presets.presets["vg/other"].parameters == {
        "image_factor": 28, "max_pixels": None, "min_pixels": None, "library": "pillow", "object_order": None,
    }  # fmt: skip


def test_max_objects_yields_the_base_and_its_derived_preset(read):
    assert read(WHOLE).keys() == ["coco/rescale_32_768", "coco/rescale_32_768_max60", "coco/plain", "vg/other"]


def test_no_file_and_an_empty_one_name_no_preset(tmp_path, read):
    assert read_presets(tmp_path / "none.yaml").keys() == []
    assert read("").keys() == read("presets:\n").keys() == []


@pytest.mark.parametrize(
    ("line", "text", "says"),
    [
        (2, "presets:\n  coco/a: {max_pixel: 5}", "max_pixel.*image_factor, max_pixels"),
        (3, "presets:\n  coco/a:\n    max_pixels: many", "presets.coco/a.max_pixels: Expected `int"),
        (2, "presets:\n  coco/a: {max_pixels: 0}", "max_pixels"),
        (2, "presets:\n  coco/a: {max_pixels: true}", "max_pixels"),
        (2, "presets:\n  coco/a: {max_pixels: 100}", "allows no image"),
        (2, "presets:\n  coco/a: {splits: [test]}", "splits"),
        (2, "presets:\n  coco/a_max60: {}", "base presets.*write coco/a with max_objects: 60"),
        (1, "2: {}", "`datasets`"),
        (2, "presets:\n  coco/a_max_60: {}", "_max60"),
        (2, "presets:\n  coco: {}", "<dataset>/<preset>"),
        (2, "presets:\n  coco/raw: {}", "not a valid name of a preset"),
        (2, "presets:\n  a/b/c: {}", "not a valid name of a preset"),
        (3, "presets:\n  coco/a: {}\n  coco/a: {}", "'coco/a' already occurs in line 2"),
        (1, "presets: [coco/a]", "not a mapping"),
        (1, "preset: {}", "`datasets` and `presets`"),
        (1, "- coco/a", "not a mapping"),
        (
            3,
            "datasets:\n  c:\n    adapter: voc\n    annotations: {train: a}\n    images: b",
            "coco, lvis, visual_genome",
        ),
        (2, "datasets:\n  c: {adapter: coco, images: b}", "annotations"),
        (2, "datasets:\n  ../c: {adapter: coco, annotations: {train: a}, images: b}", "not a valid name of a dataset"),
        (2, "datasets:\n  c: {adapter: coco, annotations: {test: a}, images: b}", "test"),
    ],
)
def test_mistake_is_reported_with_its_line_and_the_right_words(read, line, text, says):
    with pytest.raises(WrongUsage, match=rf"(?s)presets\.yaml line {line}: .*{says}"):
        read(text)


def test_text_that_is_no_yaml_is_reported(read, tmp_path):
    with pytest.raises(WrongUsage, match="line 2"):
        read("presets:\n  {")
    with pytest.raises(WrongUsage, match="not YAML"):
        read("presets: 2024-99-99")
    (tmp_path / "presets.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(WrongUsage, match="not UTF-8"):
        read_presets(tmp_path / "presets.yaml")


@given(st.text() | st.dictionaries(st.text(), st.integers() | st.lists(st.integers())).map(lambda d: f"presets: {d}"))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_text_is_read_or_refused(read, text):
    try:
        read(text)
    except WrongUsage as error:
        assert "presets.yaml" in str(error)
    except UnicodeEncodeError:
        pass


# ---- flags


def test_flags_fill_what_the_file_leaves_out(read):
    asked = read(WHOLE).settings("coco", "rescale_32_768", max_pixels=602112, min_pixels=100, splits=None)
    assert (asked.max_pixels, asked.min_pixels, asked.splits, asked.max_objects) == (602112, 100, ["train"], 60)


def test_preset_that_the_file_does_not_name_takes_flags_alone(read):
    assert read(WHOLE).settings("coco", "mine", image_factor=28, library=None) == PresetSettings(image_factor=28)


@pytest.mark.parametrize(
    ("flag", "says"),
    [({"max_pixels": 5000}, "--max-pixels gives 5000, presets.yaml gives 602112"),
     ({"splits": ["val"]}, r"--split gives \['val'\], presets.yaml gives \['train'\]")],
)  # fmt: skip
def test_flag_that_differs_from_the_file_names_both(read, flag, says):
    with pytest.raises(WrongUsage, match=says):
        read(WHOLE).settings("coco", "rescale_32_768", **flag)


def test_some_of_the_splits_may_be_asked_for(read):
    presets = read("presets:\n  coco/a: {splits: [train, val]}")
    assert presets.settings("coco", "a", splits=["val"]).splits == ["val"]


def test_key_is_dataset_and_preset():
    assert split_key("coco/rescale_32_768") == ("coco", "rescale_32_768")
