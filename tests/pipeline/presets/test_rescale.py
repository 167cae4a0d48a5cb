"""From raw to a rescaled preset. Spec: docs/spec/presets.md#rescale-parameters"""

import io
import json
import os
import shutil
import signal

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from imagemill.adapters.convert import convert
from imagemill.domain.preset_records import PresetRules, violations, warnings
from imagemill.errors import MissingInput, WrongUsage
from imagemill.formats.jsonl import read_jsonl
from imagemill.fs.owners import owner_name
from imagemill.pipeline.presets.preset_images import INDEX
from imagemill.pipeline.presets.rescale import RescaleFailed, _rescaled, plan_rescale, run_rescale
from imagemill.pipeline.presets.rescale_plan import PresetConflict, choose_parameters
from imagemill.store.public_data import Dataset, read_preset_manifest
from resources.engine import Engine, LocalProcesses
from resources.local_pool import WorkerDied
from tests.helpers.public import picture, put_image, put_records, raw_dataset, record, records_of, snapshot

PRESET = "rescale_32_768"


def rescale(dataset, preset=PRESET, *, engine=None, splits=None, library="pillow", **asked):
    """Rescale as a command does, but with Pillow, which starts faster; its agreement with torch has separate tests."""
    parameters = choose_parameters(dataset.preset(preset), library=library, **asked)
    return run_rescale(plan_rescale(dataset, preset, parameters, splits), (engine or Engine()).map_batches)


def refusal(dataset, **asked):
    """Return the message of a run that must fail."""
    with pytest.raises(RescaleFailed) as failed:
        rescale(dataset, **asked)
    return failed.value


@pytest.fixture
def dataset(tmp_path):
    """Three images: one to be shrunk, one of its target size already, one to be enlarged."""
    return raw_dataset(tmp_path / "coco", [(101, 67), (96, 64), (42, 41)])


def preset_of(dataset):
    return dataset.preset(PRESET)


# ---- what is made


def test_preset_has_records_images_and_a_manifest(dataset):
    report = rescale(dataset)

    preset = preset_of(dataset)
    sizes = [(r["width"], r["height"]) for r in records_of(preset.jsonl("train"))]
    assert sizes == [(96, 64), (96, 64), (64, 64)]
    assert [Image.open(preset.path / f"images/{n}.jpg").size for n in range(3)] == sizes
    assert dict(report.counts) == {"kept": 0, "resized": 2, "copied": 1}
    assert sorted(path.name for path in preset.path.iterdir()) == [
        INDEX,
        "images",
        "pipeline_manifest.json",
        "train.jsonl",
    ]


def test_manifest_says_everything_that_decides_pixels(dataset):
    """The canonical location is stage_stats.rescale."""
    rescale(dataset, max_pixels=602112)

    stats = read_preset_manifest(preset_of(dataset))["stage_stats"]["rescale"]
    splits = stats.pop("splits")
    assert stats == {
        "image_factor": 32, "max_pixels": 602112, "min_pixels": 4096, "exif_policy": "stored_pixels",
        "size_policy": "nearest_multiple_half_even", "max_aspect": 200, "filter": "lanczos", "library": "pillow",
        "quality": 95, "object_order": "annotation",
    }  # fmt: skip
    counts = {key: splits["train"][key] for key in ("records", "objects", "images", "copied", "resized")}
    assert counts == {"records": 3, "objects": 3, "images": 3, "copied": 1, "resized": 2}


def test_image_of_its_target_size_is_copied_byte_for_byte_with_geometry_untouched(dataset):
    rescale(dataset)

    preset = preset_of(dataset)
    assert (preset.images / "1.jpg").read_bytes() == (dataset.raw_images / "1.jpg").read_bytes()
    assert records_of(preset.jsonl("train"))[1] == records_of(dataset.raw_jsonl("train"))[1]


