"""`imagemill preset …`: from a public dataset with its annotations to validated presets, and wrong usage.

Spec: docs/spec/conventions.md#command-line
"""

import json
import os
import re
from collections import Counter

import pytest

from dagster_project.work import open_command
from imagemill.domain.layout import DataRoot
from imagemill.domain.preset_names import MAX_OBJECTS_VARIABLE
from imagemill.pipeline.session import open_session
from imagemill.store.ledger import Ledger
from imagemill.store.public_data import SPACES, PublicData, read_preset_manifest
from tests.helpers import public
from tests.helpers.presets import SIZES, coco_annotations, imagemill_here, inodes
from tests.helpers.product import imagemill
from tests.helpers.public import put_records, record, records_of, snapshot
from tests.helpers.sessions import locate

THING = {"desc": "thing", "bbox_2d": [1, 2, 30, 31]}
VARIABLE = MAX_OBJECTS_VARIABLE


# ---- real photographs


class Story:
    """128 photographs through every step; `said` maps each command to its output."""

    def __init__(self, root, coco128):
        self.root, self.said = root, {}
        self.coco = PublicData(root.public_data).dataset("coco")
        self.base, self.derived = self.coco.preset("rescale_32_768"), self.coco.preset("rescale_32_768_max10")
        source = ["--annotations", coco128 / "instances_train2017.json", "--images", coco128 / "images"]
        self.root.path.mkdir(exist_ok=True)
        self.run("convert", "coco", "--adapter", "coco", *source)
        self.run("rescale", "coco", "--preset", "rescale_32_768")
        self.images = inodes(self.base)
        self.run("coord", "coco", "--preset", "rescale_32_768")
        self.run("coord", "coco", "--preset", "rescale_32_768_max10")
        self.run("validate", "coco", "--preset", "rescale_32_768_max10", "--image-check-n", 0)

    def run(self, step, *arguments):
        done = imagemill_here(self.root, "preset", step, *arguments)
        assert done.returncode == 0, done.stderr
        self.said[step] = done.stdout


@pytest.fixture(scope="module")
def story(coco128, tmp_path_factory):
    return Story(DataRoot(tmp_path_factory.mktemp("story") / "data"), coco128)


def test_real_coco_passes_every_step(story):
    assert "train_records=128" in story.said["convert"]
    assert sum(map(int, re.findall(r"(?:resized|copied)=(\d+)", story.said["rescale"]))) == 128
    assert "records=97 dropped=31 linked=97" in story.said["coord"]
    assert story.said["validate"].count(": passed: ") == 4
    largest = max(len(r["objects"]) for r in records_of(story.derived.jsonl("train")))
    assert largest == 10, "dropped, never cut"


def test_every_derived_image_shares_the_inode_of_its_base(story):
    named = {record["images"][0] for record in records_of(story.derived.jsonl("train"))}

    assert inodes(story.derived).keys() == named
    assert inodes(story.derived).items() <= inodes(story.base).items()
    assert inodes(story.base) == story.images, "coord touches no image"


def test_images_of_the_derived_preset_take_no_disk_space(story):
    base = {ino for ino, _ in inodes(story.base).values()}
    new = [path for path in story.derived.images.rglob("*") if path.lstat().st_ino not in base]

    assert [path for path in new if not path.is_dir()] == []
    folders = [story.derived.images, *new]
    blocks = sum(path.lstat().st_blocks for path in folders)
    assert blocks * 512 < 64 * 1024
    assert sum(path.stat().st_size for path in story.derived.images.rglob("*.jpg")) > 5 << 20, "shared"


def test_manifest_of_the_derived_preset_has_the_rescale_parameters(story):
    base, derived = (read_preset_manifest(preset) for preset in (story.base, story.derived))

    assert base
    assert derived
    assert derived["stage_stats"]["rescale"] == base["stage_stats"]["rescale"]
    assert derived["stage_stats"]["rescale"]["max_pixels"] == 786432
    assert derived["base"]["preset"] == "rescale_32_768"


def test_layout_matches_the_contract(story):
    names = {path.name for path in story.derived.path.iterdir()}

    assert names == {
        "train.jsonl", "train.norm.jsonl", "train.coord.jsonl", "train.filter_stats.json", "images",
        "pipeline_manifest.json", "contact_sheet.png",
    }  # fmt: skip


