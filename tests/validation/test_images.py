"""Checks of the images in records: exactly the first N structurally valid ones, in file order.

Spec: docs/spec/validation.md#image-checks, docs/spec/validation.md#real-image-folders
"""

import errno
import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from imagemill.domain.preset_records import PresetRules
from imagemill.formats.jsonl import write_jsonl
from imagemill.validation import images
from imagemill.validation.findings import collect
from imagemill.validation.images import ImageLook
from imagemill.validation.presets import preset_records
from imagemill.validation.validator import Options, validate
from tests.helpers.situations import PRESET_RECORD, preset, stage2_folder
from tests.helpers.stage2 import picture

BROKEN = {**PRESET_RECORD, "width": 0}


def named(name, **changes):
    return {**PRESET_RECORD, "images": [name], **changes}


def check(folder, *records, mode="open", first=64, **options):
    write_jsonl(folder / "x.jsonl", records)
    return collect("x", "preset", preset_records(folder / "x.jsonl", images=ImageLook(mode, first), **options))


def looked_at(monkeypatch, folder, *records, **options):
    """Return the images that were checked, in order."""
    names = []
    stat = images._stat
    monkeypatch.setattr(images, "_stat", lambda path: names.append(path.name) or stat(path))
    check(folder, *records, **options)
    return names


def test_exactly_the_first_valid_records_are_looked_at_in_their_order(tmp_path, monkeypatch):
    records = [BROKEN, named("c.jpg"), {}, named("a.jpg"), named("b.jpg"), named("d.jpg")]

    assert looked_at(monkeypatch, tmp_path, *records, first=3) == ["c.jpg", "a.jpg", "b.jpg"]


def test_failing_images_are_not_replaced_by_later_ones(tmp_path):
    picture(tmp_path / "good.jpg", size=(64, 32))
    records = [named("gone.jpg"), named("also-gone.jpg"), named("good.jpg"), named("third-gone.jpg")]

    assert check(tmp_path, *records, first=2).rules == {"image_missing": 2}
    assert check(tmp_path, *records, first=3).rules == {"image_missing": 2}
    assert check(tmp_path, *records, first=4).rules == {"image_missing": 3}


@pytest.mark.parametrize("first", [0, -1])
def test_no_count_means_all(tmp_path, first):
    assert check(tmp_path, *(named(f"{n}.jpg") for n in range(100)), first=first).rules == {"image_missing": 100}


def test_sixty_four_are_looked_at_by_default(tmp_path):
    write_jsonl(tmp_path / "x.jsonl", [named(f"{n}.jpg") for n in range(100)])

    assert validate(tmp_path / "x.jsonl", kind="preset").rules == {"image_missing": 64}


def test_record_over_a_limit_does_not_count(tmp_path, monkeypatch):
    """Limits are structural. Spec: docs/spec/validation.md#checks"""
    records = [named("wide.jpg", width=6400), named("odd.jpg", width=63), named("a.jpg"), named("b.jpg")]

    assert looked_at(monkeypatch, tmp_path, *records, first=1, limits=PresetRules(4096, 32)) == ["a.jpg"]


def test_record_with_a_warning_counts(tmp_path, monkeypatch):
    beyond = named("beyond.jpg", objects=[{"desc": "a", "bbox_2d": [0, 0, 65, 3]}])

    assert looked_at(monkeypatch, tmp_path, beyond, named("a.jpg"), first=1) == ["beyond.jpg"]


def test_every_line_is_judged_whatever_images_say(tmp_path):
    report = check(tmp_path, named("gone.jpg"), BROKEN, *(named(f"{n}.jpg") for n in range(5)), BROKEN, first=1)

    assert report.checked == 8
    assert report.rules == {"image_missing": 1, "image_size": 2}


@pytest.mark.parametrize(
    ("make", "exists", "opened"),
    [
        (lambda path: picture(path, size=(64, 32)), {}, {}),
        (lambda path: picture(path, size=(32, 64)), {}, {"size_differs": 1}),
        (lambda path: path.write_bytes(b"no image"), {}, {"undecodable": 1}),
        (lambda path: path.touch(), {}, {"undecodable": 1}),
        (lambda path: path.mkdir(), {"not_a_file": 1}, {"not_a_file": 1}),
        (os.mkfifo, {"not_a_file": 1}, {"not_a_file": 1}),
        (lambda path: path.symlink_to("nowhere"), {"image_missing": 1}, {"image_missing": 1}),
        (lambda path: path.symlink_to(path.name), {"image_missing": 1}, {"image_missing": 1}),
        (lambda path: None, {"image_missing": 1}, {"image_missing": 1}),
    ],
    ids=["good", "other size", "no image", "empty", "folder", "pipe", "dangling", "loop", "gone"],
)
def test_modes_see_what_they_say(tmp_path, make, exists, opened):
    make(tmp_path / "a.jpg")

    assert check(tmp_path, named("a.jpg"), mode="none").rules == {}
    assert check(tmp_path, named("a.jpg"), mode="exists").rules == exists
    assert check(tmp_path, named("a.jpg"), mode="open").rules == opened