def test_geometry_is_scaled_and_all_else_passes_through_in_order(tmp_path):
    dataset = raw_dataset(tmp_path / "d", [(200, 100)])
    objects = [
        {"desc": "b", "poly": [0, 0, 200, 0, 100, 50], "score": 0.5},
        {"desc": "a", "bbox_2d": [10, 10, 20.5, 20]},
    ]
    put_records(dataset, [{"id": 7, **record("0.jpg", 200, 100, *objects), "source": "x"}])

    rescale(dataset)

    expected = [{"desc": "b", "poly": [0, 0, 191, 0, 96, 48], "score": 0.5}, {"desc": "a", "bbox_2d": [10, 10, 20, 19]}]
    (rescaled,) = records_of(preset_of(dataset).jsonl("train"))
    assert rescaled == {
        "id": 7,
        "images": ["images/0.jpg"],
        "objects": expected,
        "width": 192,
        "height": 96,
        "source": "x",
    }
    assert list(rescaled) == ["id", "images", "objects", "width", "height", "source"]


@pytest.mark.parametrize(
    ("form", "name"), [("PNG", "a.png"), ("WEBP", "a.webp"), ("JPEG", "a.JPEG"), ("PNG", "wrong.jpg")]
)
def test_image_keeps_its_name_and_format(tmp_path, form, name):
    dataset = Dataset(tmp_path / "d")
    put_image(dataset, name, picture(100, 70, form=form))
    put_records(dataset, [record(name, 100, 70)])

    rescale(dataset)

    image = Image.open(preset_of(dataset).images / name)
    assert (image.format, image.size, image.mode) == (form, (96, 64), "RGB")


def test_both_splits_share_images_and_have_their_own_records(dataset):
    put_records(dataset, [record("0.jpg", 101, 67), record("0.jpg", 101, 67)], "val")

    report = rescale(dataset)

    assert (report.splits["train"]["images"], report.splits["val"]["images"], report.splits["val"]["records"]) == (
        3,
        1,
        2,
    )
    assert preset_of(dataset).splits() == ["train", "val"]
    assert report.counts["resized"] == 2


def test_one_split_can_be_made_alone_and_the_other_later(dataset):
    put_records(dataset, [record("0.jpg", 101, 67)], "val")

    rescale(dataset, splits=["val"])
    assert preset_of(dataset).splits() == ["val"]
    rescale(dataset)

    assert sorted(read_preset_manifest(preset_of(dataset))["stage_stats"]["rescale"]["splits"]) == ["train", "val"]


def test_linked_folder_neither_flattens_nor_collides(tmp_path):
    """Equal names in two folders behind a link remain two images; also for names with spaces and in other scripts."""
    outside = Dataset(tmp_path / "outside")
    names = ["train2017/1.jpg", "val2017/1.jpg", "深い/写真 1.jpg"]
    for seed, name in enumerate(names):
        put_image(outside, name, picture(100, 70, seed=seed))
    dataset = Dataset(tmp_path / "d")
    dataset.raw.mkdir(parents=True)
    dataset.raw_images.symlink_to(outside.raw_images)
    put_records(dataset, [record(name, 100, 70) for name in names])
    before = snapshot(outside.path)

    rescale(dataset)

    preset = preset_of(dataset)
    contents = [(preset.images / name).read_bytes() for name in names]
    assert len(set(contents)) == 3
    assert not preset.images.is_symlink()
    assert snapshot(outside.path) == before, "raw is only read"
    assert [r["images"] for r in records_of(preset.jsonl("train"))] == [[f"images/{name}"] for name in names]


def test_two_processes_make_the_same_bytes_as_one(tmp_path):
    dataset = raw_dataset(tmp_path / "d", [(100 + n, 70) for n in range(40)])

    rescale(dataset, "one")
    rescale(dataset, "two", engine=LocalProcesses(workers=2))

    one, two = (snapshot(dataset.preset(name).path) for name in ("one", "two"))
    files = [name for name in one if name.startswith("images/") or name == "train.jsonl"]
    assert len(files) == 41
    assert [one[name][0] for name in files] == [two[name][0] for name in files]


