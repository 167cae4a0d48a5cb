"""Records of presets and raw data with their folder.

Spec: docs/spec/presets.md#layout, docs/spec/validation.md#checks, docs/spec/validation.md#rules-of-preset-records,
docs/spec/validation.md#structural-checks
"""

import json
import os

import pytest

from imagemill.domain.preset_records import PresetRules
from imagemill.formats.jsonl import write_jsonl
from imagemill.formats.manifest import write_json
from imagemill.validation.findings import collect
from imagemill.validation.presets import base_of, limits_of, preset_records
from imagemill.validation.validator import Options, validate_preset
from tests.helpers.situations import PRESET_RECORD, RESCALE, preset
from tests.helpers.stage2 import write_text

BOX = {"desc": "bowl", "bbox_2d": [1, 2, 3, 4]}


def tokens(*numbers):
    return [f"<|coord_{number}|>" for number in numbers]


def check(tmp_path, *records, name="train.jsonl", **options):
    path = tmp_path / name
    write_text(path, *(record if isinstance(record, bytes) else json.dumps(record) for record in records))
    return collect(name, "preset", preset_records(path, **options))


def of(*objects, **changes):
    return {**PRESET_RECORD, "objects": list(objects), **changes}


# ---- spaces


@pytest.mark.parametrize(
    ("name", "values"),
    [("a.jsonl", [1, 2.5, 3, 4]), ("a.norm.jsonl", [0, 1, 998, 999]), ("a.coord.jsonl", tokens(0, 1, 998, 999))],
)
@pytest.mark.parametrize("geometry", ["bbox_2d", "poly"])
def test_each_space_is_taken_in_its_own_file_only(tmp_path, name, values, geometry):
    """Numbers in .jsonl, integers 0…999 in .norm.jsonl, tokens in .coord.jsonl, never mixed."""
    long = values if geometry == "bbox_2d" else [*values, *values[:2]]
    assert check(tmp_path, of({"desc": "a", geometry: long}), name=name, limits=PresetRules(2048)).errors == 0

    for foreign in {"a.jsonl", "a.norm.jsonl", "a.coord.jsonl"} - {name}:
        if (name, foreign) == ("a.norm.jsonl", "a.jsonl"):
            continue  # ints are numbers
        assert check(tmp_path, of({"desc": "a", geometry: long}), name=foreign).rules == {"space": 1}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("a.jsonl", True), ("a.jsonl", "1"), ("a.jsonl", None), ("a.jsonl", [1]), ("a.norm.jsonl", True), ("a.norm.jsonl", 1000),
        ("a.norm.jsonl", -1), ("a.norm.jsonl", 1.0), ("a.coord.jsonl", "<|coord_1000|>"), ("a.coord.jsonl", "<|coord_01|>"),
        ("a.coord.jsonl", "<|coord_-1|>"), ("a.coord.jsonl", "<|coord_１|>"), ("a.coord.jsonl", "<|coord_1|> "),
        ("a.coord.jsonl", 1),
    ],
)  # fmt: skip
def test_one_value_of_another_space_is_found(tmp_path, name, value):
    good = tokens(0, 2, 3, 4) if "coord" in name else [0, 2, 3, 4]

    (found,) = check(
        tmp_path, of(BOX | {"bbox_2d": good}), of({"desc": "a", "bbox_2d": [value, *good[1:]]}), name=name
    ).findings
    assert (found.rule, found.line, found.field) == ("space", 2, "objects[0].bbox_2d")


@pytest.mark.parametrize("name", ["a.jsonl", "a.norm.jsonl", "a.coord.jsonl"])
@pytest.mark.parametrize("box", [[3, 2, 3, 4], [4, 2, 3, 4], [1, 4, 3, 4], [9, 2, 10, 1]])
def test_box_without_an_inside_is_found_by_number_and_not_by_spelling(tmp_path, name, box):
    """x2 > x1, y2 > y1. Token 10 is larger than token 9, although its text is smaller."""
    values = tokens(*box) if "coord" in name else box
    assert check(tmp_path, of({"desc": "a", "bbox_2d": values}), name=name).rules == {"inverted": 1}

    good = tokens(9, 99, 10, 100) if "coord" in name else [9, 9, 10, 10]
    assert check(tmp_path, of({"desc": "a", "bbox_2d": good}), name=name).findings == []


