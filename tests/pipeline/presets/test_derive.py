"""Coord: norm and coord beside a base preset, or a derived preset with the base's images."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import ChainMap
from pathlib import Path

import pytest

from imagemill.domain.preset_names import PresetName, effective_preset
from imagemill.errors import DiskFull, ImagemillError, MissingInput
from imagemill.formats.hardlinks import LinksRefused, NotLinkable
from imagemill.formats.manifest import sha256_file, write_json
from imagemill.fs.atomic import temporaries, temporary_path
from imagemill.fs.owners import owner_name
from imagemill.pipeline.presets import coords, derive
from imagemill.pipeline.presets.derive import BaseChanged, CoordRefused, coord
from imagemill.store.public_data import Dataset, read_preset_manifest
from imagemill.validation.validator import Options, validate_preset
from tests.helpers.product import PROJECT

RESCALE = {
    "image_factor": 32,
    "max_pixels": 786432,
    "min_pixels": 4096,
    "quality": 95,
    "splits": {"train": {"done": 6}},
}
NO_IMAGES = Options(image_mode="none")
BASE, DERIVED = PresetName("x"), PresetName("x", 2)


def record(split, number, objects):
    box = {"desc": "bowl", "bbox_2d": [number, 1, number + 9, 50]}
    return {"images": [f"images/{split}/{number}.jpg"], "objects": [box] * objects, "width": 128, "height": 96}


def write_records(preset, split, records, objects=4):
    (preset.images / split).mkdir(parents=True, exist_ok=True)
    with preset.jsonl(split).open("w") as out:
        for number in range(records):
            one = record(split, number, number % objects)
            (preset.path / one["images"][0]).write_text(f"{split} {number}")
            out.write(json.dumps(one) + "\n")


def write_base(dataset, records=8):
    base = dataset.preset("x")
    write_records(base, "train", records)
    write_records(base, "val", records // 2)
    write_json(base.manifest, {"format": 1, "dataset": "coco", "preset": "x", "stage_stats": {"rescale": RESCALE}})
    return base


@pytest.fixture
def dataset(tmp_path):
    dataset = Dataset(tmp_path / "coco")
    write_base(dataset)
    return dataset


@pytest.fixture
def base(dataset):
    return dataset.preset("x")


@pytest.fixture
def derived(dataset):
    return dataset.preset("x_max2")


def contents(folder):
    """Return the bytes of all files below a folder."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def state(folder):
    """Return names, inodes and times, which change if anything is written, removed or replaced."""
    stats = {path: path.lstat() for path in folder.rglob("*")}
    return {str(p): (s.st_ino, s.st_mtime_ns, s.st_size) for p, s in stats.items() if not p.is_dir()}


def refused(error, dataset, name=DERIVED, **options):
    """Return the message of a run that must not write anything."""
    before = state(dataset.path)
    with pytest.raises(error) as caught:
        coord(dataset, name, **options)
    assert state(dataset.path) == before
    return str(caught.value)


# ---- base presets


def test_base_gets_norm_and_coord_and_keeps_what_rescale_recorded(dataset, base):
    """Spec: docs/spec/presets.md#rescale-parameters"""
    before = base.jsonl("train").read_bytes()

    result = coord(dataset, BASE)

    assert sorted(p.name for p in base.path.glob("*.jsonl")) == [
        *("train.coord.jsonl", "train.jsonl", "train.norm.jsonl"),
        *("val.coord.jsonl", "val.jsonl", "val.norm.jsonl"),
    ]
    assert base.jsonl("train").read_bytes() == before
    manifest = read_preset_manifest(base)
    assert manifest is not None
    assert manifest["stage_stats"]["rescale"] == RESCALE
    assert manifest["stage_stats"]["coord"] == {
        "max_objects": None,
        "splits": {
            split: {"records": n, "dropped": 0, "source": f"sha256:{sha256_file(base.jsonl(split))}"}
            for split, n in (("train", 8), ("val", 4))
        },
    }
    assert result.counts["train"].records == 8
    assert (result.linked, result.present) == (0, 0)


def test_base_whose_records_changed_is_done_again(dataset, base):
    """JSONL files are rewritten when raw records change. Spec: docs/spec/presets.md#layout"""
    coord(dataset, BASE)
    write_records(base, "train", 5)
    result = coord(dataset, BASE)
    assert result.changed == ["train.norm.jsonl", "train.coord.jsonl", "pipeline_manifest.json"]
    assert len(base.records("train", "norm").read_text().splitlines()) == 5


def test_one_split_leaves_the_others_as_they_are(dataset, base):
    coord(dataset, BASE, splits=["val"])
    assert not base.records("train", "norm").exists()
    coord(dataset, BASE, splits=["train"])
    manifest = read_preset_manifest(base)
    assert manifest
    assert set(manifest["stage_stats"]["coord"]["splits"]) == {"train", "val"}


