"""Images in sub-folders, and in a folder outside the data root, through the command line.

Spec: docs/spec/stage2.md#inputs, docs/spec/stage2.md#image-id, docs/spec/conventions.md#locations
"""

import json
import os
from pathlib import Path

import pytest

from imagemill.reading import ShardDataset
from tests.helpers.commands import called
from tests.helpers.stage2 import photos, picture
from tests.helpers.wiring import stub_every_kind


@pytest.fixture(autouse=True)
def stubs(monkeypatch):
    stub_every_kind(monkeypatch)


def fill(folder, *paths):
    for number, path in enumerate(paths):
        file = folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        picture(file, size=(24, 24))
        file.with_suffix(".txt").write_text(f"photograph {number}")


def tree(folder):
    """Return path, size and time stamps of everything in a folder."""
    return {
        str(path.relative_to(folder)): (stat.st_size, stat.st_mtime_ns, stat.st_ino)
        for path in sorted(folder.rglob("*"))
        for stat in [path.lstat()]
    }


def records(root):
    return [json.loads(line) for line in root.stage2_jsonl.read_text().splitlines()]


def trained(root):
    dataset = ShardDataset(root.shards, batch_size=1, allow_preview=True)
    return sorted(image_id for batch in dataset for image_id in batch["image_id"])


PATHS = ["top.png", "10_dog/a.png", "10_dog/old/a.png", "50%/é b.c.png"]
IDS = ["10_dog%2Fa", "10_dog%2Fold%2Fa", "50%25%2Fé b.c", "top"]


def test_images_of_sub_folders_reach_the_trainer(data_root):
    fill(data_root.approved, *PATHS)
    before = tree(data_root.approved)

    done = called(data_root, "run")

    assert done.code == 0, done.text
    assert "4 images seen: 4 embedded" in done.text
    assert [(record["image_id"], record["image_path"]) for record in records(data_root)] == [
        (IDS[0], "data/approved/10_dog/a.png"),
        (IDS[1], "data/approved/10_dog/old/a.png"),
        (IDS[2], "data/approved/50%/é b.c.png"),
        (IDS[3], "data/approved/top.png"),
    ]
    assert trained(data_root) == IDS
    assert tree(data_root.approved) == before
    assert "no Dagster run was started" in called(data_root, "run").text
    assert called(data_root, "validate", data_root.stage2_jsonl, "--image-check-mode", "open").code == 0


def test_every_command_that_takes_an_id_takes_the_path(data_root):
    """An id wins over an equal path. Spec: docs/spec/stage2.md#image-id"""
    fill(data_root.approved, "dog/a.png", "a.png", "dog/a.b.png")
    called(data_root, "run")

    report = json.loads(called(data_root, "explain", "dog/a.png", "--json").text)
    assert (report["image_id"], report["source"]["file"]) == ("dog%2Fa", "approved/dog/a.png")
    assert json.loads(called(data_root, "explain", "dog%2Fa.b", "--json").text)["image_id"] == "dog%2Fa.b"
    assert "no image 'dog/b.png'" in called(data_root, "explain", "dog/b.png").text

    done = called(data_root, "withdraw", "dog/a.png", "a")
    assert (done.code, trained(data_root)) == (0, ["dog%2Fa.b"]), done.text
    assert "withdrawn: dog%2Fa, a" in done.text
    assert called(data_root, "withdraw", "--restore", "dog/a.png").code == 0
    assert trained(data_root) == ["dog%2Fa", "dog%2Fa.b"]


def test_new_image_in_a_sub_folder_is_noticed_by_the_quick_status(data_root):
    fill(data_root.approved, "dog/a.png")
    called(data_root, "run")

    fill(data_root.approved, "dog/b.png")

    assert "changed     files were" in called(data_root, "status").text
    assert "1 embedded" in called(data_root, "run").text


def test_setting_is_recorded_and_changes_are_told(data_root):
    fill(data_root.approved, "top.png", "dog/a.png")
    data_root.config_file.write_text("inputs: {recursive: false}\n")
    done = called(data_root, "run")
    assert "dog" in done.text
    assert "sub_folder" in done.text
    assert [record["image_id"] for record in records(data_root)] == ["top"]

    data_root.config_file.write_text("inputs: {recursive: true}\n")
    done = called(data_root, "run")

    assert "inputs.recursive is now true; it was false" in done.text
    assert [record["image_id"] for record in records(data_root)] == ["dog%2Fa", "top"]


# ---- a folder elsewhere


def test_folder_elsewhere_is_read_remembered_and_left_as_it_is(data_root, tmp_path):
    """Spec: docs/spec/conventions.md#locations"""
    photographs = tmp_path / "disk" / "photographs"
    fill(photographs, *PATHS)
    data_root.approved.rmdir()
    before = tree(photographs)

    done = called(data_root, "run", "--approved", photographs)

    assert done.code == 0, done.text
    assert records(data_root)[0]["image_path"] == "data/approved/10_dog/a.png"
    assert trained(data_root) == IDS
    assert tree(photographs) == before
    assert not os.path.lexists(data_root.approved)
    for arguments in (["run"], ["run", "--approved", photographs]):
        assert "no Dagster run was started" in called(data_root, *arguments).text
    assert called(data_root, "validate", data_root.stage2_jsonl, "--image-check-mode", "open").code == 0
    assert f"images      {len(PATHS)}" in called(data_root, "scan").text


def test_folder_that_disappears_loses_nothing(data_root, tmp_path):
    """A disk that is not mounted must not look like a folder without images."""
    photographs = tmp_path / "photographs"
    fill(photographs, *PATHS)
    called(data_root, "run", "--approved", photographs)
    jsonl = data_root.stage2_jsonl.read_bytes()
    photographs.rename(tmp_path / "away")

    for command in ("run", "status", "problems", "scan"):
        done = called(data_root, command)
        assert (done.code, "approved: the recorded folder does not exist" in done.text) == (1, True), done.text

    assert data_root.stage2_jsonl.read_bytes() == jsonl
    (tmp_path / "away").rename(photographs)
    assert "no Dagster run was started" in called(data_root, "run").text


def test_folders_that_cannot_be_told_from_the_data_root_are_refused(data_root, tmp_path):
    """Spec: docs/spec/conventions.md#locations"""
    photos(data_root, "a")
    data_root.derived.mkdir()
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(data_root.derived)
    shown = {
        data_root.path: "is",
        data_root.path.parent: "contains",
        data_root.derived: "is",
        data_root.state / "x": "is part of",
        tmp_path / "link": "is",
        Path("nowhere"): "no such folder",
        tmp_path / "file": "is a file",
    }
    (data_root.state / "x").mkdir(parents=True)

    for folder, why in shown.items():
        done = called(data_root, "run", "--approved", folder)
        assert (done.code, why in done.text) == (2, True), (folder, done.text)

    assert called(data_root, "run").code == 0, "nothing was recorded"


def test_remedy_of_a_missing_caption_names_a_file_beside_the_image(data_root):
    fill(data_root.approved, "dogs/a.b.png", "ok.png")
    (data_root.approved / "dogs/a.b.txt").unlink()
    for name in ("x.txt", "y.txt"):
        (data_root.approved / name).write_text("of no image")

    done = called(data_root, "run")

    assert "write one line of text to a.b.txt beside the image" in done.text
    assert "2 caption files without an image" in done.text
    (data_root.approved / "dogs/a.b.txt").write_text("a dog")
    assert "missing_caption" not in called(data_root, "run").text