# ---- again


def test_second_run_changes_no_byte_and_no_mtime(dataset):
    rescale(dataset)
    before = snapshot(preset_of(dataset).path)

    report = rescale(dataset)

    assert snapshot(preset_of(dataset).path) == before
    assert (dict(report.counts), report.rewritten) == ({"kept": 3}, [])


def test_run_creates_only_what_is_missing(dataset):
    rescale(dataset)
    before = snapshot(preset_of(dataset).images)
    (preset_of(dataset).images / "0.jpg").unlink()

    report = rescale(dataset)

    after = snapshot(preset_of(dataset).images)
    assert dict(report.counts) == {"kept": 2, "resized": 1}
    assert {name: after[name] for name in ("1.jpg", "2.jpg")} == {name: before[name] for name in ("1.jpg", "2.jpg")}
    assert after["0.jpg"][0] == before["0.jpg"][0]


def test_records_are_rewritten_when_raw_records_change(dataset):
    rescale(dataset)
    images = snapshot(preset_of(dataset).images)
    put_records(dataset, [record("0.jpg", 101, 67, {"desc": "new", "bbox_2d": [0, 0, 50, 50]})])

    report = rescale(dataset)

    assert report.rewritten == ["train"]
    assert [r["objects"][0]["desc"] for r in records_of(preset_of(dataset).jsonl("train"))] == ["new"]
    assert snapshot(preset_of(dataset).images) == images


def test_lost_index_is_rebuilt_by_adopting_what_is_whole(dataset):
    """A valid untracked file is kept byte for byte. Spec: docs/spec/conventions.md#adoption"""
    rescale(dataset)
    before = snapshot(preset_of(dataset).images)
    (preset_of(dataset).path / INDEX).write_bytes(b'{"image": "images/0.jpg", "ra')

    report = rescale(dataset)

    assert dict(report.counts) == {"kept": 0, "adopted": 3}
    assert snapshot(preset_of(dataset).images) == before
    assert dict(rescale(dataset).counts) == {"kept": 3}


def test_raw_image_of_equal_bytes_is_not_another_one(dataset):
    rescale(dataset)
    os.utime(dataset.raw_images / "0.jpg", ns=(1, 1))

    assert dict(rescale(dataset).counts) == {"kept": 3}
    assert len((preset_of(dataset).path / INDEX).read_text().splitlines()) == 4
    assert plan_of(dataset).jobs == []


def plan_of(dataset):
    return plan_rescale(dataset, PRESET, choose_parameters(preset_of(dataset), library="pillow"))


def test_raw_image_that_is_gone_makes_nothing_stale(dataset):
    """Spec: docs/spec/conventions.md#missing-sources"""
    rescale(dataset)
    (dataset.raw_images / "0.jpg").unlink()

    assert dict(rescale(dataset).counts) == {"kept": 3}


# ---- never replaced


@pytest.mark.parametrize("known", [True, False], ids=["known", "index lost"])
@pytest.mark.parametrize(
    ("damage", "says"),
    [(lambda path: path.write_bytes(path.read_bytes()[:-200]), "preset_image"),
     (lambda path: path.write_bytes(b""), "preset_image"),
     (lambda path: path.write_bytes(picture(32, 32)), "preset_image"),
     (lambda path: (path.unlink(), path.mkdir()), "preset_image"),
     (lambda path: (path.unlink(), path.symlink_to("2.jpg")), "preset_image")],
    ids=["cut", "empty", "other size", "folder", "link"],
)  # fmt: skip
def test_damaged_preset_image_is_never_replaced(dataset, damage, says, known):
    """Undecodable images and images of the wrong size fail, with a list and the remedy."""
    rescale(dataset)
    damage(preset_of(dataset).images / "0.jpg")
    if not known:
        (preset_of(dataset).path / INDEX).unlink()
    before = snapshot(preset_of(dataset).path)

    error = refusal(dataset)

    assert says in str(error)
    assert "delete that file in the preset" in str(error)
    assert {n: v for n, v in snapshot(preset_of(dataset).path).items() if n != INDEX} == {
        n: v for n, v in before.items() if n != INDEX
    }


