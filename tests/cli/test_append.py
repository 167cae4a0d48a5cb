"""Growing sets of shards on the command line: --append, withdraw, --repack. Spec: docs/spec/shards.md#appending"""

import os

import pytest

from imagemill.domain.layout import DataRoot
from tests.helpers.product import imagemill, photos, snapshot


def product(root, *arguments, code=0):
    done = imagemill(*arguments, "--data-root", root.path, stub=True)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = DataRoot(tmp_path_factory.mktemp("append") / "data")
    photos(root.approved, 4)
    product(root, "run")
    return root


def tars(root):
    return {path: content for path, content in snapshot(root.shards).items() if path.endswith(".tar")}


def test_set_supports_append_withdraw_and_repack(root):
    """Each step keeps the earlier files unchanged, until the last one repacks them into a new set."""
    first = tars(root)
    photos(root.approved, 6)
    (root.approved / "photo0001.txt").write_text("edited")
    product(root, "stage2")

    said = product(root, "shards", "--append")
    assert "written_samples=3 written_shards=1" in said
    assert "no longer part of the set: 1" in said, "readers that ignore the index still see the old one"
    assert first.items() <= tars(root).items()
    assert "6 samples in 2 shards" in product(root, "status")
    assert product(root, "verify")

    said = product(root, "withdraw", "photo0002", "photo0005")
    assert "withdrawn: photo0002, photo0005" in said
    assert "written_samples=0 written_shards=0" in said
    assert "4 samples in 2 shards" in product(root, "status")
    assert "withdraw --restore photo0002" in product(root, "explain", "photo0002")
    assert product(root, "verify")
    before = tars(root)
    product(root, "withdraw", "--restore", "photo0005")
    assert tars(root) == before
    assert "5 samples in 2 shards" in product(root, "status")

    said = product(root, "shards", "--repack")
    assert "written_samples=5 written_shards=1" in said
    assert "count no more" not in said
    assert product(root, "verify")
    assert "nothing to do" in product(root, "run")


def test_restored_sample_without_a_bucket_is_reported_as_unpacked(data_root):
    """`--restore` undoes the withdrawal. Samples that it cannot bring back are named with the remedy."""
    photos(data_root.approved, 1)
    product(data_root, "run")
    product(data_root, "withdraw", "photo0000")
    assert not list(data_root.shards.glob("bucket_*"))

    said = product(data_root, "withdraw", "--restore", "photo0000")

    assert "not in any shard now: photo0000; `imagemill shards --append`" in said
    assert "written_samples=1" in product(data_root, "shards", "--append")


def test_sample_is_withdrawn_while_a_kind_is_regenerated(data_root):
    """A withdrawal takes effect at once, even if other work is unfinished."""
    photos(data_root.approved, 3)
    product(data_root, "run")
    data_root.config_file.write_text('{"encoders": {"vae_latents": {"model": "newer"}}}')
    product(data_root, "stage2", "--pass", "vae", "--regenerate", "vae", "--limit", "1")

    said = product(data_root, "withdraw", "photo0001")

    assert "samples in the tars that are no longer part of the set: 1" in said
    assert "counts no more withdrawn" in product(data_root, "explain", "photo0001")
    for path in (data_root.derived / "vae_latents").iterdir():
        os.utime(path)
    product(data_root, "withdraw", "--restore", "photo0001")
    assert "vae_latents 3 made" in product(data_root, "stage2"), "none is taken for new that is not in the ledger"


def test_unknown_id_withdraws_nothing(root):
    before = snapshot(root.shards)

    assert "no image unknown" in product(root, "withdraw", "photo0000", "unknown", code=1)

    assert snapshot(root.shards) == before


def test_contradictory_modes_are_refused(root):
    assert "--overwrite and --append contradict" in product(root, "shards", "--overwrite", "--append", code=2)