@pytest.mark.parametrize("name", [BASE, DERIVED])
def test_run_on_what_is_there_already_touches_nothing(dataset, name):
    """Neither bytes nor mtime change. Spec: docs/spec/presets.md#hardlinks"""
    coord(dataset, name)
    before = state(dataset.path)

    result = coord(dataset, name)

    assert state(dataset.path) == before
    assert (result.changed, result.linked) == ([], 0)


@pytest.mark.parametrize("name", [BASE, DERIVED])
def test_missing_base_or_split_is_reported_with_the_command(dataset, base, name):
    for split in ("train", "val"):
        os.rename(base.jsonl(split), base.path / f"{split}.renamed")
        assert f"x has no {split}.jsonl" in refused(MissingInput, dataset, name, splits=[split])
    assert "imagemill preset rescale coco --preset x" in refused(MissingInput, dataset, name)
    base.manifest.unlink()
    assert "no preset x that rescale made" in refused(MissingInput, dataset, name)
    shutil.rmtree(base.path)
    dataset.preset("y").path.mkdir()
    write_json(dataset.preset("y").manifest, {})
    message = refused(MissingInput, dataset, name)
    assert "no preset x in coco" in message
    assert "existing presets: y" in message
    assert "imagemill preset rescale coco --preset x" in message


# ---- derived presets


def test_derived_preset_has_the_kept_records_and_links_to_their_images(dataset, base, derived):
    """Spec: docs/spec/presets.md#derived-presets"""
    result = coord(dataset, effective_preset("coord", "x", environment="2"))

    kept = [f"images/train/{n}.jpg" for n in (0, 1, 2, 4, 5, 6)] + [f"images/val/{n}.jpg" for n in range(3)]
    assert sorted(str(p.relative_to(derived.path)) for p in derived.images.rglob("*.jpg")) == kept
    for name in kept:
        assert os.path.samefile(base.path / name, derived.path / name)
    assert derived.images.is_dir()
    assert not derived.images.is_symlink()
    assert result.linked == len(kept)
    for split in ("train", "val"):
        for path in (derived.jsonl(split), derived.records(split, "norm"), derived.records(split, "coord")):
            named = [json.loads(line)["images"][0] for line in path.read_text().splitlines()]
            assert named == [name for name in kept if split in name]
    assert sorted(p.name for p in derived.path.iterdir() if p.is_file()) == sorted(
        ["pipeline_manifest.json"]
        + [split + end for split in ("train", "val") for end in (".jsonl", ".norm.jsonl", ".coord.jsonl", ".filter_stats.json")]
    )  # fmt: skip


def test_derived_manifest_has_rescale_and_the_fingerprint_of_its_base(dataset, base, derived):
    """Spec: docs/spec/presets.md#rescale-parameters"""
    coord(dataset, DERIVED)
    manifest = read_preset_manifest(derived)
    assert manifest
    sources = {split: f"sha256:{sha256_file(base.jsonl(split))}" for split in ("train", "val")}
    assert manifest["dataset"] == "coco"
    assert manifest["preset"] == "x_max2"
    assert manifest["stage_stats"]["rescale"] == RESCALE
    assert manifest["base"]["preset"] == "x"
    assert manifest["base"]["splits"] == sources
    assert manifest["stage_stats"]["coord"] == {
        "max_objects": 2,
        "splits": {
            "train": {"records": 6, "dropped": 2, "source": sources["train"]},
            "val": {"records": 3, "dropped": 1, "source": sources["val"]},
        },
    }


def test_splits_one_after_the_other_make_what_all_at_once_make(dataset, derived):
    coord(dataset, DERIVED)
    at_once = contents(derived.path)
    shutil.rmtree(derived.path)
    coord(dataset, DERIVED, splits=["val"])
    assert derived.splits() == ["val"]
    coord(dataset, DERIVED, splits=["train"])
    assert contents(derived.path) == at_once


def test_directory_appears_with_manifest_and_images_in_one_rename(dataset, derived, monkeypatch):
    """Spec: docs/spec/presets.md#rescale-parameters"""
    appeared = []
    real = os.rename

    def rename(old, new):
        appeared.append((Path(new), sorted(p.name for p in Path(old).iterdir() if not p.name.startswith(".tmp-"))))
        real(old, new)

    monkeypatch.setattr(os, "rename", rename)
    coord(dataset, DERIVED)

    assert appeared == [(derived.path, ["images", "pipeline_manifest.json"])]