def test_changed_raw_image_fails_and_deleting_its_preset_image_is_the_way_on(dataset):
    rescale(dataset)
    put_image(dataset, "0.jpg", picture(101, 67, seed=99))
    target = preset_of(dataset).images / "0.jpg"
    before = target.read_bytes()

    assert "raw_changed" in str(refusal(dataset))
    assert target.read_bytes() == before
    target.unlink()

    assert rescale(dataset).counts["resized"] == 1
    assert target.read_bytes() != before


def test_copy_that_differs_from_its_raw_image_is_found_without_an_index(dataset):
    rescale(dataset)
    put_image(dataset, "1.jpg", picture(96, 64, seed=99))
    (preset_of(dataset).path / INDEX).unlink()

    assert "raw_changed" in str(refusal(dataset))


# ---- parameters


@pytest.mark.parametrize(
    "asked", [{"max_pixels": 602112}, {"min_pixels": 1024}, {"image_factor": 28}, {"library": "torch"}]
)
def test_other_parameters_fail_before_any_write(dataset, asked):
    rescale(dataset)
    before = snapshot(dataset.path)
    (key, value), *_ = asked.items()

    with pytest.raises(PresetConflict, match=f"{key} recorded .* requested {value}") as conflict:
        rescale(dataset, **asked)

    assert "choose a new preset name, or delete the preset directory" in str(conflict.value)
    assert snapshot(dataset.path) == before


def test_parameters_that_are_not_given_are_the_recorded_ones(dataset):
    rescale(dataset, max_pixels=602112, min_pixels=2048)

    parameters = choose_parameters(preset_of(dataset))

    assert (parameters.max_pixels, parameters.min_pixels, parameters.library) == (602112, 2048, "pillow")


@pytest.mark.parametrize(
    "manifest", [None, {"format": 1, "stage_stats": {}}, {"format": 1, "stage_stats": {"rescale": []}}]
)
@pytest.mark.parametrize("content", [[], ["images/0.jpg"]], ids=["empty", "with images"])
def test_folder_that_records_no_parameters_fails_before_any_write(dataset, manifest, content):
    """Parameters are never inferred from files; an empty directory has none either."""
    path = preset_of(dataset).path
    path.mkdir()
    for name in content:
        (path / name).parent.mkdir()
        (path / name).touch()
    if manifest:
        (path / "pipeline_manifest.json").write_text(json.dumps(manifest))
    before = snapshot(path)

    with pytest.raises(PresetConflict, match="are not recorded"):
        rescale(dataset)

    assert snapshot(path) == before


def test_parameters_without_one_of_their_keys_are_other_parameters(dataset):
    rescale(dataset)
    manifest = read_preset_manifest(preset_of(dataset))
    del manifest["stage_stats"]["rescale"]["max_pixels"]
    preset_of(dataset).manifest.write_text(json.dumps(manifest))

    with pytest.raises(PresetConflict, match="max_pixels recorded nowhere"):
        rescale(dataset)


def test_linked_images_folder_is_refused(dataset, tmp_path):
    rescale(dataset)
    images = preset_of(dataset).images
    images.rename(tmp_path / "moved")
    images.symlink_to(tmp_path / "moved")

    with pytest.raises(PresetConflict, match="not a real folder"):
        rescale(dataset)


@pytest.mark.parametrize("name", ["rescale_max60", "rescale_max_60", "raw", "a/b"])
def test_name_that_is_none_of_a_base_preset_is_refused(dataset, name):
    with pytest.raises(WrongUsage):
        plan_rescale(dataset, name, choose_parameters(preset_of(dataset), library="pillow"))


