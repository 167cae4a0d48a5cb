"""Shares of one folder of images in data roots of their own, read as one set.

Spec: docs/spec/stage2.md#shares, docs/spec/shards.md#several-places
"""

import json
import os
import shutil

import pytest

from imagemill.domain.embedding_specs import embedding_specs
from imagemill.domain.layout import DataRoot
from imagemill.domain.shares import ImageShare
from imagemill.reading import ShardDataset, ShardSet
from tests.helpers.commands import called
from tests.helpers.look import page, viewing
from tests.helpers.stage2 import picture
from tests.helpers.wiring import stub_every_kind

TOTAL = 3
SIZES = [(24, 24), (36, 24), (24, 36)]


@pytest.fixture(autouse=True)
def stubs(monkeypatch):
    stub_every_kind(monkeypatch)


def photographs(folder, count):
    folder.mkdir(parents=True)
    for number in range(count):
        path = folder / f"photo{number:03d}.png"
        picture(path, size=SIZES[number % len(SIZES)])
        if number % 10 != 7:
            path.with_suffix(".txt").write_text(f"photograph {number}")
    rows = [{"file_name": f"photo{n:03d}.png", "text": f"row {n}"} for n in (*range(7, count, 10), count + 5)]
    (folder / "metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "notes.pdf").write_text("not an image")
    return folder


def records(root):
    return root.stage2_jsonl.read_text().splitlines()


def root_at(path):
    path.mkdir(parents=True)
    return DataRoot(path)


def ids_of(batches):
    return [image_id for batch in batches for image_id in batch["image_id"]]


def test_three_shares_of_300_images_are_read_as_one(tmp_path):
    """As the tasks of a job array run them: one after the other here, in roots with equal base names."""
    images = photographs(tmp_path / "images", 300)
    whole = root_at(tmp_path / "whole" / "data")
    assert called(whole, "run", "--approved", images).code == 0
    roots = [root_at(tmp_path / f"task{number}" / "data") for number in range(TOTAL)]
    for number, root in enumerate(roots):
        done = called(root, "run", "--approved", images, "--share", f"{number}/{TOTAL}")

        assert done.code == 0, done.text
        assert f"share      {number}/{TOTAL}; " in done.text

    assert sorted(line for root in roots for line in records(root)) == records(whole)
    statuses = [json.loads(called(root, "status", "--json").text) for root in roots]
    listed = len(os.listdir(images)) - 1  # the metadata file belongs to all
    assert [status["share"] for status in statuses] == ["0/3", "1/3", "2/3"]
    assert sum(listed - status["elsewhere"] for status in statuses) == listed
    problems = [problem for status in statuses for problem in status["problems"]]
    of_whole = json.loads(called(whole, "status", "--json").text)["problems"]
    assert sorted(each["item"] for each in problems) == sorted(each["item"] for each in of_whole)

    folders = [root.shards for root in roots]
    options = {"batch_size": 4, "allow_preview": True, "members": ("json", "vae")}
    seen = ids_of(ShardDataset(folders, **options))
    assert sorted(seen) == sorted(ShardSet.open(whole.shards, allow_preview=True))
    dataset = ShardDataset(folders, **options)
    batches = iter(dataset)
    first = ids_of(next(batches) for _ in range(17))
    again = ShardDataset(folders, **options)
    again.load_state_dict(json.loads(json.dumps(dataset.state_dict())))
    assert first + ids_of(again) == seen


def test_share_of_the_configuration_file(tmp_path):
    images = photographs(tmp_path / "images", 20)
    root = root_at(tmp_path / "data")
    root.config_file.write_text("share: 1/3\n")

    done = called(root, "run", "--approved", images)

    assert done.code == 0, done.text
    share = ImageShare(1, 3)
    expected = [f"photo{n:03d}" for n in range(20) if share.has(f"photo{n:03d}")]
    assert [json.loads(line)["image_id"] for line in records(root)] == expected
    with viewing(root) as client:
        assert "Share 1/3 of the images" in page(client, "/")


def test_folder_of_a_new_root_has_to_exist(tmp_path):
    images = photographs(tmp_path / "images", 2)

    done = called(DataRoot(tmp_path / "data"), "run", "--approved", images, "--share", "0/2")

    assert done.code == 1
    assert done.text.rstrip().endswith("do:    check --data-root; for a new one, create the folder")
    assert not (tmp_path / "data").exists()


def test_share_is_remembered(tmp_path):
    images = photographs(tmp_path / "images", 10)
    root = root_at(tmp_path / "data")
    called(root, "run", "--approved", images, "--share", "1/3")
    before = records(root)
    for number in range(10, 20):
        picture(images / f"photo{number:03d}.png", size=(24, 24))
        (images / f"photo{number:03d}.txt").write_text(f"photograph {number}")

    done = called(root, "run")

    assert done.code == 0, done.text
    found = [json.loads(line)["image_id"] for line in records(root)]
    assert len(found) > len(before)
    assert all(ImageShare(1, 3).has(image_id) for image_id in found)
    text = called(root, "run", "--share", "1/3").text
    assert "nothing" in text, text


@pytest.mark.parametrize("given", [["--share", "2/3"], ["--share", "1/4"]])
def test_another_share_of_an_existing_root_is_refused(tmp_path, given):
    images = photographs(tmp_path / "images", 10)
    root = root_at(tmp_path / "data")
    called(root, "run", "--approved", images, "--share", "1/3")
    before = records(root)

    done = called(root, "run", *given)

    assert done.code == 2
    assert "this data root has the share 1/3" in done.text
    assert records(root) == before
    root.config_file.write_text(f"share: {given[1]}\n")
    assert "this data root has the share 1/3" in called(root, "run").text
    root.config_file.write_text("share: 1/3\n")
    assert called(root, "run").code == 0


def test_share_of_a_root_with_all_images_is_refused(tmp_path):
    images = photographs(tmp_path / "images", 10)
    root = root_at(tmp_path / "data")
    called(root, "run", "--approved", images)

    done = called(root, "run", "--share", "0/2")

    assert done.code == 2
    assert "this data root has all images" in done.text


def test_share_that_contradicts_the_configuration_file(tmp_path):
    images = photographs(tmp_path / "images", 10)
    root = root_at(tmp_path / "data")
    root.config_file.write_text("share: 1/3\n")

    done = called(root, "run", "--approved", images, "--share", "0/3")

    assert done.code == 2
    assert "--share 0/3 contradicts share: 1/3" in done.text


@pytest.mark.parametrize("share", ["3/3", "1", "one/three", "0/0", "-1/3"])
def test_what_is_no_share(tmp_path, share):
    images = photographs(tmp_path / "images", 2)
    root = root_at(tmp_path / "data")

    done = called(root, "run", "--approved", images, f"--share={share}")

    assert done.code == 2
    assert f"--share {share} is no share" in done.text
    assert not root.state.exists()
    root.config_file.write_text(f"share: '{share}'\n")
    done = called(root, "run", "--approved", images)
    assert done.code == 2
    assert f"imagemill.yaml line 1: share '{share}' is no share" in done.text


def test_data_root_that_was_saved_and_restored_continues(tmp_path):
    """As in examples/cluster/slurm-array.sbatch on a node whose disk was emptied: every file has another inode."""
    images = photographs(tmp_path / "images", 20)
    root = root_at(tmp_path / "data")
    called(root, "run", "--approved", images, "--share", "1/3")
    before = records(root)
    shutil.copytree(root.path, tmp_path / "saved", symlinks=True)
    shutil.rmtree(root.path)
    shutil.copytree(tmp_path / "saved", root.path, symlinks=True)

    done = called(root, "run", "--approved", images, "--share", "1/3")

    assert done.code == 0, done.text
    assert done.text.count(" 0 made in 0 model calls") == len(embedding_specs()), done.text
    assert records(root) == before


@pytest.mark.parametrize("command", [None, ["repair", "--apply"]])
def test_share_survives_the_loss_of_the_ledger(tmp_path, command):
    images = photographs(tmp_path / "images", 20)
    root = root_at(tmp_path / "data")
    called(root, "run", "--approved", images, "--share", "1/3")
    before = records(root)
    shutil.rmtree(root.state)

    if command:
        assert called(root, *command).code == 0
    refused = called(root, "run", "--approved", images, "--share", "2/3")
    done = called(root, "run", "--approved", images)

    assert (refused.code, done.code) == (2, 0), refused.text + done.text
    assert "this data root has the share 1/3" in refused.text
    assert records(root) == before


def test_image_of_another_share_is_named_as_such(tmp_path):
    images = photographs(tmp_path / "images", 20)
    root = root_at(tmp_path / "data")
    called(root, "run", "--approved", images, "--share", "1/3")
    ids = [f"photo{n:03d}" for n in range(20)]
    other = next(image_id for image_id in ids if ImageShare(2, 3).has(image_id))

    for given in (other, f"{other}.png"):
        done = called(root, "explain", given)
        assert done.code == 1
        assert f"'{given}' belongs to another share" in done.text
        assert "its share is 2/3; this data root has 1/3" in done.text


def test_one_list_of_withdrawals_for_all_shares(tmp_path):
    images = photographs(tmp_path / "images", 20)
    roots = [root_at(tmp_path / f"task{number}") for number in range(TOTAL)]
    for number, root in enumerate(roots):
        called(root, "run", "--approved", images, "--share", f"{number}/{TOTAL}")
    listed = [f"photo{n:03d}" for n in range(0, 12, 2)]
    (tmp_path / "list.txt").write_text("\n".join(listed))

    for number, root in enumerate(roots):
        done = called(root, "withdraw", "--from", tmp_path / "list.txt")
        assert done.code == 0, done.text
        others = sum(not ImageShare(number, TOTAL).has(image_id) for image_id in listed)
        assert f"left out: {others} images of other shares than {number}/{TOTAL}" in done.text

    left = ShardSet.open([root.shards for root in roots], allow_preview=True)
    assert sorted(left) == [f"photo{n:03d}" for n in range(20) if f"photo{n:03d}" not in listed]
    own = [called(root, "withdraw", "absent", listed[0]).code for root in roots]
    assert sorted(own) == [0, 0, 1]  # the share that the unknown id would have


def test_share_of_a_folder_in_the_report_of_scan(tmp_path):
    images = photographs(tmp_path / "images", 30)
    root = root_at(tmp_path / "data")
    root.config_file.write_text("share: 0/3\n")

    report = json.loads(called(root, "scan", images, "--json").text)

    assert report["share"] == "0/3"
    counted = sum(report["counts"].values()) - 1  # the metadata file belongs to all
    assert counted + report["elsewhere"] == len(os.listdir(images)) - 1
    assert f"share       0/3; {report['elsewhere']} files of other shares left out" in called(root, "scan", images).text
