"""A data root with CLIP text states: a kind listed twice under two names, each with two arrays in one file.

Spec: docs/spec/stage2.md#kinds, docs/spec/stage2.md#clip-text
"""

import json
import os
import shutil

import numpy as np
import pytest

from imagemill.domain.layout import DataRoot
from imagemill.reading import ShardDataset, ShardSet
from tests.cli.test_text_encoder import product
from tests.helpers.product import photos

KINDS = ["vae_latents", {"clip_l": "clip_text"}, {"clip_g": "clip_text"}]
MEMBERS = ["json", "vae.npy", "clip_l.npy", "clip_l_pooled.npy", "clip_g.npy", "clip_g_pooled.npy", "t5m.npy"]
ENCODERS = {"clip_g": {"layer": "penultimate", "pooled": "projected"}}


def configure(root, kinds=KINDS, **encoders):
    root.config_file.write_text(json.dumps({"kinds": kinds, "encoders": ENCODERS | encoders}))


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    root = DataRoot(tmp_path_factory.mktemp("clip"))
    photos(root.approved, 3)
    configure(root)
    said = product(root, "run")
    return root, said


@pytest.fixture
def root(made, tmp_path):
    copy = DataRoot(tmp_path / "root")
    shutil.copytree(made[0].path, copy.path, copy_function=shutil.copy2, symlinks=True)
    return copy


def manifests(root):
    return [json.loads(path.read_text()) for path in sorted(root.shards.glob("*/manifest.json"))]


def test_both_names_have_files_members_and_a_place_in_every_overview(made):
    root, said = made

    assert "clip_l     3 made" in said
    assert "clip_g     3 made" in said
    (manifest,) = manifests(root)
    assert manifest["members"] == MEMBERS
    assert {kind: entry.get("declared_as") for kind, entry in manifest["provenance"].items()} == {
        "vae_latents": None, "clip_l": "clip_text", "clip_g": "clip_text",
    }  # fmt: skip
    assert sorted(manifest["empty_captions"]) == ["clip_g", "clip_l"]
    assert "0 errors" in product(root, "verify")
    assert "nothing to do" in product(root, "run")
    assert "clip_g      3 done, 0 to do" in product(root, "status")
    assert "derived/clip_g/photo0000.npy" in product(root, "explain", "photo0000")
    card = (root.shards / "README.md").read_text()
    assert "| `clip_l.npy` | float16 | (77, 768) |" in card
    assert "| `clip_l_pooled.npy` | float16 | (768,) |" in card


def test_file_is_read_by_numpy_and_its_members_are_its_arrays(made):
    root, _ = made
    file = np.load(root.derived / "clip_g" / "photo0000.npy")
    sample = ShardSet.open(root.shards, allow_preview=True)["photo0000"]

    assert (file["hidden"].shape, file["pooled"].shape, file["hidden"].dtype) == ((77, 768), (768,), np.float16)
    assert np.array_equal(sample["clip_g"], file["hidden"])
    assert np.array_equal(sample["clip_g_pooled"], file["pooled"])
    other = np.load(root.derived / "clip_l" / "photo0000.npy")
    assert not np.array_equal(other["pooled"], file["pooled"]), "one is at the end token, the other is projected"


def test_reader_gives_batches_and_the_state_of_the_empty_caption(made):
    root, _ = made
    members = ("json", "vae", "clip_l", "clip_l_pooled", "clip_g_pooled")

    batch = next(iter(ShardDataset(root.shards, 3, members=members, allow_preview=True)))
    empty = ShardSet.open(root.shards, allow_preview=True).empty_caption("clip_g")

    assert (batch["clip_l"].shape, batch["clip_g_pooled"].shape) == ((3, 77, 768), (3, 768))
    assert (empty["hidden"].shape, empty["pooled"].shape) == ((77, 768), (768,))
    assert empty["pooled"].any()


