"""Conversion of public datasets to raw records.

Spec: docs/spec/presets.md#layout, docs/spec/presets.md#annotations
"""

import json

import pytest

from imagemill.adapters import convert as convert_module
from imagemill.adapters.convert import adapter_names, convert, parse_split_rule
from imagemill.domain.preset_records import violations
from imagemill.errors import ImagemillError, MissingInput, WrongUsage
from imagemill.formats.diff_writer import Draft
from imagemill.store.public_data import Dataset
from tests.helpers.public import records_of

CUP = {"category_id": 1}


@pytest.fixture
def images(tmp_path):
    """A folder with two images, of which only the names matter here."""
    for name in ("train2017/a.jpg", "val2017/b b.jpg"):
        path = tmp_path / "photos" / name
        path.parent.mkdir(parents=True)
        path.touch()
    return tmp_path / "photos"


def document(*annotations, images=None, names=("cup", "bowl")):
    return {
        "info": {},
        "images": images or [{"id": 7, "file_name": "train2017/a.jpg", "width": 100, "height": 50, "license": 1}],
        "annotations": [
            {"id": n, "image_id": 7, "category_id": 1, "iscrowd": 0, "area": 1.0, **annotation}
            for n, annotation in enumerate(annotations)
        ],
        "categories": [{"id": n, "name": name, "supercategory": "x"} for n, name in enumerate(names, start=1)],
    }


@pytest.fixture
def run(tmp_path, images):
    """A function that converts a document and returns the counts and the records."""

    def convert_document(content, adapter="coco", *, file="annotations.json", dataset="d", **options):
        annotations = tmp_path / file
        annotations.write_text(json.dumps(content))
        target = Dataset(tmp_path / "public" / dataset)
        counts = convert(target, adapter, annotations, images, **options).counts
        return counts, records_of(target.raw_jsonl(options.get("split", "train")))

    return convert_document


def test_box_becomes_two_corners_without_a_tail_of_digits(run):
    counts, records = run(
        document(
            {"bbox": [61.87, 276.25, 296.42, 103.18]},
            {"bbox": [0, 1, 10, 5], "category_id": 2},
            images=[{"id": 7, "file_name": "train2017/a.jpg", "width": 400, "height": 400}],
        )
    )

    assert records == [
        {"images": ["images/train2017/a.jpg"],
         "objects": [{"desc": "cup", "bbox_2d": [61.87, 276.25, 358.29, 379.43], "metadata": {"category_id": 1}},
                     {"desc": "bowl", "bbox_2d": [0, 1, 10, 6], "metadata": {"category_id": 2}}],
         "width": 400, "height": 400, "metadata": {"image_id": 7, "file_name": "train2017/a.jpg"}}
    ]  # fmt: skip
    assert (counts["records"], counts["objects"]) == (1, 2)


@pytest.mark.parametrize(
    ("annotation", "reason"),
    [({"bbox": [1, 1, 0, 5]}, "degenerate_box"), ({"bbox": [1, 1, 5, -2]}, "degenerate_box"),
     ({"bbox": [1, 1, 5, 5], "iscrowd": 1, "segmentation": {"counts": [1], "size": [1, 1]}}, "crowd"),
     ({"bbox": [1, 1, 5, 5], "category_id": 9}, "unknown_category"),
     ({"bbox": [1, 1, 5, 5], "category_id": 3}, "blank_name"),
     ({"bbox": [1, 1, 5, 5], "image_id": 8}, "unknown_image"),
     ({"bbox": [300, 300, 20, 20]}, "outside_image"), ({"bbox": [-20, 1, 20, 5]}, "outside_image"),
     ({"bbox": [100, 1, 5, 5]}, "outside_image"), ({"bbox": [1, 50, 5, 5]}, "outside_image"),
     ({"bbox": [10, 10, 1e308, 5]}, "out_of_range"), ({"bbox": [-1e308, 1, 1.7e308, 5]}, "out_of_range"),
     ({"bbox": [10, 10, 10**400, 5]}, "malformed_annotation"), ({"bbox": [1, 1, 5]}, "malformed_annotation"),
     ({"bbox": None}, "malformed_annotation"), ({"bbox": [1, 1, float("nan"), 5]}, "malformed_annotation"),
     ({"bbox": [1, 1, float("inf"), 5]}, "malformed_annotation"), ({"category_id": "cup"}, "malformed_annotation")],
)  # fmt: skip
def test_annotation_that_is_no_object_is_left_out_and_counted(run, annotation, reason):
    counts, records = run(document({"bbox": [0, 0, 9, 9]}, annotation, names=("cup", "bowl", " ")))

    assert len(records[0]["objects"]) == 1
    assert counts[reason] == 1