def test_splits_that_are_not_there_are_reported(tmp_path, dataset):
    parameters = choose_parameters(preset_of(dataset), library="pillow")
    with pytest.raises(MissingInput, match="val"):
        plan_rescale(dataset, PRESET, parameters, ["val"])
    with pytest.raises(WrongUsage, match="test"):
        plan_rescale(dataset, PRESET, parameters, ["test"])
    with pytest.raises(MissingInput, match=f"(?s)no dataset nothing.*existing datasets: {dataset.name}"):
        plan_rescale(Dataset(dataset.path.parent / "nothing"), PRESET, parameters)


def test_planning_writes_nothing(dataset):
    before = snapshot(dataset.path)
    assert len(plan_of(dataset).jobs) == 3
    assert snapshot(dataset.path) == before
    assert not preset_of(dataset).path.exists()


def test_empty_split_is_published_empty(tmp_path):
    dataset = Dataset(tmp_path / "d")
    put_records(dataset, [])
    rescale(dataset)
    assert preset_of(dataset).jsonl("train").read_bytes() == b""


# ---- strict


BAD_LINES = {
    "line": "not json",
    "images": json.dumps({**record("0.jpg", 101, 67), "images": []}),
    "image_path": json.dumps(record("../0.jpg", 101, 67)),
    "image_size": json.dumps({**record("0.jpg", 101, 67), "width": 0}),
    "inverted": json.dumps(record("0.jpg", 101, 67, {"desc": "a", "bbox_2d": [5, 5, 5, 9]})),
    "outside_image": json.dumps(record("0.jpg", 101, 67, {"desc": "a", "bbox_2d": [300, 300, 320, 320]})),
    "out_of_range": json.dumps(record("0.jpg", 101, 67, {"desc": "a", "bbox_2d": [1, 1, 1e308, 9]})),
    "two_sizes": json.dumps(record("0.jpg", 67, 101)),
    "missing_image": json.dumps(record("gone.jpg", 101, 67)),
    "size_mismatch": json.dumps(record("2.jpg", 41, 41)),
    "aspect": json.dumps(record("long.jpg", 3000, 10)),
}


@pytest.mark.parametrize("reason", BAD_LINES)
def test_refused_line_fails_the_run_and_finished_images_stay(tmp_path, reason):
    dataset = raw_dataset(tmp_path / "d", [(101, 67), (96, 64), (42, 41)])
    good = [record("0.jpg", 101, 67), record("1.jpg", 96, 64)]
    put_records(dataset, [*good, BAD_LINES[reason]])

    error = refusal(dataset)

    assert f"train.jsonl:3 {reason}" in str(error)
    preset = preset_of(dataset)
    assert not preset.jsonl("train").exists()
    assert sorted(path.name for path in preset.images.iterdir()) == ["0.jpg", "1.jpg"]


@pytest.mark.parametrize("geometry", [{"bbox_2d": [96, 0, 99, 9]}, {"poly": [200, 200, 210, 200, 210, 210]}])
def test_geometry_outside_an_image_that_keeps_its_size_is_refused(tmp_path, geometry):
    dataset = raw_dataset(tmp_path / "d", [(96, 64)])
    put_records(dataset, [record("0.jpg", 96, 64, {"desc": "a", **geometry})])

    assert "outside_image" in str(refusal(dataset))


def test_path_outside_images_is_refused(dataset):
    (dataset.raw / "a.jpg").write_bytes(picture(40, 40))
    put_records(dataset, [{**record("x", 40, 40), "images": ["a.jpg"]}])
    assert "is not in images/" in str(refusal(dataset))


def test_every_refusal_is_listed_before_the_run_fails(dataset):
    put_records(dataset, [record("0.jpg", 101, 67), *BAD_LINES.values()])

    error = refusal(dataset)

    assert set(error.report.problems.by_reason) == BAD_LINES.keys()
    assert all(reason in str(error) for reason in BAD_LINES)


def test_split_that_is_good_is_published_beside_one_that_is_not(dataset):
    put_records(dataset, [record("0.jpg", 101, 67), "null"], "val")

    error = refusal(dataset)

    assert preset_of(dataset).splits() == ["train"]
    assert "not written: val.jsonl" in str(error)