def test_kinds_under_other_names_are_validated_without_the_configuration(root):
    """The shards alone, as a trainer receives them."""
    root.config_file.unlink()
    (shard,) = root.shards.glob("*/shard-*.tar")
    with open(shard, "r+b") as file:
        data = file.read()
        at = data.index(b"clip_g_pooled.npy") + 512 + 128 + 700
        file.seek(at)
        file.write(b"\xff\x7f")  # a NaN

    said = product(root, "validate", shard.parent, code=1)

    assert "clip_g_pooled.npy: NaN or infinity" in said


def test_damaged_file_is_restored_from_its_members(root):
    product(root, "run")  # records the copies
    path = root.derived / "clip_l" / "photo0001.npy"
    good, status = path.read_bytes(), path.stat()
    with open(path, "r+b") as file:
        file.seek(5000)
        file.write(b"damaged!")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))

    assert "photo0001" in product(root, "stage2", "--verify", code=1)
    said = product(root, "run")

    assert path.read_bytes() == good
    assert "1 restored" in said
    assert "0 errors" in product(root, "verify")


def test_sets_packed_again_have_the_same_bytes(root):
    before = {path.name: path.read_bytes() for path in root.shards.glob("*/*") if path.is_file()}

    product(root, "shards", "--overwrite")

    assert {path.name: path.read_bytes() for path in root.shards.glob("*/*") if path.is_file()} == before


def test_edited_caption_changes_both_arrays(root):
    (root.approved / "photo0002.txt").write_text("another caption")
    before = ShardSet.open(root.shards, allow_preview=True)["photo0002"]

    product(root, "run")

    after = ShardSet.open(root.shards, allow_preview=True)["photo0002"]
    assert not any(np.array_equal(before[name], after[name]) for name in ("clip_l", "clip_l_pooled", "clip_g"))
    assert np.array_equal(before["vae"], after["vae"])


def test_lost_ledger_adopts_the_files(root):
    before = {path: path.stat().st_mtime_ns for path in root.derived.glob("clip_*/*.npy")}
    shutil.rmtree(root.path / ".imagemill")

    product(root, "run")

    assert {path: path.stat().st_mtime_ns for path in root.derived.glob("clip_*/*.npy")} == before
    assert "0 errors" in product(root, "verify")


@pytest.mark.parametrize(
    ("kinds", "message"),
    [
        (["vae_latents", "clip_text", "clip_text"], "kinds lists 'clip_text' twice"),
        (["clip_text", {"other": "clip_text"}, {"other": "t5_hidden"}], "kinds lists 'other' twice"),
        ([{"a": "clip_text", "b": "clip_text"}], "kinds has an entry of 2 names"),
        ([{"clip": "clip_txt"}], "unknown embedding kind 'clip_txt' in kinds"),
        ([{"clip_l": "clip_text"}, {"clip_l_pooled": "t5_hidden"}], "member 'clip_l_pooled.npy' belongs to clip_l"),
        ([{"../up": "clip_text"}], "contains characters other than"),
        ([{"latent_statistics": "clip_text"}], "folder 'latent_statistics' belongs to imagemill"),
    ],
)
def test_wrong_list_is_refused_in_one_line_before_any_work(data_root, kinds, message):
    photos(data_root.approved, 1)
    data_root.config_file.write_text(json.dumps({"kinds": kinds}))

    said = product(data_root, "run", code=2)

    assert message in said
    assert "Traceback" not in said
    assert not data_root.derived.exists()


def test_other_layer_is_refused_until_it_is_regenerated(root):
    configure(root, clip_g={"layer": "last", "pooled": "projected"})

    assert "layer" in product(root, "run", code=1)
    product(root, "stage2", "--regenerate", "clip_g")
    product(root, "run")

    assert manifests(root)[0]["provenance"]["clip_g"]["facts"]["layer"] == "last"
    assert "0 errors" in product(root, "verify")


def test_t5_model_is_refused_before_the_first_image_is_opened(root):
    configure(root, clip_g={"model": str(root.path / ".imagemill" / "preview_models" / "t5_hidden")})

    said = product(root, "run", code=1)

    assert "expected 'clip_text_model'" in said
    assert "Traceback" not in said
