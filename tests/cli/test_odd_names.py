"""Unusual names: unicode, spaces, dots, percent signs, great length. Each image is packed under its true id."""

import shutil

import dagster as dg
import numpy as np
import webdataset

from dagster_project.internals.instance import open_instance
from imagemill.domain.embedding_specs import embedding_specs
from imagemill.domain.ids import id_of_member_key
from imagemill.domain.layout import DataRoot
from tests.helpers.product import imagemill, photos

NAMES = [
    "ünï cödé 图片",
    "two.dots.here",
    "100%2E sure",
    "spaces  and\u3000wide ones",
    "emoji 🐈",
    "-dash",
    "'quotes\"",
    "x" * 180,
    "图" * 80,
]


def test_images_with_unusual_names_are_packed_under_their_true_ids(data_root):
    """Spec: docs/spec/shards.md#members"""
    photos(data_root.approved, len(NAMES))
    for n, name in enumerate(NAMES):
        for suffix in (".jpg", ".txt"):
            (data_root.approved / f"photo{n:04d}{suffix}").rename(data_root.approved / f"{name}{suffix}")

    done = imagemill("run", "--data-root", data_root.path, stub=True)

    assert done.returncode == 0, done.stdout + done.stderr
    tars = sorted(str(tar) for tar in data_root.shards.glob("*/shard-*.tar"))
    samples = list(webdataset.WebDataset(tars, shardshuffle=False, empty_check=False).decode())
    assert sorted(sample["json"]["image_id"] for sample in samples) == sorted(NAMES)
    for sample in samples:
        image_id = sample["json"]["image_id"]
        assert id_of_member_key(sample["__key__"]) == image_id
        for spec in embedding_specs():
            assert np.array_equal(sample[spec.member], np.load(data_root.derived / spec.folder / f"{image_id}.npy"))
    assert imagemill("verify", "--data-root", data_root.path).returncode == 0
    assert "bucket_" in imagemill("explain", "--data-root", data_root.path, "--", "-dash").stdout


def test_copied_data_root_keeps_its_provenance_and_regenerates_nothing(data_root, tmp_path):
    """Only inodes and times differ: nothing is stale, the models are known, and a new history lists every file."""
    photos(data_root.approved, 6)
    imagemill("run", "--data-root", data_root.path, stub=True)
    copy = tmp_path / "copy" / "data"
    shutil.copytree(data_root.path, copy, ignore=shutil.ignore_patterns(".dagster"))

    done = imagemill("run", "--data-root", copy, stub=True)

    assert done.returncode == 0, done.stdout + done.stderr
    assert " 0 made in 0 model calls" in done.stdout
    assert "dinov3_npy 0 made" in done.stdout
    manifest = next(copy.glob("shards/*/manifest.json")).read_text()
    assert '"unknown_maker": 0' in manifest
    with open_instance(DataRoot(copy)) as instance:
        for spec in embedding_specs():
            assert len(instance.get_materialized_partitions(dg.AssetKey(spec.kind))) == 6
    again = imagemill("run", "--data-root", copy, stub=True)
    assert "nothing to do" in again.stdout