@pytest.mark.parametrize(
    ("bbox", "clipped"),
    [
        ([-10, -5, 30, 20], [0, 0, 20, 15]),
        ([90, 40, 20.5, 20], [90, 40, 100, 50]),
        ([-5, -5, 200, 100], [0, 0, 100, 50]),
    ],
)
def test_box_is_clipped_to_its_image(run, bbox, clipped):
    counts, records = run(document({"bbox": bbox}, {"bbox": [0, 0, 100, 50]}))

    assert [item["bbox_2d"] for item in records[0]["objects"]] == [clipped, [0, 0, 100, 50]]
    assert counts["clipped_box"] == 1


def test_polygon_is_kept_as_annotated_unless_its_box_does_not_overlap_the_image(run):
    beyond, outside = [-5, -5, 30, -5, 30, 20], [300, 300, 320, 300, 320, 320]
    huge = [0, 0, 1e308, 0, 9, 9]
    segmentations = [{"bbox": [0, 0, 9, 9], "segmentation": [part]} for part in (beyond, outside, huge)]
    counts, records = run(document(*segmentations), geometry="polygons")

    assert records[0]["objects"] == [{"desc": "cup", "poly": beyond, "poly_points": 3, "metadata": CUP}]
    assert (counts["outside_image"], counts["out_of_range"], counts["objects"]) == (1, 1, 1)


@pytest.mark.parametrize("adapter", ["coco", "lvis"])
def test_image_id_given_twice_is_one_record_with_all_annotations(run, adapter):
    image = document()["images"][0]
    counts, records = run(document({"bbox": [0, 0, 4, 4]}, {"bbox": [1, 1, 4, 4]}, images=[image, image]), adapter)

    assert [len(record["objects"]) for record in records] == [2]
    assert (counts["duplicate_image"], counts["records"]) == (1, 1)


def test_everything_left_out_is_listed_by_image_reason_and_name(tmp_path, images):
    """Adapters drop items and count them by reason and name."""
    gone = {"id": 8, "file_name": "gone.jpg", "width": 9, "height": 9}
    content = document(
        {"bbox": [0, 0, 4, 4]},
        {"bbox": [300, 300, 20, 20], "category_id": 2},
        {"bbox": None},
        {"bbox": [1, 1, 4, 4], "iscrowd": 1},
        {"bbox": [1, 1, 4, 4], "image_id": 8},
        {"bbox": [1, 1, 4, 4], "image_id": 9},
        images=[*document()["images"], gone],
    )
    annotations = tmp_path / "annotations.json"
    annotations.write_text(json.dumps(content))
    dataset = Dataset(tmp_path / "d")

    converted = convert(dataset, "coco", annotations, images)

    assert converted.listing == dataset.raw / "train.dropped.jsonl"
    listed = records_of(converted.listing)
    assert sorted((one["image"], one["reason"], one["name"]) for one in listed) == [
        ("gone.jpg", "missing_image", ""),
        ("image id 9", "unknown_image", "cup"),
        ("train2017/a.jpg", "crowd", "cup"),
        ("train2017/a.jpg", "malformed_annotation", ""),
        ("train2017/a.jpg", "outside_image", "bowl"),
    ]
    details = {one["reason"]: one["detail"] for one in listed}
    assert "bbox" in details["malformed_annotation"]
    assert details["missing_image"] == "image id 8, 1 annotations"

    annotations.write_text(json.dumps(document({"bbox": [0, 0, 4, 4]})))
    assert convert(dataset, "coco", annotations, images).listing is None
    assert not (dataset.raw / "train.dropped.jsonl").exists()


@pytest.mark.parametrize(
    "odd",
    [{"image_id": "7"}, {"image_id": 7.0}, {"category_id": "1"}, {"iscrowd": False}, {"iscrowd": None}, {"iscrowd": "0"},
     {"bbox": ["1", 1.0, 4, "4.0"]}, {"segmentation": None}, {"id": "a1"}, {"id": None}],
)  # fmt: skip
def test_value_written_in_another_way_is_read(run, odd):
    counts, records = run(document({"bbox": [1, 1, 4, 4], **odd}))

    assert [item["bbox_2d"] for item in records[0]["objects"]] == [[1, 1, 5, 5]]
    assert [name for name in counts if name.startswith(("malformed", "unknown")) and counts[name]] == []