def test_each_preset_has_its_own_partition_in_the_history(story):
    import dagster as dg

    with open_session(story.root.path) as session, open_command(session) as work:
        rescaled = work.instance.get_materialized_partitions(dg.AssetKey("rescale_preset"))
        coord = work.instance.get_materialized_partitions(dg.AssetKey("derived_preset"))

    assert rescaled == {"coco/rescale_32_768"}
    assert coord == {"coco/rescale_32_768", "coco/rescale_32_768_max10"}


def test_second_run_of_every_step_changes_nothing(story):
    before = snapshot(story.coco.path)

    for preset in ("rescale_32_768", "rescale_32_768_max10"):
        story.run("coord", "coco", "--preset", preset)
    story.run("rescale", "coco", "--preset", "rescale_32_768")

    assert snapshot(story.coco.path) == before


def is_ascending(record):
    """The rule of CoordExp's trainer: objects are sorted by (min y, min x)."""
    shapes = [[int(token[8:-2]) for token in item["bbox_2d"]] for item in record["objects"]]
    keys = [(min(shape[1::2]), min(shape[0::2])) for shape in shapes]
    return keys == sorted(keys)


def test_real_coco_in_top_left_order_is_accepted_by_the_original_trainer(story, data_root, coco128):
    source = ["--annotations", coco128 / "instances_train2017.json", "--images", coco128 / "images"]
    run(data_root, "convert", "coco", "--adapter", "coco", *source)
    run(data_root, "all", "coco", "--preset", "p", "--object-order", "top_left")

    preset = PublicData(data_root.public_data).dataset("coco").preset("p")
    records = records_of(preset.records("train", "coord"))
    assert (len(records), sum(map(is_ascending, records))) == (128, 128)
    assert sum(map(is_ascending, records_of(story.base.records("train", "coord")))) == 29, (
        "in the order of the annotations"
    )
    names = [
        [[item["desc"] for item in one["objects"]] for one in records_of(preset.records("train", space))]
        for space in SPACES
    ]
    assert names[0] == names[1] == names[2]
    assert records[0]["metadata"].keys() == {"image_id", "file_name"}
    assert imagemill_here(data_root, "preset", "validate", "coco", "--preset", "p").returncode == 0


# ---- small datasets


@pytest.fixture
def dataset(data_root):
    """Raw records with one, two and three objects."""
    dataset = public.raw_dataset(data_root.public_data / "coco", SIZES)
    put_records(dataset, [record(f"{n}.jpg", *size, *[THING] * (n + 1)) for n, size in enumerate(SIZES)])
    return dataset


def run(root, *arguments, **environment):
    done = imagemill_here(root, "preset", *arguments, **environment)
    assert done.returncode == 0, done.stderr
    return done


def rescaled(root, preset="p"):
    run(root, "rescale", "coco", "--preset", preset, "--library", "pillow", "--workers", 1)


def presets_yaml(root, text):
    (root.public_data / "presets.yaml").write_text(text)


def test_all_runs_rescale_and_coord_of_presets_in_presets_yaml(data_root, dataset):
    presets_yaml(data_root, "presets: {coco/p: {library: pillow, max_objects: 2}}")

    said = run(data_root, "all", "coco", "--preset", "p", "--workers", 1).stdout.splitlines()

    assert [line.partition(":")[0] for line in said] == ["coco/p", "coco/p", "coco/p_max2"]
    assert "records=3 dropped=0" in said[1]
    assert "records=2 dropped=1" in said[2], "each line has the counts of its own run"


@pytest.mark.parametrize(
    ("arguments", "environment"),
    [
        (["--preset", "p_max2"], {}),
        (["--preset", "p", "--max_objects", "2"], {}),
        (["--preset", "p"], {VARIABLE: "2"}),
        (["--preset", "p_max2", "--max-objects", "2"], {VARIABLE: "2"}),
        (["--preset", "p"], {VARIABLE: ""}),
    ],
)
def test_every_way_to_set_max_objects_gives_the_same_preset(data_root, dataset, arguments, environment):
    rescaled(data_root)
    if environment == {VARIABLE: ""}:
        presets_yaml(data_root, "presets: {coco/p: {max_objects: 2}}")

    run(data_root, "coord", "coco", *arguments, **environment)

    assert len(records_of(dataset.preset("p_max2").records("train", "coord"))) == 2