# ---- records


@pytest.mark.parametrize(
    ("images", "rule"),
    [
        (None, "images"), ([], "images"), (["a.jpg", "b.jpg"], "images"), ("a.jpg", "images"), ([""], "image_path"),
        ([" "], "image_path"),
        ([7], "image_path"), (["/a.jpg"], "image_path"), (["images/../a.jpg"], "image_path"), (["..\\a.jpg"], "image_path"),
        (["images/"], "image_path"), (["images/."], "image_path"), (["C:/a.jpg"], "image_path"), (["a\0.jpg"], "image_path"),
        (["http://x/a.jpg"], "image_path"),
    ],
)  # fmt: skip
def test_path_that_is_no_image_below_the_folder_is_found(tmp_path, images, rule):
    (found,) = check(tmp_path, of(BOX, images=images)).findings

    assert (found.rule, found.field, found.line) == (rule, "images", 1)


@pytest.mark.parametrize("path", ["images/a.jpg", "./a b/ü.jpg", "a..b/..c.jpg", "images//a.jpg"])
def test_unusual_path_below_the_folder_is_taken(tmp_path, path):
    assert check(tmp_path, of(BOX, images=[path])).findings == []


def test_unknown_keys_pass(tmp_path):
    assert check(tmp_path, {**of({**BOX, "score": None}), "bbox": [1], "image_id": 7}).findings == []


def test_polygon_is_flat_and_counted(tmp_path):
    poly = {"desc": "a", "poly": [1, 2, 3, 4, 5, 6]}
    assert check(tmp_path, of(poly, poly | {"poly_points": 3})).findings == []

    broken = [poly | {"poly_points": 4}, poly | {"poly_points": True}, poly | {"poly_points": None},
              {**poly, "poly": [[1, 2]] * 3}, {**poly, "poly": [1, 2, 3, 4, 5]}, {**poly, "poly": "x"}]  # fmt: skip
    report = check(tmp_path, *(of(item) for item in broken))
    assert [(found.line, found.rule) for found in report.findings] == [
        (1, "poly"), (2, "poly"), (3, "poly"), (4, "poly"), (5, "poly"), (6, "poly"),
    ]  # fmt: skip


@pytest.mark.parametrize("key", ["bbox", "polygon", "line", "line_points"])
def test_legacy_key_is_refused_beside_a_good_one_too(tmp_path, key):
    (found,) = check(tmp_path, of({**BOX, key: None})).findings

    assert (found.rule, found.field) == ("legacy_key", f"objects[0].{key}")
    assert key in found.remedy


def test_remedy_of_a_box_under_the_old_key_holds_for_both_forms_of_boxes(tmp_path):
    """A COCO box is [x, y, width, height]: if the key were only renamed, it would be another box."""
    (found,) = check(tmp_path, of({**BOX, "bbox": [1, 2, 3, 4]})).findings

    assert "from [x, y, width, height], as in COCO, x2 is x + width" in found.remedy
    (inverted,) = check(tmp_path, of({"desc": "a", "bbox_2d": [30, 20, 10, 5]})).findings
    assert inverted.rule == "inverted"
    assert "x2 is x + width" in inverted.remedy


@pytest.mark.parametrize("box", [[-0.5, 2, 3, 4], [1, -1, 3, 4], [1, 2, 64.5, 4], [1, 2, 3, 33]])
def test_geometry_beyond_the_edge_is_a_warning(tmp_path, box):
    report = check(tmp_path, of({"desc": "a", "bbox_2d": box}))
    assert report.passed
    assert report.rules == {"beyond_edge": 1}

    assert check(tmp_path, of({"desc": "a", "bbox_2d": [-0.0, 0, 64, 32]})).findings == []
    polygon = {"desc": "a", "poly": [*box, 1, 2]}
    assert check(tmp_path, of(polygon)).rules == {"beyond_edge": 1}