@pytest.mark.parametrize("odd", [{"width": 100.0}, {"id": "7"}, {"height": "50"}, {"coco_url": None}])
def test_image_written_in_another_way_is_read(run, odd):
    counts, records = run(document({"bbox": [1, 1, 4, 4]}, images=[{**document()["images"][0], **odd}]))

    assert [(record["width"], record["height"], len(record["objects"])) for record in records] == [(100, 50, 1)]
    assert counts["malformed_image"] == 0


@pytest.mark.parametrize("value", ["nan", "inf", "1e400", 10**30, True, [1], {}])
def test_number_that_no_box_can_have_drops_one_annotation(run, value):
    counts, records = run(document({"bbox": [0, 0, 9, 9]}, {"bbox": [1, 1, value, 5]}))

    assert [len(record["objects"]) for record in records] == [1]
    assert counts["malformed_annotation"] + counts["out_of_range"] == 1


def test_line_breaks_in_a_name_become_spaces(run):
    counts, records = run(
        document({"bbox": [0, 0, 4, 4]}, {"bbox": [0, 0, 5, 5], "category_id": 2}, names=("a\n cup\u2028b", "x  y"))
    )

    assert [item["desc"] for item in records[0]["objects"]] == ["a cup b", "x  y"]
    assert counts["joined_lines"] == 1


@pytest.mark.parametrize(
    "odd",
    [{"id": 8}, {"id": 8, "file_name": 3, "width": 1, "height": 1}, {"id": 8, "file_name": "x", "width": 0, "height": 5},
     {"id": 8, "file_name": "x", "width": 10**12, "height": 5}, None, [],
     {"id": 8, "width": 9, "height": 9, "coco_url": 1}],
)  # fmt: skip
def test_odd_image_does_not_refuse_the_others(run, odd):
    counts, records = run(document({"bbox": [0, 0, 4, 4]}, images=[odd, *document()["images"]]))

    assert (counts["malformed_image"], len(records)) == (1, 1)


@pytest.mark.parametrize("name", ["x" * 5000, "\0", "http://[", "a" * 300 + ".jpg"])
def test_name_that_no_file_can_have_is_a_missing_image(run, name):
    odd = {"id": 8, "file_name": name, "coco_url": name, "width": 9, "height": 9}
    counts, _ = run(document(images=[odd, *document()["images"]]))

    assert counts["missing_image"] == 1


def test_image_without_objects_has_a_record(run):
    counts, records = run(document())
    assert (records[0]["objects"], counts["without_objects"]) == ([], 1)


def test_polygon_is_the_largest_part_and_one_object(run):
    """An instance in two parts stays one instance."""
    small, large = [0, 0, 1, 0, 1, 1], [10, 10, 30.5, 10, 30.5, 40, 10, 40]
    counts, records = run(document({"bbox": [0, 0, 40, 40], "segmentation": [small, large]}), geometry="polygons")

    assert records[0]["objects"] == [{"desc": "cup", "poly": large, "poly_points": 4, "metadata": CUP}]
    assert counts["parts_dropped"] == 1


@pytest.mark.parametrize(
    "segmentation", [{"counts": "ab", "size": [1, 1]}, [], [[1, 2, 3, 4]], [[1, 2, 3, 4, 5, 6, 7]], None]
)
def test_instance_without_an_outline_keeps_its_box(run, segmentation):
    content = document({"bbox": [0, 0, 4, 4], "segmentation": segmentation})
    counts, records = run(content, geometry="polygons")

    assert records[0]["objects"] == [{"desc": "cup", "bbox_2d": [0, 0, 4, 4], "metadata": CUP}]
    assert counts["polygon_as_box"] == 1


def test_image_that_is_not_on_the_disk_is_left_out_and_counted(run):
    gone = {"id": 1, "file_name": "gone.jpg", "width": 1, "height": 1}
    counts, records = run(document(images=[gone, *document()["images"]]))

    assert len(records) == 1
    assert counts["missing_image"] == 1


@pytest.mark.parametrize("name", ["../photos/train2017/a.jpg", "/etc/hostname", "train2017"])
def test_image_outside_its_folder_is_not_taken(run, name):
    with pytest.raises(MissingInput, match="none of 1"):
        run(document(images=[{"id": 7, "file_name": name, "width": 1, "height": 1}]))