def test_run_after_the_repair_goes_on(dataset):
    put_records(dataset, [record("0.jpg", 101, 67), "null"])
    refusal(dataset)
    put_records(dataset, [record("0.jpg", 101, 67), record("1.jpg", 96, 64)])

    report = rescale(dataset)

    assert dict(report.counts) == {"kept": 1, "copied": 1}
    assert preset_of(dataset).splits() == ["train"]


def test_published_records_stay_while_raw_is_bad(dataset):
    rescale(dataset)
    before = preset_of(dataset).jsonl("train").read_bytes()
    put_records(dataset, ["null"])

    refusal(dataset)

    assert preset_of(dataset).jsonl("train").read_bytes() == before


@pytest.mark.parametrize("data", [b"", b"no image", picture(101, 67)[:-300], picture(96, 64)[:-300]])
def test_undecodable_raw_image_is_refused_also_where_it_would_be_copied(dataset, data):
    """A copy is checked to its last byte, since a truncated image would otherwise be found only in training."""
    put_image(dataset, "1.jpg", data)
    put_records(dataset, [record("1.jpg", *((96, 64) if len(data) != len(picture(101, 67)[:-300]) else (101, 67)))])

    error = refusal(dataset)

    assert "undecodable" in str(error)
    assert list(preset_of(dataset).images.iterdir()) == []


def test_format_that_presets_do_not_hold_is_refused(dataset):
    put_image(dataset, "1.jpg", picture(96, 64, form="GIF"))
    assert "unsupported_type" in str(refusal(dataset))


def test_flood_of_bad_lines_is_counted_and_listed_in_part(tmp_path):
    dataset = Dataset(tmp_path / "d")
    put_records(dataset, ["null"] * 3000)

    error = refusal(dataset)

    assert error.report.problems.by_reason == {"line": 3000}
    assert len(error.report.problems.listed) == 1000
    assert "and 2980 more" in str(error)
    assert not preset_of(dataset).path.exists(), "nothing to make, nothing made"


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=5), inner, max_size=5),
    max_leaves=8,
)
odd_objects = st.fixed_dictionaries(
    {"desc": st.text() | json_values, "bbox_2d": json_values | st.lists(st.floats(), min_size=4, max_size=4)}
)
odd_records = st.fixed_dictionaries(
    {
        "images": json_values | st.just(["images/0.jpg"]),
        "width": json_values | st.integers(1, 200),
        "height": json_values | st.integers(1, 200),
        "objects": json_values | st.lists(odd_objects),
    }
).map(lambda value: json.dumps(value).encode())


@given(st.lists(st.binary(max_size=30) | odd_records, max_size=4))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=150)
def test_whatever_raw_holds_is_planned_or_listed(tmp_path, lines):
    """Any bytes give problems, never a traceback; what is planned can be published."""
    dataset = Dataset(tmp_path / "d")
    dataset.raw.mkdir(parents=True, exist_ok=True)
    dataset.raw_jsonl("train").write_bytes(b"\n".join(lines))

    plan = plan_of(dataset)

    assert plan.splits[0].records == len(plan.problems) + sum(
        1 for line in records_planned(plan, dataset.raw_jsonl("train")) if line["width"] > 0
    )


def records_planned(plan, path):
    """Return the records of lines without a problem, as they would be published."""
    bad = {problem.line for problem in plan.problems.listed}
    return [_rescaled(plan, line.value, path) for line in read_jsonl(path) if line.number not in bad]


def test_two_spellings_of_one_path_are_one_image(dataset):
    put_records(dataset, [record("0.jpg", 101, 67), record("./0.jpg", 101, 67)])

    report = rescale(dataset)

    assert report.splits["train"]["images"] == 1
    assert all(
        (preset_of(dataset).path / r["images"][0]).is_file() for r in records_of(preset_of(dataset).jsonl("train"))
    )