def test_limit_of_a_preset_with_a_common_prefix_is_not_used(data_root, dataset):
    presets_yaml(data_root, "presets: {coco/p: {max_objects: 2}}")
    rescaled(data_root, "p_maximal")

    run(data_root, "coord", "coco", "--preset", "p_maximal")

    assert dataset.preset("p_maximal").records("train", "coord").is_file()


def test_coord_of_a_base_limited_in_presets_yaml_makes_both_presets(data_root, dataset):
    presets_yaml(data_root, "presets: {coco/p: {max_objects: 2}}")
    rescaled(data_root)

    said = run(data_root, "coord", "coco", "--preset", "p").stdout.splitlines()

    assert [line.partition(":")[0] for line in said] == ["coco/p", "coco/p_max2"]
    assert len(records_of(dataset.preset("p").records("train", "coord"))) == 3
    assert len(records_of(dataset.preset("p_max2").records("train", "coord"))) == 2


@pytest.mark.parametrize("text", ["", "datasets: {coco: {default_preset: p}}\npresets: {coco/other: {}}"])
def test_command_without_a_preset_uses_the_default_or_the_only_one(data_root, dataset, text):
    rescaled(data_root)
    presets_yaml(data_root, text)

    run(data_root, "coord", "coco")

    assert dataset.preset("p").records("train", "coord").is_file()
    assert "passed" in run(data_root, "validate", "coco").stdout


@pytest.mark.parametrize(("text", "names"), [("", "no preset yet"), ("presets: {coco/b: {}, coco/a: {}}", "a, b")])
def test_command_without_a_preset_lists_existing_ones(data_root, dataset, text, names):
    presets_yaml(data_root, text)

    done = imagemill_here(data_root, "preset", "rescale", "coco")

    assert done.returncode == 2
    assert f"no --preset, and coco has {names}" in done.stderr
    assert "default_preset of coco" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["coord", "coco", "--preset", "q"], "existing presets: p"),
        (["coord", "coco", "--preset", "q_max2"], "existing presets: p"),
        (["validate", "coco", "--preset", "q"], "existing presets: p"),
        (["rescale", "cocoo", "--preset", "p"], "existing datasets: coco"),
        (["coord", "cocoo", "--preset", "p"], "existing datasets: coco"),
        (["validate", "cocoo", "--preset", "p"], "existing datasets: coco"),
        (["validate", "cocoo", "--raw-only"], "existing datasets: coco"),
        (["coord", "cocoo"], "existing datasets: coco"),
    ],
)
def test_error_for_a_mistyped_name_lists_existing_ones(data_root, dataset, arguments, says):
    rescaled(data_root)

    done = imagemill_here(data_root, "preset", *arguments)

    assert done.returncode == 1
    assert says in done.stderr
    assert "check" in done.stderr


def test_object_order_comes_from_presets_yaml_and_a_different_flag_is_refused(data_root, dataset):
    presets_yaml(data_root, "presets: {coco/p: {library: pillow, object_order: top_left}}")

    run(data_root, "all", "coco", "--preset", "p", "--workers", 1)

    manifest = read_preset_manifest(dataset.preset("p"))
    assert manifest
    assert manifest["stage_stats"]["rescale"]["object_order"] == "top_left"
    done = imagemill_here(data_root, "preset", "coord", "coco", "--preset", "p", "--object-order", "annotation")
    assert done.returncode == 2
    assert "--object-order gives annotation, presets.yaml gives top_left" in done.stderr
    presets_yaml(data_root, "")
    before = tree(data_root.public_data)
    for step in ("rescale", "coord"):
        done = imagemill_here(data_root, "preset", step, "coco", "--preset", "p", "--object-order", "annotation")
        assert done.returncode == 1
        assert "top_left, requested annotation" in done.stderr
    assert tree(data_root.public_data) == before