def test_lvis_is_reported_by_its_address_and_its_names_are_words(run):
    image = {"id": 7, "coco_url": "http://images.cocodataset.org/val2017/b%20b.jpg", "width": 9, "height": 9}
    _, records = run(document({"bbox": [0, 0, 4, 4]}, images=[image], names=("bow_(weapon)",)), "lvis")

    assert records[0]["images"] == ["images/val2017/b b.jpg"]
    assert records[0]["objects"][0]["desc"] == "bow (weapon)"


def test_visual_genome_has_its_sizes_from_the_file_beside(run, tmp_path):
    sizes = [
        {"image_id": 1, "width": 80, "height": 60, "url": "https://cs.example/rak248/train2017/a.jpg", "coco_id": None}
    ]
    (tmp_path / "image_data.json").write_text(json.dumps(sizes))
    thing = {"x": 4, "y": 5, "w": 10, "h": 20, "names": ["clock", "watch"], "object_id": 1, "synsets": []}
    content = [
        {"image_id": 1, "objects": [thing, {**thing, "w": 0}, {**thing, "names": []}]},
        {"image_id": 2, "objects": [thing]},
    ]

    counts, records = run(content, "visual_genome", file="objects.json")

    assert records == [
        {
            "images": ["images/train2017/a.jpg"],
            "objects": [{"desc": "clock", "bbox_2d": [4, 5, 14, 25]}],
            "width": 80,
            "height": 60,
            "metadata": {"image_id": 1, "file_name": "train2017/a.jpg"},
        }
    ]
    assert (counts["degenerate_box"], counts["blank_name"], counts["unknown_image"]) == (1, 1, 1)


def test_visual_genome_image_listed_twice_is_one_record(run, tmp_path):
    url = "https://x/train2017/a.jpg"
    (tmp_path / "image_data.json").write_text(json.dumps([{"image_id": 1, "width": 80, "height": 60, "url": url}]))
    thing, other = ({"x": x, "y": 5, "w": 10, "h": 20, "names": ["clock"]} for x in (4, 200))
    entries = [{"image_id": 1, "objects": objects} for objects in ([thing], [thing], [thing, other], [{"x": "left"}])]

    counts, records = run(entries, "visual_genome", file="objects.json")

    assert [[item["bbox_2d"] for item in record["objects"]] for record in records] == [[[4, 5, 14, 25]]]
    assert (counts["duplicate_image"], counts["outside_image"], counts["malformed_annotation"]) == (3, 1, 1)
    assert counts["repeated_object"] == 1, "the entry [thing, other] repeats the thing of the first one"


CLOCK = {"x": 4, "y": 5, "w": 10, "h": 20, "names": ["clock"]}
A_JPG = "https://x/train2017/a.jpg"


def test_visual_genome_of_the_first_release_names_ids_otherwise(run, tmp_path):
    (tmp_path / "image_data.json").write_text(json.dumps([{"id": 1, "width": 80.0, "height": "60", "url": A_JPG}]))

    _, records = run([{"id": 1, "objects": [CLOCK]}], "visual_genome", file="objects.json")

    assert [(record["width"], record["height"], len(record["objects"])) for record in records] == [(80, 60, 1)]


def test_visual_genome_image_without_a_size_is_listed(run, tmp_path):
    sizes = [{"image_id": 1, "width": 80, "height": 60, "url": A_JPG}, {"image_id": 2, "url": "https://x/VG/2.jpg"},
             {"image_id": 3, "width": None, "height": 5, "url": "https://x/VG/3.jpg"}]  # fmt: skip
    (tmp_path / "image_data.json").write_text(json.dumps(sizes))

    counts, records = run(
        [{"image_id": n, "objects": [CLOCK]} for n in (1, 2, 3)], "visual_genome", file="objects.json"
    )

    assert (len(records), counts["missing_size"]) == (1, 2)
    listed = records_of(tmp_path / "public/d/raw/train.dropped.jsonl")
    assert [(one["image"], one["reason"]) for one in listed] == [
        ("VG/2.jpg", "missing_size"),
        ("VG/3.jpg", "missing_size"),
    ]


@pytest.mark.parametrize("names", ["clock", [None, "clock"], ["", "clock"]])
def test_visual_genome_object_with_odd_names_takes_the_first_text(run, tmp_path, names):
    (tmp_path / "image_data.json").write_text(json.dumps([{"image_id": 1, "width": 80, "height": 60, "url": A_JPG}]))

    _, records = run([{"image_id": 1, "objects": [{**CLOCK, "names": names}]}], "visual_genome", file="objects.json")

    assert [item["desc"] for item in records[0]["objects"]] == ["clock"]