def test_image_that_cannot_be_read_is_to_be_made_readable(tmp_path, monkeypatch):
    """The file may be valid, so the remedy is not to replace it."""
    picture(tmp_path / "a.jpg", size=(64, 32))

    def refused(path):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "read_bytes", refused)
    (found,) = check(tmp_path, named("a.jpg")).findings

    assert "cannot be read" in found.message
    assert found.remedy == "make the file readable"


@pytest.mark.parametrize("suffix", ["jpg", "png", "webp"])
def test_image_that_is_cut_off_is_found(tmp_path, suffix):
    """Its header is valid: only decoding finds the damage."""
    path = tmp_path / f"a.{suffix}"
    picture(path, size=(64, 32))
    assert check(tmp_path, named(path.name)).findings == []

    path.write_bytes(path.read_bytes()[:-300])
    assert check(tmp_path, named(path.name)).rules == {"undecodable": 1}


def test_size_is_that_of_the_stored_pixels(tmp_path):
    """Boxes and sizes of public data refer to stored pixels: EXIF orientation is never applied."""
    image = Image.fromarray(np.zeros((32, 64, 3), np.uint8))
    exif = Image.Exif()
    exif[0x0112] = 6
    image.save(tmp_path / "a.jpg", exif=exif)

    assert check(tmp_path, named("a.jpg")).findings == []
    assert check(tmp_path, named("a.jpg", width=32, height=64, objects=[])).rules == {"size_differs": 1}


def test_name_that_no_file_system_holds_is_missing(tmp_path):
    assert check(tmp_path, named("x" * 300 + ".jpg")).rules == {"image_missing": 1}


@pytest.mark.parametrize("mode", ["exists", "open"])
def test_image_of_a_derived_preset_is_the_bases_own(tmp_path, mode):
    """Every path in a kept record is a hardlink to the base's file. Spec: docs/spec/presets.md#layout"""
    folder = preset(tmp_path)
    options = Options(image_mode=mode)
    assert validate(folder / "train.jsonl", options=options).findings == []

    (folder.parent / "small" / "images" / "b.jpg").unlink()
    (found,) = validate(folder / "train.jsonl", options=options).findings
    assert (found.rule, found.line, found.item) == ("not_shared", 2, "images/b.jpg")

    for path in (folder.parent / "small").rglob("*"):
        path.is_file() and path.unlink()
    (folder.parent / "small" / "images").rmdir()
    (folder.parent / "small").rmdir()
    assert validate(folder / "train.jsonl", options=options).findings == [], "a base that is gone says nothing"


# ---- Stage 2


def check_sources(root, **options):
    return validate(root.stage2_jsonl, options=Options(data_root=root, **options))


def test_images_of_stage_2_records_are_found_in_approved_wherever_the_record_was_made(tmp_path):
    """A Stage 1 record keeps its path, and readers also find the image by its file name in approved/.

    Spec: docs/spec/conventions.md#locations
    """
    root = stage2_folder(tmp_path)
    assert check_sources(root).findings == []
    root.stage2_jsonl.write_text(root.stage2_jsonl.read_text().replace("data/approved/", "elsewhere/"))
    assert check_sources(root).findings == []

    picture(root.approved / "a.png", size=(24, 32))
    assert check_sources(root).rules == {"size_differs": 1}
    assert check_sources(root, image_mode="exists").findings == []


def test_image_that_is_gone_is_a_warning_for_stage_2(tmp_path):
    """A vanished source makes nothing stale. Spec: docs/spec/conventions.md#completion-and-identity"""
    root = stage2_folder(tmp_path)
    (root.approved / "a.png").unlink()

    report = check_sources(root)
    assert report.passed
    assert report.rules == {"source_missing": 1}
    assert validate(root.stage2_jsonl).findings == [], "without a root the images cannot be located"
