"""Rescaling of one image.

Spec: docs/spec/presets.md#preset-images, docs/spec/presets.md#exif-orientation
"""

import errno
import os
from contextlib import closing

import pytest

from imagemill.errors import DiskFull
from imagemill.pipeline.presets import rescale_worker
from imagemill.pipeline.presets.rescale_worker import RescaleJob, RescaleWorker
from tests.helpers.public import picture, put_image, raw_dataset

SIZES = [(100, 70), (96, 64), (50, 50)]
TARGETS = [(96, 64), (96, 64), (64, 64)]


@pytest.fixture
def dataset(tmp_path):
    dataset = raw_dataset(tmp_path / "d", SIZES)
    dataset.preset("p").images.mkdir(parents=True)
    return dataset


def run(dataset, names=("0.jpg", "1.jpg", "2.jpg"), library="pillow"):
    jobs = [
        RescaleJob(f"images/{name}", *sizes)
        for name, sizes in zip(names, zip(SIZES, TARGETS, strict=True), strict=False)
    ]
    with closing(RescaleWorker(raw=dataset.raw, preset=dataset.preset("p").path, library=library)) as worker:
        return list(worker.stream(jobs))


def image_names(dataset):
    return sorted(path.name for path in dataset.preset("p").images.iterdir())


def test_disk_without_links_gets_its_files_by_rename(dataset, monkeypatch):
    def no_links(*_):
        raise OSError(errno.EPERM, "no links here")

    monkeypatch.setattr(os, "link", no_links)

    assert [row.status for row in run(dataset)] == ["resized", "copied", "resized"]
    assert image_names(dataset) == ["0.jpg", "1.jpg", "2.jpg"]


@pytest.mark.parametrize("links", [True, False], ids=["links", "no links"])
def test_image_that_appears_meanwhile_is_not_replaced(dataset, monkeypatch, links):
    theirs = dataset.preset("p").images / "0.jpg"
    flush = rescale_worker.flush_files

    def appears(paths):
        theirs.write_bytes(b"theirs")
        return flush(paths)

    monkeypatch.setattr(rescale_worker, "flush_files", appears)
    if not links:
        monkeypatch.setattr(os, "link", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOTSUP, "no links")))

    rows = run(dataset)

    assert {row.name: row.reason for row in rows if row.reason} == {"images/0.jpg": "appeared"}
    assert theirs.read_bytes() == b"theirs"
    assert image_names(dataset) == ["0.jpg", "1.jpg", "2.jpg"]


def test_image_with_the_same_bytes_that_appears_meanwhile_is_taken(dataset, monkeypatch):
    """A worker of a killed run may still be finishing its batch during the next run."""
    rows = run(dataset)
    before = (dataset.preset("p").images / "0.jpg").read_bytes()
    for row in rows:
        (dataset.preset("p").path / row.name).unlink()
    flush = rescale_worker.flush_files

    def appears(paths):
        (dataset.preset("p").images / "0.jpg").write_bytes(before)
        return flush(paths)

    monkeypatch.setattr(rescale_worker, "flush_files", appears)

    assert [row.status for row in run(dataset)] == ["adopted", "copied", "resized"]


def test_disk_that_is_full_ends_the_stream_without_a_partial_file(dataset, monkeypatch):
    def full(paths):
        return {path: OSError(errno.ENOSPC, "No space left on device") for path in paths}

    monkeypatch.setattr(rescale_worker, "flush_files", full)

    with pytest.raises(DiskFull):
        run(dataset)

    assert [name for name in image_names(dataset) if not name.startswith(".tmp-")] == []


def test_file_that_the_disk_does_not_give_fails_alone(dataset, monkeypatch):
    read = rescale_worker._read

    def broken(path):
        if path.name == "1.jpg":
            raise OSError(errno.EIO, "Input/output error")
        return read(path)

    monkeypatch.setattr(rescale_worker, "_read", broken)

    rows = {row.name: row for row in run(dataset)}

    assert (rows["images/1.jpg"].status, rows["images/1.jpg"].reason) == ("failed", "os_error")
    assert image_names(dataset) == ["0.jpg", "2.jpg"]


def test_stream_that_is_abandoned_leaves_no_temporary(dataset):
    put_image(dataset, "bad.jpg", b"")
    jobs = [RescaleJob("images/0.jpg", SIZES[0], TARGETS[0]), RescaleJob("images/bad.jpg", (9, 9), (64, 64))]
    worker = RescaleWorker(raw=dataset.raw, preset=dataset.preset("p").path, library="pillow")

    rows = worker.stream(jobs)
    assert next(rows).status == "refused"
    rows.close()

    assert image_names(dataset) == []


def test_batches_are_named_as_they_fill(dataset, monkeypatch):
    """The work lost when a run is killed is bounded."""
    monkeypatch.setattr(rescale_worker, "BATCH_FILES", 2)
    jobs = [RescaleJob(f"images/{n}.jpg", SIZES[n], TARGETS[n]) for n in range(3)]
    rows = RescaleWorker(raw=dataset.raw, preset=dataset.preset("p").path, library="pillow").stream(jobs)

    next(rows)

    assert image_names(dataset) == ["0.jpg", "1.jpg"]
    rows.close()


def test_torch_has_its_threads_back_when_the_worker_is_done(dataset):
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        worker = RescaleWorker(raw=dataset.raw, preset=dataset.preset("p").path, library="torch")
        assert torch.get_num_threads() == 1
        worker.close()
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_torch_and_pillow_make_pictures_of_one_size(dataset):
    from PIL import Image

    assert {row.status for row in run(dataset, library="torch")} == {"resized", "copied"}
    assert [Image.open(dataset.preset("p").images / f"{n}.jpg").size for n in range(3)] == TARGETS


@pytest.mark.parametrize("name", ["x" * 300 + ".jpg", "0.jpg/1.jpg"])
def test_name_that_no_disk_takes_is_a_row(dataset, name):
    (row,) = run(dataset, [name])
    assert row.status in {"failed", "refused"}


def test_declared_size_must_be_the_files(dataset):
    put_image(dataset, "0.jpg", picture(70, 100))
    (row,) = run(dataset, ["0.jpg"])
    assert (row.reason, "EXIF" in row.message) == ("size_mismatch", False)