def test_visual_genome_object_given_twice_is_one(run, tmp_path):
    """Text and box are compared after line breaks are joined and boxes are clipped."""
    (tmp_path / "image_data.json").write_text(json.dumps([{"image_id": 1, "width": 80, "height": 60, "url": A_JPG}]))
    other = {**CLOCK, "names": ["wall\nclock"]}
    objects = [CLOCK, other, CLOCK, {**other, "names": ["wall clock"]}, {**CLOCK, "w": 11}]

    counts, records = run([{"image_id": 1, "objects": objects}], "visual_genome", file="objects.json")

    found = [(item["desc"], item["bbox_2d"][2]) for item in records[0]["objects"]]
    assert found == [("clock", 14), ("wall clock", 14), ("clock", 15)]
    assert (counts["repeated_object"], counts["joined_lines"], counts["objects"]) == (2, 1, 3)


def test_visual_genome_of_another_shape_is_refused(run, tmp_path):
    (tmp_path / "image_data.json").write_text("[]")
    with pytest.raises(ImagemillError, match="is not in the format"):
        run([{"image_id": "one", "objects": []}], "visual_genome", file="objects.json")
    with pytest.raises(ImagemillError, match="is not in the format"):
        run({}, "visual_genome", file="objects.json")
    (tmp_path / "image_data.json").unlink()
    with pytest.raises(MissingInput, match=r"image_data\.json"):
        run([], "visual_genome", file="objects.json")


def test_visual_genome_has_no_polygons(run):
    with pytest.raises(WrongUsage, match="polygons"):
        run([], "visual_genome", geometry="polygons")


# ---- train and val by a rule


@pytest.fixture
def many(tmp_path, images):
    """Visual Genome with images 1 to 40, all on disk."""
    ids = range(1, 41)
    for number in ids:
        (images / f"{number}.jpg").touch()
    sizes = [{"image_id": n, "width": 80, "height": 60} for n in ids]
    (tmp_path / "image_data.json").write_text(json.dumps(sizes))
    (tmp_path / "objects.json").write_text(json.dumps([{"image_id": n, "objects": [CLOCK]} for n in ids]))

    def convert_many(rule):
        dataset = Dataset(tmp_path / "vg")
        parsed = parse_split_rule(rule) if rule else None
        return convert(dataset, "visual_genome", tmp_path / "objects.json", images, split_rule=parsed), dataset

    return convert_many


def test_rule_divides_one_file_into_train_and_val(many):
    converted, dataset = many("id%20 ==0")

    ids = {
        split: [r["metadata"]["image_id"] for r in records_of(dataset.raw_jsonl(split))] for split in ("train", "val")
    }
    assert ids == {"train": [n for n in range(1, 41) if n % 20], "val": [20, 40]}
    assert (converted.counts["train_records"], converted.counts["val_records"]) == (38, 2)
    manifest = json.loads((dataset.raw / "manifest.json").read_text())
    assert [manifest["splits"][split]["split_rule"] for split in ("train", "val")] == ["id % 20 == 0"] * 2
    before = (dataset.raw_jsonl("train").stat(), dataset.raw_jsonl("val").stat())
    many("id % 20 == 0")
    assert (dataset.raw_jsonl("train").stat(), dataset.raw_jsonl("val").stat()) == before


def test_image_is_never_in_both_splits(many):
    _, dataset = many("id % 20 == 0")

    with pytest.raises(ImagemillError, match=r"(?s)divided by 'id % 20 == 0'.*in train and in val"):
        many(None)
    many("id % 10 == 3")
    assert len(records_of(dataset.raw_jsonl("val"))) == 4
    (dataset.raw / "manifest.json").unlink()
    with pytest.raises(ImagemillError, match="converted without a rule"):
        many("id % 10 == 3")


@pytest.mark.parametrize(("owner", "name", "calls"), [(Draft, "publish", 2), (convert_module, "_write_listing", 1)])
def test_conversion_that_was_killed_is_finished_by_the_same_command(many, monkeypatch, owner, name, calls):
    """It is killed between two files, or after the last one."""
    seen, real = [], getattr(owner, name)

    def killed(*arguments):
        seen.append(arguments)
        if len(seen) == calls:
            raise KeyboardInterrupt
        return real(*arguments)

    monkeypatch.setattr(owner, name, killed)
    with pytest.raises(KeyboardInterrupt):
        many("id % 20 == 0")
    monkeypatch.undo()

    _, dataset = many("id % 20 == 0")

    assert [len(records_of(dataset.raw_jsonl(split))) for split in ("train", "val")] == [38, 2]


