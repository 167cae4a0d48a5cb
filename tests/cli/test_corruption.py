"""Each kind of file is truncated, flipped, deleted or replaced by an older copy: the report is checked, and the remedy.

damage ──> verify names the file ──> the remedy of its first finding is executed ──> verify passes, bytes are as before
"""

import shutil
from contextlib import nullcontext

import pytest

from imagemill.domain.embedding_specs import DINOV3, T5, VAE
from imagemill.domain.layout import DataRoot
from imagemill.errors import ImagemillError
from imagemill.reading import ShardDataset
from tests.helpers.commands import called, remedies
from tests.helpers.rot import flip, rot, truncate
from tests.helpers.stage2 import photos, picture
from tests.helpers.stubs import stub_captioner
from tests.helpers.wiring import stub_every_kind

BUCKET = "bucket_1024x1024"
OLD, NEW = "the first caption", "another caption"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A complete data root of three images after one caption changed, with a copy of the state before."""
    folder = tmp_path_factory.mktemp("corruption")
    root = DataRoot(folder / "data")
    root.approved.mkdir(parents=True)
    with pytest.MonkeyPatch.context() as patch:
        stub_every_kind(patch)
        stub_captioner(patch.setattr)
        photos(root, "a", "b", "c", size=(24, 24))
        (root.approved / "b.txt").write_text(OLD)
        assert called(root, "run").code == 0
        shutil.copytree(root.path, folder / "older")
        (root.approved / "b.txt").write_text(NEW)
        assert called(root, "run").code == 0
        assert called(root, "verify").code == 0
    shutil.copytree(root.path, folder / "good")
    return root


@pytest.fixture
def root(made, monkeypatch):
    """The complete data root. Changes made by a test are undone afterwards by copying, and the ledger is updated."""
    stub_every_kind(monkeypatch)
    stub_captioner(monkeypatch.setattr)
    good = contents(made)
    yield made
    if contents(made) == good:
        return
    shutil.rmtree(made.path)
    shutil.copytree(made.path.parent / "good", made.path)
    assert called(made, "run").code == 0


def contents(root):
    """Return the bytes of all output files, except SQLite's index, whose rows `verify` compares."""
    folders = [root.derived, root.shards]
    files = [path for folder in folders for path in sorted(folder.rglob("*")) if path.is_file()]
    return {str(path.relative_to(root.path)): path.read_bytes() for path in files if path.suffix != ".sqlite"}


def older(path):
    """Replace a file by its version before the caption changed."""
    root = next(parent for parent in path.parents if parent.name == "data")
    shutil.copyfile(root.parent / "older" / path.relative_to(root), path)


def deleted(path):
    path.unlink()


DAMAGES = {"truncated": truncate, "flipped": flip, "deleted": deleted, "older": older}

# File of a set → name in the finding of verify, by kind of damage.
SET_FILES = {
    "shard-000000.tar": {
        "truncated": "checksum",
        "flipped": "checksum",
        "deleted": "missing_shard",
        "older": "checksum",
    },
    "index.jsonl": {"truncated": "index", "flipped": "index", "deleted": "index", "older": "live_samples"},
    "manifest.json": {"truncated": "manifest", "flipped": "manifest", "deleted": "manifest", "older": "live_samples"},
    "shard-000000.tar.idx": dict.fromkeys(("truncated", "flipped", "deleted"), "energon"),
    ".nv-meta/split.yaml": dict.fromkeys(("truncated", "flipped", "deleted"), "energon"),
    ".nv-meta/index.sqlite": dict.fromkeys(("truncated", "deleted"), "energon"),
    ".nv-meta/index.uuid": dict.fromkeys(("truncated", "flipped", "deleted"), "energon"),
}
CASES = [(name, damage, rule) for name, damages in SET_FILES.items() for damage, rule in damages.items()]


@pytest.mark.parametrize(("name", "damage", "rule"), CASES, ids=[f"{name} {damage}" for name, damage, _ in CASES])
def test_damaged_file_of_a_set_is_named_and_the_remedy_repairs_it(root, name, damage, rule):
    before = contents(root)
    DAMAGES[damage](root.shards / BUCKET / name)

    verified = called(root, "verify")
    assert verified.code == 1
    assert f": {rule}: " in verified.text
    assert BUCKET in verified.text
    for command in remedies(verified.text):
        assert called(root, *command).code == 0, command

    assert called(root, "verify").code == 0
    assert contents(root) == before


def test_flipped_byte_of_a_tar_with_its_old_time_is_found_by_verify(root):
    """The check after a run compares size, time and inode; verify reads everything."""
    before = contents(root)
    rot(root.shards / BUCKET / "shard-000000.tar", -3000)
    assert called(root, "run").code == 0

    verified = called(root, "verify")
    assert ": checksum: " in verified.text
    for command in remedies(verified.text):
        assert called(root, *command).code == 0

    assert called(root, "verify").code == 0
    assert contents(root) == before


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("manifest.json", "truncated"),
        ("manifest.json", "deleted"),
        ("manifest.json", "flipped"),
        ("shard-000000.tar", "truncated"),
    ],
)
def test_run_refuses_an_inconsistent_set_and_names_the_remedy(root, name, damage):
    before = contents(root)
    DAMAGES[damage](root.shards / BUCKET / name)

    done = called(root, "run")
    assert done.code == 1
    assert "imagemill shards --overwrite" in done.text

    assert called(root, "shards", "--overwrite").code == 0
    assert contents(root) == before


def test_run_rewrites_a_set_with_a_missing_tar(root):
    before = contents(root)
    (root.shards / BUCKET / "shard-000000.tar").unlink()

    assert called(root, "run").code == 0
    assert contents(root) == before