def test_records_dropped_by_convert_are_listed_on_the_terminal_and_in_a_file(data_root, tmp_path):
    file = coco_annotations(tmp_path / "source", SIZES, objects=1)
    content = json.loads(file.read_text())
    content["annotations"][0] |= {"bbox": None}
    content["images"] += [{"id": 10 + n, "file_name": f"gone{n}.jpg", "width": 5, "height": 5} for n in range(20)]
    file.write_text(json.dumps(content))

    done = run(
        data_root, "convert", "coco", "--adapter", "coco", "--annotations", file, "--images", tmp_path / "source/images"
    )

    listing = data_root.public_data / "coco" / "raw" / "train.dropped.jsonl"
    lines = done.stderr.splitlines()
    assert lines[-1] == f"dropped: and 16 more; all are listed in {listing}"
    assert lines[-6].startswith("dropped: train0.jpg: malformed_annotation: ")
    assert lines[-5] == "dropped: gone0.jpg: missing_image: image id 10, 0 annotations"
    assert [one["image"] for one in records_of(listing)] == ["train0.jpg", *[f"gone{n}.jpg" for n in range(20)]]
    with Ledger(data_root.ledger, read_only=True) as ledger:
        reasons = Counter(row.reason for row in ledger.problems() if row.asset == "raw_dataset")
    assert reasons == {"missing_image": 20, "malformed_annotation": 1}


def test_split_rule_is_in_the_manifest_of_every_preset(data_root, tmp_path):
    source = tmp_path / "source"
    coco_annotations(source, SIZES * 4)
    flags = ["--annotations", source / "instances_train.json", "--images", source / "images"]

    run(data_root, "convert", "coco", "--adapter", "coco", "--split-rule", "id % 4 == 1", *flags)
    run(data_root, "all", "coco", "--preset", "p", "--library", "pillow", "--workers", 1)
    run(data_root, "coord", "coco", "--preset", "p_max6")

    coco = PublicData(data_root.public_data).dataset("coco")
    ids = [one["metadata"]["image_id"] for one in records_of(coco.preset("p").records("val", "coord"))]
    assert ids == [1, 5, 9]
    for name in ("p", "p_max6"):
        manifest = read_preset_manifest(coco.preset(name))
        assert manifest
        assert manifest["stage_stats"]["convert"] == {"split_rule": "id % 4 == 1"}


def test_options_accept_underscores_and_dashes(data_root, dataset):
    for name, spelled in {"a": ("--max_pixels", "--image_factor"), "b": ("--max-pixels", "--image-factor")}.items():
        run(data_root, "rescale", "coco", "--preset", name, spelled[0], 4096, spelled[1], 16, "--library", "pillow")
    one, other = (read_preset_manifest(dataset.preset(name)) for name in "ab")

    assert one
    assert other
    assert one["stage_stats"] == other["stage_stats"]
    assert one["stage_stats"]["rescale"]["image_factor"] == 16


def test_only_chosen_splits_are_written(data_root, dataset):
    put_records(dataset, [record("0.jpg", *SIZES[0])], split="val")

    run(data_root, "all", "coco", "--preset", "p", "--split", "train", "--library", "pillow")

    assert dataset.preset("p").splits() == ["train"]
    run(data_root, "all", "coco", "--preset", "p")
    assert dataset.preset("p").splits() == ["train", "val"]


def test_convert_reads_all_settings_from_presets_yaml(data_root, tmp_path):
    coco_annotations(tmp_path / "source")
    data_root.public_data.mkdir()
    source = f"{{adapter: coco, annotations: {{train: {tmp_path}/source/instances_train.json}}, "
    presets_yaml(data_root, f"datasets: {{coco: {source}images: {tmp_path}/source/images}}}}")

    said = run(data_root, "convert", "coco").stdout

    assert said == "coco: train_objects=6 train_records=3\n"


def test_validate_exits_with_1_names_the_line_and_writes_nothing(data_root, dataset):
    rescaled(data_root)
    with dataset.preset("p").jsonl("train").open("a") as file:
        file.write("\n")
    before = snapshot(data_root.public_data)

    done = imagemill_here(data_root, "preset", "validate", "coco", "--preset", "p", "--json")

    assert done.returncode == 1
    reports = [json.loads(line) for line in done.stdout.splitlines()]
    assert [report["passed"] for report in reports].count(False) == 1
    assert any(finding["line"] == 4 for report in reports for finding in report["findings"])
    assert snapshot(data_root.public_data) == before