@pytest.mark.parametrize("split", ["train", "val"])
def test_changed_base_is_refused_with_the_remedy(dataset, base, derived, split):
    """The refusal precedes any write, also if another split is requested. Spec: docs/spec/presets.md#layout"""
    coord(dataset, DERIVED)
    write_records(base, split, 5)
    message = refused(BaseChanged, dataset, splits=["train"])
    assert f"x has changed since x_max2 was derived from it: {split}.jsonl" in message
    assert f"delete {derived.path} and run coord again" in message
    shutil.rmtree(derived.path)
    assert coord(dataset, DERIVED).counts[split].records == 5


def test_bad_line_in_a_changed_base_is_named_and_the_derived_preset_is_not_blamed(dataset, base, derived):
    """The remedy is to repair the line: deleting the derived preset would not help."""
    coord(dataset, DERIVED)
    whole = base.jsonl("val").read_bytes()
    base.jsonl("val").write_bytes(whole + b'{"images": []}\n')

    message = refused(CoordRefused, dataset)

    assert "val.jsonl: line 5: " in message
    assert "repair the raw records" in message
    assert "delete" not in message
    base.jsonl("val").write_bytes(whole)
    assert coord(dataset, DERIVED).changed == []


def test_validator_finds_splits_made_from_other_records(dataset, base, derived):
    """Until coord runs again, norm and coord of a base with changed records belong to the old records."""

    def rules(preset, **options):
        return dict(ChainMap(*(report.rules for report in validate_preset(preset.path, NO_IMAGES, **options))))

    coord(dataset, BASE)
    coord(dataset, DERIVED)
    assert rules(base) == rules(derived) == {}

    write_records(base, "train", 5)

    assert rules(base) == {"split_lines": 2, "stale_split": 1}
    assert rules(base, coord_is_due=True) == {}, "rescale has just run"
    assert rules(derived) == {"base_changed": 1}
    coord(dataset, BASE)
    assert (rules(base), rules(derived)) == ({}, {"base_changed": 1})


def test_base_rescaled_again_is_refused(dataset, base):
    coord(dataset, DERIVED)
    changed = {**RESCALE, "max_pixels": 602112}
    write_json(base.manifest, {"format": 1, "dataset": "coco", "preset": "x", "stage_stats": {"rescale": changed}})
    assert "its rescale parameters" in refused(BaseChanged, dataset)


def test_coord_of_the_base_changes_nothing_for_the_derived_preset(dataset):
    coord(dataset, DERIVED)
    coord(dataset, BASE)
    assert coord(dataset, DERIVED).changed == []


@pytest.mark.parametrize("manifest", [None, {"stage_stats": {"rescale": RESCALE}}, {"base": {"preset": "y"}}])
def test_directory_that_was_not_derived_from_this_base_is_refused(dataset, derived, manifest):
    """This includes an empty directory. Spec: docs/spec/presets.md#rescale-parameters"""
    derived.path.mkdir()
    if manifest:
        write_json(derived.manifest, manifest)
    assert "was not derived from x" in refused(ImagemillError, dataset)


def test_bad_lines_of_all_splits_and_missing_images_are_reported_at_once(dataset, base, derived):
    """Spec: docs/spec/presets.md#strictness"""
    with base.jsonl("train").open("a") as train, base.jsonl("val").open("a") as val:
        train.write("\n[]\n")
        val.write('{"images": []}\n')
    (base.images / "train" / "1.jpg").unlink()

    message = refused(CoordRefused, dataset)

    for problem in ("train.jsonl: line 9: blank", "train.jsonl: line 10: a list", "val.jsonl: line 5: images:"):
        assert problem in message
    assert "images/train/1.jpg: not in the base preset" in message
    assert "run imagemill preset rescale for x" in message
    assert not derived.path.exists()
    assert "line 9" in refused(CoordRefused, dataset, BASE)


def test_foreign_image_in_the_derived_preset_is_refused_and_stays(dataset, derived):
    """Nothing in a derived images/ is ever removed or replaced. Spec: docs/spec/presets.md#layout"""
    coord(dataset, DERIVED)
    path = derived.images / "train" / "1.jpg"
    path.unlink()
    path.write_text("mine")
    assert "images/train/1.jpg: there already" in refused(CoordRefused, dataset)


def test_another_file_system_is_refused_before_anything_is_written(dataset, monkeypatch):
    def refuse(*_, **__):
        raise NotLinkable("two file systems")

    monkeypatch.setattr(derive, "check_file_system", refuse)
    monkeypatch.setattr(derive, "draft_split", None)
    refused(NotLinkable, dataset)