def test_status_names_a_set_with_a_damaged_manifest(root):
    truncate(root.shards / BUCKET / "manifest.json")

    done = called(root, "status", "--fresh")

    assert done.code == 0
    assert f"{BUCKET}/manifest.json was not written by imagemill" in done.text


@pytest.mark.parametrize("damage", ["truncated", "flipped", "deleted"])
def test_next_run_rewrites_a_damaged_card(root, damage):
    card = root.shards / "README.md"
    before = card.read_bytes()
    DAMAGES[damage](card)

    assert called(root, "run").code == 0
    assert card.read_bytes() == before


@pytest.mark.parametrize("left", ["in both", "in none"])
def test_run_repairs_an_image_left_in_two_buckets_or_none_by_a_kill(root, left):
    """The image changed its bucket, and only one of the two folders was exchanged."""
    picture(root.approved / "b.png", size=(32, 24), seed=7)
    assert called(root, "run").code == 0
    before = contents(root)
    if left == "in both":
        shutil.rmtree(root.shards / BUCKET)
        shutil.copytree(root.path.parent / "good" / "shards" / BUCKET, root.shards / BUCKET)
    else:
        shutil.rmtree(root.shards / "bucket_1216x832")

    verified = called(root, "verify")
    assert verified.code == 1
    assert f"{'live_twice' if left == 'in both' else 'unpacked'}: b" in verified.text
    with pytest.raises(ImagemillError) if left == "in both" else nullcontext():
        ShardDataset(root.shards, 1, allow_preview=True)
    assert called(root, "run").code == 0

    assert called(root, "verify").code == 0
    assert contents(root) == before


# ---- npy files


@pytest.mark.parametrize("spec", [DINOV3, VAE, T5], ids=lambda spec: spec.kind)
@pytest.mark.parametrize("damage", ["truncated", "deleted"])
def test_truncated_or_missing_npy_file_is_regenerated(root, spec, damage):
    before = contents(root)
    DAMAGES[damage](root.derived / spec.folder / "b.npy")

    verified = called(root, "verify")
    assert verified.code == 1
    assert spec.folder in verified.text
    assert called(root, "run").code == 0

    assert called(root, "verify").code == 0
    assert contents(root) == before


@pytest.mark.parametrize("spec", [DINOV3, VAE, T5], ids=lambda spec: spec.kind)
def test_damaged_npy_file_is_named_and_the_remedy_restores_it_from_the_shard(root, spec):
    """Size, time and inode are unchanged. The shard contains the last intact copy."""
    before = contents(root)
    rot(root.derived / spec.folder / "b.npy")
    tar = (root.shards / BUCKET / "shard-000000.tar").read_bytes()

    verified = called(root, "verify")
    assert verified.code == 1
    assert f"{spec.folder}/b.npy: damaged: b" in verified.text
    assert ": verbatim: " not in verified.text
    assert "shards --overwrite" not in verified.text
    noted, run = remedies(verified.text)
    assert called(root, *noted).code == 1
    assert "b: failed: damaged: " in called(root, "status").text
    done = called(root, *run)
    assert (done.code, "1 restored" in done.text) == (0, True)

    assert called(root, "verify").code == 0
    assert contents(root) == before
    assert (root.shards / BUCKET / "shard-000000.tar").read_bytes() == tar


def test_damaged_npy_file_is_never_packed_and_its_shard_is_kept(root):
    """An earlier remedy of verify overwrote the shards, which would have lost the intact copy."""
    before = contents(root)
    rot(root.derived / VAE.folder / "b.npy")

    packed = called(root, "shards", "--overwrite")
    assert packed.code == 1
    assert "vae_latents/b.npy" in packed.text
    assert "imagemill run" in packed.text
    tar = f"shards/{BUCKET}/shard-000000.tar"
    assert contents(root)[tar] == before[tar]

    assert called(root, "run").code == 0
    assert called(root, "verify").code == 0
    assert contents(root) == before


def test_older_npy_file_is_adopted_and_packed(root):
    """A valid file that is not in the ledger is adopted, because another program may have made it."""
    older(root.derived / T5.folder / "b.npy")
    file = (root.derived / T5.folder / "b.npy").read_bytes()

    verified = called(root, "verify")
    assert ": verbatim: b t5h.npy: " in verified.text
    assert called(root, "run").code == 0

    assert called(root, "verify").code == 0
    assert file in (root.shards / BUCKET / "shard-000000.tar").read_bytes()


@pytest.mark.parametrize("damage", ["truncated", "deleted", "older"])
def test_damaged_records_are_named_and_rewritten_by_a_run(root, damage):
    """The ledger contains their values. Captions with a sidecar are read from the sidecar.

    An older file is a valid file with other captions, so `verify` cannot distinguish it from an edit.
    """
    before = contents(root)
    DAMAGES[damage](root.stage2_jsonl)

    verified = called(root, "verify")
    assert verified.code == (damage != "older")
    assert damage == "older" or root.stage2_jsonl.name in verified.text
    done = called(root, "run")

    assert done.code == 0, done.text
    assert called(root, "verify").code == 0
    assert contents(root) == before


@pytest.mark.parametrize("damage", ["truncated", "flipped", "deleted", "older"])
@pytest.mark.parametrize("folder", ["derived", "shards"])
def test_next_run_rewrites_a_damaged_second_copy(root, folder, damage):
    before = contents(root)
    copy = getattr(root, folder) / ".imagemill.json"
    DAMAGES[damage](copy)

    assert called(root, "stage2").code == 0
    assert called(root, "run").code == 0

    assert contents(root) == before