def test_numbers_far_beyond_the_edge_are_clamped(dataset):
    """Values beyond the largest possible side are refused (BAD_LINES)."""
    huge = record("0.jpg", 101, 67, {"desc": "a", "bbox_2d": [-2e9, 0, 2e9, 10]})
    put_records(dataset, [huge])
    rescale(dataset)
    assert records_of(preset_of(dataset).jsonl("train"))[0]["objects"][0]["bbox_2d"] == [0, 0, 95, 10]


# ---- EXIF


def test_declared_size_of_the_turned_image_is_an_error_naming_exif(dataset):
    put_image(dataset, "0.jpg", picture(101, 67, orientation=6))
    put_records(dataset, [record("0.jpg", 67, 101)])

    assert "EXIF orientation tag (6)" in str(refusal(dataset))


def test_orientation_is_not_applied_and_re_encoded_files_carry_no_tag(dataset):
    turned = picture(101, 67, seed=0, orientation=6)
    put_image(dataset, "0.jpg", turned)
    put_records(dataset, [record("0.jpg", 101, 67)])

    rescale(dataset)

    image = Image.open(preset_of(dataset).images / "0.jpg")
    stored = Image.open(io.BytesIO(turned)).resize((96, 64), Image.Resampling.LANCZOS)
    assert (image.size, image.getexif().get(0x0112)) == ((96, 64), None)
    assert np.abs(np.asarray(image, int) - np.asarray(stored, int)).mean() < 3


def test_copies_that_carry_an_orientation_tag_are_counted(dataset):
    put_image(dataset, "1.jpg", picture(96, 64, orientation=3))

    assert rescale(dataset).turned == 1
    assert rescale(dataset).splits["train"]["orientation_tags"] == 1


# ---- interruptions


class _Stopped(Exception):
    pass


def test_run_that_stops_half_way_is_continued_to_the_same_preset(tmp_path):
    dataset = raw_dataset(tmp_path / "d", [(100, 60 + n) for n in range(20)])
    rescale(dataset, "whole")

    def some(worker_class, jobs, **options):
        options.pop("batch_size")
        yield from worker_class(**options).stream(jobs[:7])
        raise _Stopped

    with pytest.raises(_Stopped):
        run_rescale(plan_rescale(dataset, PRESET, choose_parameters(preset_of(dataset), library="pillow")), some)
    assert preset_of(dataset).splits() == []

    report = rescale(dataset)

    assert (report.counts["kept"], report.counts["resized"] + report.counts["copied"]) == (7, 13)
    assert_same_preset(dataset.preset("whole"), preset_of(dataset))


def assert_same_preset(one, other):
    def content(preset):
        return {
            name: data for name, (data, _) in snapshot(preset.path).items() if name not in {INDEX, preset.manifest.name}
        }

    assert content(one) == content(other)
    stats = [read_preset_manifest(preset)["stage_stats"] for preset in (one, other)]
    assert stats[0] == stats[1]


def rescale_until(dataset, moment):
    """Run a rescale in another process, which is killed instead of giving the next final name after the first `moment` ones."""
    child = os.fork()
    if child == 0:
        owner_name()  # creates its lock file, whose name does not count
        names = 0

        def killing(give_name):
            def call(*args, **options):
                nonlocal names
                names += 1
                if names > moment:
                    os.kill(os.getpid(), signal.SIGKILL)
                return give_name(*args, **options)

            return call

        for verb in ("link", "rename", "replace"):
            setattr(os, verb, killing(getattr(os, verb)))
        rescale(dataset)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_killed_run_leaves_whole_files_and_the_next_one_finishes(tmp_path):
    """kill -9 at any final name: manifest, folder, 12 images, records, manifest again."""
    dataset = raw_dataset(tmp_path / "d", [(100, 60 + n) for n in range(12)])
    rescale(dataset, "whole")
    for moment in range(16):
        preset = preset_of(dataset)
        shutil.rmtree(preset.path, ignore_errors=True)

        assert rescale_until(dataset, moment) == -signal.SIGKILL
        assert preset.manifest.is_file() == preset.path.exists(), "the folder appears together with its manifest"
        images = list(preset.images.glob("*.jpg"))
        assert len(images) == min(max(moment - 2, 0), 12)
        assert all(path.read_bytes() == (dataset.preset("whole").images / path.name).read_bytes() for path in images)

        report = rescale(dataset)

        assert report.counts["kept"] + report.counts["adopted"] == len(images), "nothing done is done again"
        assert_same_preset(dataset.preset("whole"), preset)
        assert not list(dataset.path.glob("**/.tmp-*"))
    shutil.rmtree(preset_of(dataset).path)
    assert rescale_until(dataset, 16) == 0