# ---- custom folders


def test_public_data_root_is_remembered(data_root, tmp_path):
    elsewhere = tmp_path / "disk2"
    public.raw_dataset(elsewhere / "coco", SIZES[:1])

    first = run(
        data_root, "rescale", "coco", "--preset", "p", "--public-data-root", elsewhere, "--library", "pillow",
        "--workers", 1,
    )  # fmt: skip
    run(data_root, "coord", "coco", "--preset", "p")

    assert f"public_data: in {elsewhere} from now on" in first.stderr
    assert (elsewhere / "coco" / "p" / "train.coord.jsonl").is_file()
    assert not data_root.public_data.exists()
    assert locate(data_root.path).public_data == elsewhere


def test_public_data_root_is_not_remembered_after_wrong_usage(data_root, tmp_path):
    elsewhere = tmp_path / "disk2"
    public.raw_dataset(elsewhere / "coco", SIZES[:1])
    data_root.config_file.write_text("no_such_setting: 1")
    before = tree(tmp_path)

    done = imagemill_here(data_root, "preset", "rescale", "coco", "--preset", "p", "--public-data-root", elsewhere)

    assert done.returncode == 2
    assert "no_such_setting" in done.stderr
    assert tree(tmp_path) == before


# ---- wrong usage


def tree(folder):
    return {str(path): path.lstat().st_mtime_ns for path in folder.rglob("*")}


WRONG = [
    (["coord", "coco", "--preset", "p_max10", "--max-objects", "20"], {}, ["10 by the preset's name", "20 by --max-objects"]),
    (["coord", "coco", "--preset", "p_max10"], {VARIABLE: "20"}, ["10 by the preset's name", f"20 by {VARIABLE}"]),
    (["coord", "coco", "--preset", "p", "--max-objects", "20"], {VARIABLE: "30"}, ["20 by --max-objects", "30 by"]),
    (["coord", "coco", "--preset", "limited", "--max-objects", "20"], {}, ["20 by --max-objects", "2 by presets.yaml"]),
    (["coord", "coco", "--preset", "limited"], {VARIABLE: "20"}, ["2 by presets.yaml", f"20 by {VARIABLE}"]),
    (["coord", "coco", "--preset", "limited_max3"], {}, ["3 by the preset's name", "2 by presets.yaml"]),
    (["coord", "coco", "--preset", "p_max_10"], {}, ["rename it to p_max10"]),
    (["rescale", "coco", "--preset", "p_max_10"], {}, ["rename it to p_max10"]),
    (["validate", "coco", "--preset", "p_max_10"], {}, ["rename it to p_max10"]),
    (["coord", "coco", "--preset", "p_max010"], {}, ["rename it to p_max10"]),
    (["coord", "coco", "--preset", "p_max10_max20"], {}, ["rename it to p_max10"]),
    (["rescale", "coco", "--preset", "p_max10"], {}, ["only a base preset has images", "--max-objects 10"]),
    (["all", "coco", "--preset", "p_max10"], {}, ["only a base preset has images"]),
    (["rescale", "coco", "--preset", "p", "--max-objects", "10"], {}, ["two steps", "preset rescale", "preset coord"]),
    (["rescale", "coco", "--preset", "p"], {VARIABLE: "10"}, ["two steps", VARIABLE]),
    (["validate", "coco", "--preset", "p"], {VARIABLE: "10"}, ["two steps"]),
    (["all", "coco", "--preset", "p", "--max-objects", "10"], {}, ["two steps"]),
    (["all", "coco", "--preset", "p"], {VARIABLE: "10"}, ["two steps"]),
    (["coord", "coco", "--preset", "p", "--max-objects", "0"], {}, ["at least 1"]),
    (["coord", "coco", "--preset", "p"], {VARIABLE: "many"}, [VARIABLE, "'many'"]),
    (["rescale", "coco", "--preset", "p", "--split", "test"], {}, ["'test'", "train", "val"]),
    (["rescale", "coco", "--preset", "p", "--max-pixel", "5"], {}, ["No such option"]),
    (["rescale", "coco", "--preset", "p", "--max-pixels", "0"], {}, ["--max-pixels"]),
    (["rescale", "coco", "--preset", "limited", "--max-pixels", "5000"], {}, ["gives 5000", "presets.yaml gives 602112"]),
    (["rescale", "coco"], {}, ["--preset"]),
    (["rescale", "../coco", "--preset", "p"], {}, ["not a valid name of a dataset"]),
    (["rescale", "coco", "--preset", "raw"], {}, ["not a valid name of a preset"]),
    (["rescale", "coco", "--preset", "../p", "--public-data-root", "elsewhere"], {}, ["not a valid name of a preset"]),
    (["convert", "coco"], {}, ["no adapter given"]),
    (["convert", "coco", "--adapter", "yolo", "--annotations", "x", "--images", "x"], {}, ["no adapter 'yolo'"]),
    (["convert", "coco", "--split", "val"], {}, ["--split without --annotations"]),
    (["convert", "coco", "--split-rule", "id % 20"], {}, ["of the form id % N == K", "'id % 20 == 0'"]),
    (["convert", "coco", "--adapter", "coco", "--annotations", "x", "--images", "x", "--split", "train", "--split-rule",
      "id % 2 == 0"], {}, ["--split with a split rule"]),
    (["rescale", "coco", "--preset", "p", "--object-order", "size"], {}, ["annotation", "top_left"]),
    (["validate", "coco", "--raw-only", "--preset-only"], {}, ["leave one out"]),
    (["convert", "named", "--adapter", "lvis"], {}, ["--adapter gives lvis", "presets.yaml gives coco"]),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "environment", "says"), WRONG)
