"""Updated sets of shards on the command line: run, --append, withdraw, --repack.

Spec: docs/spec/shards.md#incremental-updates, docs/spec/shards.md#withdrawals
"""

import os

import pytest

from imagemill.domain.layout import DataRoot
from imagemill.formats.tar import read_shard
from tests.helpers.product import photos, product, snapshot


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = DataRoot(tmp_path_factory.mktemp("append") / "data")
    photos(root.approved, 4)
    root.config_file.write_text("shard_size: 2\n")
    product(root, "run")
    return root


def tars(root):
    return {path: content for path, content in snapshot(root.shards).items() if path.endswith(".tar")}


def by_tar(root):
    """Ids by tar, as a reader that ignores the index finds them."""
    (folder,) = root.shards.glob("bucket_*")
    return [" ".join(key[-1] for key, _ in read_shard(tar)) for tar in sorted(folder.glob("*.tar"))]


def test_set_supports_append_withdraw_and_repack(root):
    """Each step keeps the tars without a change, as the same files."""
    before = tars(root)
    photos(root.approved, 6)
    (root.approved / "photo0003.txt").write_text("edited")
    product(root, "stage2")

    said = product(root, "shards", "--append")
    assert "1 tar kept, 2 written (" in said
    assert "samples: 2 added, 1 changed, 0 removed" in said
    assert "written_samples=4 written_shards=2" in said
    assert by_tar(root) == ["0 1", "2 3", "4 5"]
    assert len(before.items() & tars(root).items()) == 1
    assert "6 samples in 3 shards" in product(root, "status")
    assert product(root, "verify")

    said = product(root, "withdraw", "photo0002", "photo0005")
    assert "withdrawn: photo0002, photo0005" in said
    assert "samples: 0 added, 0 changed, 2 removed" in said
    assert by_tar(root) == ["0 1", "3", "4"]
    assert "4 samples in 3 shards" in product(root, "status")
    assert "withdraw --restore photo0002" in product(root, "explain", "photo0002")
    assert product(root, "verify")
    product(root, "withdraw", "--restore", "photo0005")
    assert by_tar(root) == ["0 1", "3", "4 5"]

    said = product(root, "shards", "--repack")
    assert "written_samples=5 written_shards=3" in said
    assert by_tar(root) == ["0 1", "3 4", "5"]
    assert product(root, "verify")
    assert "nothing to do" in product(root, "run")


def test_run_updates_only_tars_with_a_change_and_says_so(data_root):
    photos(data_root.approved, 5)
    data_root.config_file.write_text("shard_size: 2\n")
    product(data_root, "run")
    before = tars(data_root)
    photos(data_root.approved, 6)
    (data_root.approved / "photo0000.txt").write_text("edited")

    said = product(data_root, "run")

    assert "  shards     1 tar kept, 2 written (" in said
    assert "samples: 1 added, 1 changed, 0 removed" in said
    assert len(before.items() & tars(data_root).items()) == 1
    assert by_tar(data_root) == ["0 1", "2 3", "4 5"]
    assert product(data_root, "verify")


def test_reason_for_packing_a_set_from_scratch_is_printed(data_root):
    photos(data_root.approved, 3)
    product(data_root, "run")

    photos(data_root.approved, 4)
    product(data_root, "stage2")
    said = product(data_root, "shards", "--append", "--shard-size", 2)

    assert "1 set packed from scratch: its parameters changed" in said


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

    assert "withdrawn: photo0001" in said
    assert by_tar(data_root) == ["0 2"]
    assert "withdraw --restore photo0001" in product(data_root, "explain", "photo0001")
    for path in (data_root.derived / "vae_latents").iterdir():
        os.utime(path)
    said = product(data_root, "withdraw", "--restore", "photo0001")
    assert "not in any shard now: photo0001" in said
    assert "vae_latents 3 made" in product(data_root, "stage2"), "none is taken for new that is not in the ledger"


def test_unknown_id_withdraws_nothing(root):
    before = snapshot(root.shards)

    assert "no image unknown" in product(root, "withdraw", "photo0000", "unknown", code=1)

    assert snapshot(root.shards) == before


def test_contradictory_modes_are_refused(root):
    assert "--overwrite and --append contradict" in product(root, "shards", "--overwrite", "--append", code=2)