def killing(*args, **options):
    """Use two worker processes, one of which is killed after the first row."""
    import psutil

    rows = LocalProcesses(workers=2).map_batches(*args, **options)
    yield next(rows)
    child = next(p for p in psutil.Process().children() if "spawn_main" in " ".join(p.cmdline()))
    os.kill(child.pid, signal.SIGKILL)
    yield from rows


def test_worker_killed_from_outside_costs_no_image(tmp_path):
    dataset = raw_dataset(tmp_path / "d", [(100, 60 + n % 5) for n in range(200)])
    parameters = choose_parameters(preset_of(dataset), library="pillow")

    report = run_rescale(plan_rescale(dataset, PRESET, parameters), killing)

    assert sum(report.counts.values()) == 200
    assert not report.problems
    assert not list(preset_of(dataset).images.glob(".tmp-*"))


def test_killed_worker_ends_the_run_and_the_next_one_finishes(tmp_path, monkeypatch):
    dataset = raw_dataset(tmp_path / "d", [(100, 60 + n % 5) for n in range(200)])
    monkeypatch.setattr("resources.local_pool.runs_again", lambda keys, deaths: [])  # as if it died each time

    with pytest.raises(WorkerDied, match="SIGKILL"):
        run_rescale(plan_rescale(dataset, PRESET, choose_parameters(preset_of(dataset), library="pillow")), killing)
    assert preset_of(dataset).splits() == []

    report = rescale(dataset)

    assert report.counts["kept"] + report.counts["adopted"] > 0
    assert sum(report.counts.values()) == 200
    assert not list(preset_of(dataset).images.glob(".tmp-*"))


def test_folder_of_a_run_that_died_unborn_is_swept(dataset):
    dead = f".tmp-{owner_name().partition('-')[0]}-0123456789ab-000001"
    (dataset.path / dead / "images").mkdir(parents=True)

    rescale(dataset)

    assert not (dataset.path / dead).exists()


def test_raw_records_that_change_during_the_run_are_reported(dataset):
    plan = plan_of(dataset)
    put_records(dataset, [record("0.jpg", 101, 67)])

    with pytest.raises(Exception, match="changed while"):
        run_rescale(plan, Engine().map_batches)

    assert preset_of(dataset).splits() == []


# ---- real photographs


def test_real_coco_becomes_a_valid_preset(coco128, tmp_path):
    """From raw to rescale_32_768, with the default library."""
    dataset = Dataset(tmp_path / "coco")
    convert(dataset, "coco", coco128 / "instances_train2017.json", coco128 / "images", geometry="polygons")

    report = rescale(dataset, library=None, engine=LocalProcesses(workers=2))

    preset = preset_of(dataset)
    records = records_of(preset.jsonl("train"))
    problems = [p for r in records for p in violations(r, "pixel", PresetRules(786432, 32))]
    assert (len(records), problems) == (128, [])
    assert [p for r in records for p in warnings(r, "pixel")] == []
    assert report.counts["resized"] + report.counts["copied"] == 128
    assert all(Image.open(preset.path / r["images"][0]).size == (r["width"], r["height"]) for r in records)
    assert read_preset_manifest(preset)["stage_stats"]["rescale"]["library"] == "torch"