def test_one_image_has_one_size_however_its_path_is_spelled(tmp_path):
    """Two records may share one image. Spec: docs/spec/presets.md#layout"""
    assert check(tmp_path, of(BOX), of(BOX, desc=1)).findings == []

    (found,) = check(tmp_path, of(BOX), of(BOX, images=["images//a.jpg"], width=32)).findings
    assert (found.rule, found.line) == ("two_sizes", 2)
    assert "64x32" in found.message


# ---- limits


def test_limits_come_from_the_manifest_unless_given(tmp_path):
    write_json(tmp_path / "pipeline_manifest.json", {"stage_stats": {"rescale": RESCALE}})
    (tmp_path / "images").mkdir()
    wide, odd = of(BOX, width=4096, height=64), of(BOX, images=["b.jpg"], width=33)

    assert check(tmp_path, wide, odd).rules == {"max_pixels": 1, "multiple_of": 1}
    assert check(tmp_path, wide, odd, limits=PresetRules(10**6)).rules == {"multiple_of": 1}
    assert check(tmp_path, wide, odd, limits=PresetRules(10**6, 1)).rules == {}
    (tmp_path / "pipeline_manifest.json").unlink()
    assert check(tmp_path, wide, odd).rules == {}, "raw records have no limits"


@pytest.mark.parametrize(
    "manifest",
    [{}, {"stage_stats": []}, {"stage_stats": {}}, {"stage_stats": {"rescale": 7}},
     {"stage_stats": {"rescale": {"max_pixels": True, "image_factor": 0}}}],
)  # fmt: skip
def test_manifest_without_limits_gives_none(manifest):
    assert limits_of(manifest) == PresetRules(None, None)


def test_manifest_without_limits_is_a_warning_unless_they_are_given(tmp_path):
    write_json(tmp_path / "pipeline_manifest.json", {})
    (tmp_path / "images").mkdir()

    assert check(tmp_path, of(BOX)).rules == {"no_limits": 1}
    assert check(tmp_path, of(BOX), limits=PresetRules(2048, 32)).rules == {}


# ---- the folder


@pytest.mark.parametrize("how", ["link", "dangling", "file", "absent"])
def test_images_folder_is_a_real_directory_beside_a_manifest_always(tmp_path, how):
    """Without a manifest, this requires the flag. Spec: docs/spec/presets.md#hardlinks"""
    images = tmp_path / "images"
    (tmp_path / "elsewhere").mkdir()
    if how in {"link", "dangling"}:
        images.symlink_to("elsewhere" if how == "link" else "nowhere")
    elif how == "file":
        images.touch()

    assert check(tmp_path, of(BOX)).rules == {}
    assert check(tmp_path, of(BOX), enforce_real_images_folder=True).rules == {"images_folder": 1}
    write_json(tmp_path / "pipeline_manifest.json", {"stage_stats": {"rescale": RESCALE}})
    assert check(tmp_path, of(BOX)).rules == {"images_folder": 1}
    (tmp_path / "pipeline_manifest.json").unlink()
    (tmp_path / "pipeline_manifest.json").symlink_to("nowhere")
    assert "images_folder" in check(tmp_path, of(BOX)).rules, "a manifest that cannot be read is one too"


def test_base_is_a_sibling_and_nothing_else(tmp_path):
    (tmp_path / "base").mkdir()
    (tmp_path / "derived").mkdir()

    assert base_of(tmp_path / "derived", {"base": {"preset": "base"}}) == tmp_path / "base"
    for name in ("gone", "../base", "", ".", "..", None, 7, "a" * 300, "a\0"):
        assert base_of(tmp_path / "derived", {"base": {"preset": name}}) is None
    assert base_of(tmp_path / "derived", {"base": "base"}) is None


def test_whole_preset_has_a_report_per_file_and_one_of_its_folder(tmp_path):
    folder = preset(tmp_path)
    (folder / "train.coord.jsonl").write_bytes(b"{\n")
    os.link(folder / "train.jsonl", folder / "val.raw.jsonl")

    reports = {report.file.removeprefix(f"{folder}").strip("/"): report.rules for report in validate_preset(folder)}

    folder_rules = {"legacy_file": 1, "split_lines": 1}
    assert reports == {"train.coord.jsonl": {"strict_json": 1}, "train.jsonl": {}, "": folder_rules}


