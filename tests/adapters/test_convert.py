"""Public datasets made raw. Source: CONTRACTS section 3; issue 6, "Adapters"."""

import json

import pytest

from imagemill.adapters.convert import adapter_names, convert
from imagemill.errors import ImagemillError, MissingInput, WrongUsage
from imagemill.preset_records import preset_problems
from imagemill.public_data import Dataset
from tests.helpers.public import records_of


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
    """Convert a document; returns the counts and the records."""

    def convert_document(content, adapter="coco", *, file="annotations.json", dataset="d", **options):
        annotations = tmp_path / file
        annotations.write_text(json.dumps(content))
        target = Dataset(tmp_path / "public" / dataset)
        counts = convert(target, adapter, annotations, images, **options)
        return counts, records_of(target.raw_jsonl(options.get("split", "train")))

    return convert_document


def test_box_becomes_two_corners_without_a_tail_of_digits(run):
    counts, records = run(
        document({"bbox": [61.87, 276.25, 296.42, 103.18]}, {"bbox": [0, 1, 10, 5], "category_id": 2})
    )

    assert records == [
        {"images": ["images/train2017/a.jpg"],
         "objects": [{"desc": "cup", "bbox_2d": [61.87, 276.25, 358.29, 379.43]}, {"desc": "bowl", "bbox_2d": [0, 1, 10, 6]}],
         "width": 100, "height": 50}
    ]  # fmt: skip
    assert (counts["records"], counts["objects"]) == (1, 2)


@pytest.mark.parametrize(
    ("annotation", "reason"),
    [({"bbox": [1, 1, 0, 5]}, "degenerate_box"), ({"bbox": [1, 1, 5, -2]}, "degenerate_box"),
     ({"bbox": [1, 1, 5, 5], "iscrowd": 1, "segmentation": {"counts": [1], "size": [1, 1]}}, "crowd"),
     ({"bbox": [1, 1, 5, 5], "category_id": 9}, "unknown_category"),
     ({"bbox": [1, 1, 5, 5], "category_id": 3}, "blank_name"),
     ({"bbox": [1, 1, 5, 5], "image_id": 8}, "unknown_image")],
)  # fmt: skip
def test_annotation_that_is_no_object_is_left_out_and_counted(run, annotation, reason):
    counts, records = run(document({"bbox": [0, 0, 9, 9]}, annotation, names=("cup", "bowl", " ")))

    assert len(records[0]["objects"]) == 1
    assert counts[reason] == 1


def test_image_without_objects_has_a_record(run):
    counts, records = run(document())
    assert (records[0]["objects"], counts["without_objects"]) == ([], 1)


def test_polygon_is_the_largest_part_and_one_object(run):
    """An instance in two parts stays one instance."""
    small, large = [0, 0, 1, 0, 1, 1], [10, 10, 30.5, 10, 30.5, 40, 10, 40]
    counts, records = run(document({"bbox": [0, 0, 40, 40], "segmentation": [small, large]}), geometry="polygons")

    assert records[0]["objects"] == [{"desc": "cup", "poly": large, "poly_points": 4}]
    assert counts["parts_dropped"] == 1


@pytest.mark.parametrize(
    "segmentation", [{"counts": "ab", "size": [1, 1]}, [], [[1, 2, 3, 4]], [[1, 2, 3, 4, 5, 6, 7]], None]
)
def test_instance_without_an_outline_keeps_its_box(run, segmentation):
    content = document({"bbox": [0, 0, 4, 4], "segmentation": segmentation})
    counts, records = run(content, geometry="polygons")

    assert records[0]["objects"] == [{"desc": "cup", "bbox_2d": [0, 0, 4, 4]}]
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


def test_lvis_is_told_by_its_address_and_its_names_are_words(run):
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
        }
    ]
    assert (counts["degenerate_box"], counts["blank_name"], counts["unknown_image"]) == (1, 1, 1)


def test_visual_genome_of_another_shape_is_told(run, tmp_path):
    (tmp_path / "image_data.json").write_text("[]")
    with pytest.raises(ImagemillError, match="does not hold"):
        run([{"image_id": 1, "objects": [{"x": "left"}]}], "visual_genome", file="objects.json")
    (tmp_path / "image_data.json").unlink()
    with pytest.raises(MissingInput, match=r"image_data\.json"):
        run([], "visual_genome", file="objects.json")


def test_visual_genome_has_no_polygons(run):
    with pytest.raises(WrongUsage, match="polygons"):
        run([], "visual_genome", geometry="polygons")


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
    with pytest.raises(ImagemillError, match="does not hold"):
        run({"images": [{"id": "seven"}]})
    with pytest.raises(MissingInput):
        run(document(images=[{"id": 7, "file_name": "gone.jpg", "width": 1, "height": 1}]))

    raw = tmp_path / "public/d/raw"
    assert not raw.exists() or list(raw.iterdir()) == []


def test_wrong_words_are_told_with_the_right_ones(run, tmp_path, images):
    with pytest.raises(WrongUsage, match=r"(?s)no adapter 'voc'.*coco, lvis, visual_genome"):
        run(document(), "voc")
    with pytest.raises(WrongUsage, match="no split"):
        run(document(), split="test")
    with pytest.raises(MissingInput, match="annotations"):
        convert(Dataset(tmp_path / "x"), "coco", tmp_path / "no.json", images)
    with pytest.raises(MissingInput, match="images"):
        convert(Dataset(tmp_path / "x"), "coco", tmp_path / "annotations.json", tmp_path / "no")


def test_adapters_are_the_modules_of_their_folder():
    assert adapter_names() == ["coco", "lvis", "visual_genome"]


@pytest.mark.parametrize("geometry", ["boxes", "polygons"])
def test_real_coco_gives_valid_records(coco128, tmp_path, geometry):
    dataset = Dataset(tmp_path / "coco")

    counts = convert(dataset, "coco", coco128 / "instances_train2017.json", coco128 / "images", geometry=geometry)

    records = records_of(dataset.raw_jsonl("train"))
    assert [problem for record in records for problem in preset_problems(record, "pixel")] == []
    assert (counts["records"], counts["objects"], counts["crowd"]) == (128, 929, 10)
    assert all((dataset.raw / record["images"][0]).is_file() for record in records)