def test_full_disk_is_reported_and_the_next_run_finishes(dataset, derived, monkeypatch):
    def full(_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(derive, "link_tree", full)
        with pytest.raises(DiskFull):
            coord(dataset, DERIVED)
    assert temporaries(dataset.path) == temporaries(derived.path) == []
    assert derived.splits() == []
    coord(dataset, DERIVED)
    assert derived.splits() == ["train", "val"]


def test_link_that_becomes_impossible_meanwhile_publishes_nothing(dataset, base, derived, monkeypatch):
    """No published record refers to an image that is not linked. Spec: docs/spec/presets.md#layout"""
    real = derive.link_tree

    def late(plan):
        (base.images / "val" / "0.jpg").unlink()
        return real(plan)

    monkeypatch.setattr(derive, "link_tree", late)
    with pytest.raises(LinksRefused):
        coord(dataset, DERIVED)
    assert derived.splits() == []


def test_folder_of_a_dead_run_is_removed_and_that_of_a_living_one_stays(dataset):
    dead = temporary_path(dataset.path)
    dead = dead.with_name(dead.name.replace(owner_name().partition("-")[2], "0123456789ab"))
    alive = temporary_path(dataset.path)
    for left in (dead, alive):
        (left / "images").mkdir(parents=True)
    coord(dataset, DERIVED)
    assert not dead.exists()
    assert alive.exists()


# ---- killed at any moment

RUN = """
import os, sys, time
from pathlib import Path
from imagemill.pipeline.presets import coord_files
from imagemill.pipeline.presets.derive import coord
from imagemill.domain.preset_names import PresetName
from imagemill.store.public_data import Dataset

def slowly(name):
    real = getattr(os, name)
    def call(*args, **kwargs):
        time.sleep(0.0005)
        return real(*args, **kwargs)
    setattr(os, name, call)

for name in ("link", "replace", "rename", "fsync", "fdatasync"):
    slowly(name)
coord_files.CHUNK_BYTES = 4096
print("ready", flush=True)
coord(Dataset(Path(sys.argv[1])), PresetName("x", 2), advance=lambda records: time.sleep(0.0005))
"""
RECORDS = 240


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Return the derived preset of an undisturbed run, and the duration of a slowed run."""
    dataset = Dataset(tmp_path_factory.mktemp("undisturbed") / "coco")
    write_base(dataset, RECORDS)
    process, began = start(dataset), time.monotonic()
    assert process.wait() == 0
    return contents(dataset.preset("x_max2").path), time.monotonic() - began


def start(dataset):
    process = subprocess.Popen([sys.executable, "-c", RUN, dataset.path], cwd=PROJECT, stdout=subprocess.PIPE)
    assert process.stdout
    assert process.stdout.readline() == b"ready\n"
    return process


def kill_and_rerun(dataset, undisturbed, seed):
    clean, seconds = undisturbed
    base, derived = write_base(dataset, RECORDS), dataset.preset("x_max2")
    process = start(dataset)
    time.sleep(random.Random(seed).uniform(0, seconds))
    process.send_signal(signal.SIGKILL)
    process.wait()
    done = state(derived.images) if derived.path.exists() else {}
    for path in derived.path.glob("*.jsonl"):
        assert path.read_bytes() == clean[path.name], "whole files only"
        for line in path.read_text().splitlines():
            assert os.path.samefile(
                base.path / json.loads(line)["images"][0], derived.path / json.loads(line)["images"][0]
            )
    assert derived.manifest.exists() == derived.path.exists()

    result = coord(dataset, DERIVED)

    assert contents(derived.path) == clean
    assert result.present == len(done), "nothing is linked twice"
    assert [p.name for p in dataset.path.iterdir() if p.name not in {"x", "x_max2"}] == []


@pytest.mark.parametrize("seed", [0, 1, 2, 3])
def test_killed_run_is_completed_by_the_next_one(dataset, undisturbed, seed):
    """After kill -9 at a random moment, the next run gives the result of an undisturbed run.

    Spec: docs/spec/conventions.md#completion-and-identity
    """
    kill_and_rerun(dataset, undisturbed, seed)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(100, 120))
def test_killed_run_is_completed_by_the_next_one_twenty_times(dataset, undisturbed, seed):
    kill_and_rerun(dataset, undisturbed, seed)


@pytest.mark.parametrize("step", ["_appear", "link_tree", "_publish", "write_if_changed"])
@pytest.mark.parametrize("after", [False, True])
def test_run_that_ends_at_a_step_is_completed_by_the_next_one(dataset, derived, undisturbed, step, after, monkeypatch):
    """The run ends before and after each step that changes what readers see."""
    write_base(dataset, RECORDS)
    real = getattr(derive, step)

    def stop(*args):
        if after:
            real(*args)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(derive, step, stop)
        with pytest.raises(KeyboardInterrupt):
            coord(dataset, DERIVED)

    coord(dataset, DERIVED)

    assert contents(derived.path) == undisturbed[0]
    assert temporaries(dataset.path) == []


def test_tokens_are_a_thousand():
    assert (coords.TOKENS[0], coords.TOKENS[-1], len(coords.TOKENS)) == ("<|coord_0|>", "<|coord_999|>", 1000)
