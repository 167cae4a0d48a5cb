"""The check of the shards, against everything in the manifest. Spec: docs/spec/shards.md#index-and-manifest"""

import numpy as np
import pytest

from assets.bucket_shards import bucket_shards
from checks.bucket_shards import shards_valid
from imagemill.domain.buckets import BUCKETS
from tests.helpers.stage2 import stage2
from tests.helpers.wiring import check, checks_of, history, materialize

NAME = "bucket_shards:shards_valid"


@pytest.fixture
def instance():
    with history() as instance:
        yield instance


@pytest.fixture
def root(data_root, instance):
    """Two buckets, packed and checked."""
    stage2(data_root, "a", "b", size=(24, 24))
    stage2(data_root, "tall", size=(24, 36))
    result = materialize(data_root, instance, bucket_shards, shards_valid, keys=BUCKETS, deferred=True)
    assert result.success
    assert checks_of(result)[NAME].passed
    assert checks_of(result)[NAME].metadata["checked"].value == 3
    return data_root


def check_shards(root, instance):
    return check(root, instance, bucket_shards, shards_valid)[NAME]


def test_second_check_passes_without_reading(root, instance):
    evaluation = check_shards(root, instance)

    assert evaluation.passed
    assert evaluation.metadata["checked"].value == 3


@pytest.mark.parametrize("position", [600, 5000, 150_000])
def test_check_fails_if_a_byte_is_flipped(root, instance, position):
    tar = root.shards / "bucket_1024x1024" / "shard-000000.tar"
    data = bytearray(tar.read_bytes())
    data[position] ^= 1
    tar.write_bytes(data)

    evaluation = check_shards(root, instance)

    assert not evaluation.passed
    assert "checksum" in evaluation.description
    assert "bucket_1024x1024/shard-000000.tar" in evaluation.metadata["first findings"].value
    assert not check_shards(root, instance).passed, "and again: a broken set is not remembered as checked"


@pytest.mark.parametrize("name", ["manifest.json", "index.jsonl", "shard-000000.tar"])
def test_check_fails_if_a_file_is_missing(root, instance, name):
    (root.shards / "bucket_832x1216" / name).unlink()

    assert not check_shards(root, instance).passed


def test_unchanged_shards_pass_after_a_source_file_changed(root, instance):
    """The next packing detects stale samples; the check compares the set with its own manifest."""
    np.save(root.derived / "dinov3" / "a.npy", np.zeros(1024, np.float32))

    assert check_shards(root, instance).passed


def test_check_passes_without_shards(tmp_path, instance):
    from imagemill.domain.layout import DataRoot

    assert check_shards(DataRoot(tmp_path / "data"), instance).passed