@pytest.mark.parametrize("name", ["empty", "gone"])
def test_preset_without_records_fails_and_says_what_to_run(tmp_path, name):
    (tmp_path / "empty" / "images").mkdir(parents=True)

    (report,) = validate_preset(tmp_path / name, Options())

    assert report.rules == {"missing_input": 1}
    assert "preset rescale" in report.findings[0].remedy


def test_records_of_raw_data_need_no_manifest(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "images").symlink_to("elsewhere")
    write_jsonl(tmp_path / "train.jsonl", [of(BOX)])

    assert collect("x", "preset", preset_records(tmp_path / "train.jsonl")).findings == []


# ---- the files of a split


def coord_line(record, desc=None):
    objects = [{"desc": desc or item["desc"], "bbox_2d": tokens(1, 2, 3, 4)} for item in record["objects"]]
    return {**record, "objects": objects}


def folder_rules(folder):
    return [*validate_preset(folder, Options(image_mode="none"))][-1].rules


@pytest.fixture
def split(tmp_path):
    """A preset whose train split has 128 lines in pixels and in coord."""
    folder = preset(tmp_path)
    records = [{**PRESET_RECORD, "images": [f"images/{n}.jpg"]} for n in range(128)]
    write_jsonl(folder / "train.jsonl", records)
    write_jsonl(folder / "train.coord.jsonl", [coord_line(record) for record in records])
    return folder, records


def test_files_of_a_split_that_agree_have_no_finding(split):
    folder, records = split
    assert folder_rules(folder) == {}

    turned = [{**record, "objects": record["objects"][::-1]} for record in map(coord_line, records)]
    write_jsonl(folder / "train.coord.jsonl", turned)
    assert folder_rules(folder) == {}, "the original system orders objects by their place"


def test_objects_of_a_preset_of_ours_have_one_order_in_all_files(split):
    """The order is the same in all three files."""
    folder, records = split
    write_json(folder / "pipeline_manifest.json", {"format": 1, "stage_stats": {"rescale": RESCALE}})
    objects = [{**PRESET_RECORD["objects"][0], "desc": name} for name in ("cat", "dog")]
    records = [{**record, "objects": objects} for record in records]
    write_jsonl(folder / "train.jsonl", records)
    coords = [coord_line(record) for record in records]
    write_jsonl(folder / "train.coord.jsonl", coords)
    assert folder_rules(folder) == {}

    coords[3]["objects"].reverse()
    write_jsonl(folder / "train.coord.jsonl", coords)

    assert folder_rules(folder) == {"split_order": 1}


def test_files_of_a_split_have_as_many_lines(split):
    folder, records = split
    write_jsonl(folder / "train.jsonl", records[:120])

    (*_, report) = validate_preset(folder)
    (found,) = report.findings
    assert (found.rule, found.file) == ("split_lines", "train.coord.jsonl")
    assert "128 lines, train.jsonl has 120" in found.message


@pytest.mark.parametrize(
    "change",
    [lambda lines: [lines[1], lines[0], *lines[2:]], lambda lines: [{**lines[0], "objects": []}, *lines[1:]],
     lambda lines: [{**lines[0], "width": 32}, *lines[1:]], lambda lines: [coord_line(lines[0], "cat"), *lines[1:]]],
)  # fmt: skip
def test_files_of_a_split_name_the_same_images_and_objects_in_order(split, change):
    folder, records = split
    write_jsonl(folder / "train.coord.jsonl", change([coord_line(record) for record in records]))

    assert folder_rules(folder) == {"split_order": 1}


def test_norm_and_coord_need_their_pixel_records(split):
    folder, _ = split
    (folder / "train.jsonl").unlink()

    assert folder_rules(folder) == {"split_without_pixels": 1}


@pytest.mark.parametrize(
    "manifest", [{"base": 7}, {"stage_stats": {"coord": 7}}, {"stage_stats": {"coord": {"splits": [1]}}}]
)
def test_any_manifest_is_taken(split, manifest):
    folder, _ = split
    write_json(folder / "pipeline_manifest.json", {"stage_stats": {"rescale": RESCALE}} | manifest)

    assert folder_rules(folder) == {}