def test_rule_that_leaves_a_split_without_images_is_refused_and_writes_nothing(many, tmp_path):
    with pytest.raises(ImagemillError, match="no image goes to val"):
        many("id % 1000 == 999")
    assert list((tmp_path / "vg" / "raw").iterdir()) == []


@pytest.mark.parametrize(
    "text",
    ["", "id % 20", "id % 20 = 0", "id % 0 == 0", "id % 1 == 0", "id % 20 == 20", "id % 20 == -1", "id % 2.0 == 0",
     "image_id % 20 == 0", "id % 20 == 0 or True", "__import__('os')", "id % ٢٠ == 0", "id % 20 == 0\nid"],
)  # fmt: skip
def test_rule_of_another_form_is_refused(text):
    with pytest.raises(WrongUsage, match="of the form id % N == K"):
        parse_split_rule(text)


# ---- what is written


def test_raw_images_become_a_link_that_keeps_every_path(run, tmp_path, images):
    run(document())
    run(document(images=[{"id": 7, "file_name": "b b.jpg", "coco_url": "http://x/val2017/b%20b.jpg", "width": 9, "height": 9}]),
        split="val")  # fmt: skip
    dataset = Dataset(tmp_path / "public/d")

    assert dataset.splits() == ["train", "val"]
    assert dataset.raw_images.readlink() == images.resolve()
    assert (dataset.raw / records_of(dataset.raw_jsonl("val"))[0]["images"][0]).is_file()


def test_equal_records_leave_the_file_as_it_is(run, tmp_path):
    run(document({"bbox": [0, 0, 4, 4]}))
    path = tmp_path / "public/d/raw/train.jsonl"
    before = path.stat()

    run(document({"bbox": [0, 0, 4, 4]}))

    assert path.stat().st_ino == before.st_ino


def test_images_of_another_folder_are_refused_before_a_record_is_written(run, tmp_path, images):
    run(document())
    images.rename(tmp_path / "elsewhere")
    other = tmp_path / "photos/train2017"
    other.mkdir(parents=True)
    (other / "a.jpg").touch()
    raw = Dataset(tmp_path / "public/d").raw
    raw.joinpath("images").unlink()
    raw.joinpath("images").symlink_to(tmp_path / "elsewhere")

    with pytest.raises(ImagemillError, match="another folder"):
        run(document(), split="val")

    assert not (raw / "val.jsonl").exists()


def test_failed_conversion_leaves_nothing(run, tmp_path):
    with pytest.raises(ImagemillError, match="is not in the format"):
        run({"images": [{"id": "seven"}]})
    with pytest.raises(MissingInput):
        run(document(images=[{"id": 7, "file_name": "gone.jpg", "width": 1, "height": 1}]))

    raw = tmp_path / "public/d/raw"
    assert not raw.exists() or list(raw.iterdir()) == []


def test_wrong_words_are_reported_with_the_right_ones(run, tmp_path, images):
    with pytest.raises(WrongUsage, match=r"(?s)no adapter 'voc'.*coco, lvis, visual_genome"):
        run(document(), "voc")
    with pytest.raises(WrongUsage, match="no split"):
        run(document(), split="test")
    with pytest.raises(MissingInput, match="annotations"):
        convert(Dataset(tmp_path / "x"), "coco", tmp_path / "no.json", images)
    with pytest.raises(MissingInput, match="images"):
        convert(Dataset(tmp_path / "x"), "coco", tmp_path / "annotations.json", tmp_path / "no")
    for name in ("x" * 5000, "a\0b"):
        with pytest.raises(MissingInput, match="annotations"):
            convert(Dataset(tmp_path / "x"), "coco", tmp_path / name, images)


def test_adapters_are_the_modules_of_their_folder():
    assert adapter_names() == ["coco", "lvis", "visual_genome"]


@pytest.mark.parametrize("geometry", ["boxes", "polygons"])
def test_real_coco_gives_valid_records(coco128, tmp_path, geometry):
    dataset = Dataset(tmp_path / "coco")

    counts = convert(
        dataset, "coco", coco128 / "instances_train2017.json", coco128 / "images", geometry=geometry
    ).counts

    records = records_of(dataset.raw_jsonl("train"))
    assert [problem for record in records for problem in violations(record, "pixel")] == []
    assert (counts["records"], counts["objects"], counts["crowd"]) == (128, 929, 10)
    assert all((dataset.raw / record["images"][0]).is_file() for record in records)