def test_wrong_usage_exits_with_2_and_writes_nothing(data_root, dataset, arguments, environment, says):
    presets_yaml(
        data_root,
        "datasets: {named: {adapter: coco, annotations: {train: x.json}, images: x}}\n"
        "presets: {coco/limited: {max_objects: 2, max_pixels: 602112}, coco/p: {}}",
    )
    before = tree(data_root.path)

    done = imagemill_here(data_root, "preset", *arguments, **environment)

    assert done.returncode == 2, done.stderr
    assert [text for text in says if text not in done.stderr] == []
    assert tree(data_root.path) == before


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["rescale", "nosuch", "--preset", "p"], "preset convert nosuch"),
        (["rescale", "coco", "--preset", "p", "--split", "val"], "no raw records of val"),
        (["coord", "coco", "--preset", "p_max10"], "preset rescale coco --preset p"),
        (["all", "nosuch", "--preset", "p"], "preset convert nosuch"),
    ],
)
def test_missing_input_exits_with_1_names_the_command_and_adds_no_partition(data_root, dataset, arguments, says):
    before = tree(data_root.path)

    done = imagemill_here(data_root, "preset", *arguments)

    assert done.returncode == 1
    assert says in done.stderr
    assert tree(data_root.path) == before


def test_parameters_other_than_recorded_exit_with_1_and_write_nothing(data_root, dataset):
    rescaled(data_root)
    before = tree(data_root.public_data)

    done = imagemill_here(data_root, "preset", "rescale", "coco", "--preset", "p", "--image-factor", 16)

    assert done.returncode == 1
    assert "image_factor recorded 32, requested 16" in done.stderr
    assert "new preset name" in done.stderr
    assert tree(data_root.public_data) == before


def test_refused_lines_are_all_named_and_the_next_run_continues_after_repair(data_root, dataset):
    """Run the real program once, as users start it."""
    lines = dataset.raw_jsonl("train").read_text()
    put_records(dataset, ["{", *lines.splitlines(), "null"])
    command = ["preset", "rescale", "coco", "--preset", "p", "--library", "pillow", "--workers", 1]

    done = imagemill(*command, "--data-root", data_root.path)

    assert done.returncode == 1
    assert "train.jsonl:1" in done.stderr
    assert "train.jsonl:5" in done.stderr
    assert "Traceback" not in done.stderr
    assert len(inodes(dataset.preset("p"))) == 3
    assert not dataset.preset("p").jsonl("train").exists()
    images = inodes(dataset.preset("p"))
    dataset.raw_jsonl("train").write_text(lines)

    rescaled(data_root)

    assert inodes(dataset.preset("p")) == images
    assert os.path.exists(dataset.preset("p").jsonl("train"))
