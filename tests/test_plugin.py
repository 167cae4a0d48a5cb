"""Embedding kinds of installed packages: examples/plugin, built as a wheel, and packages with mistakes.

Spec: docs/spec/stage2.md#kinds
"""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from PIL import Image

from imagemill.domain.buckets import bucket_size
from imagemill.formats.jsonl import read_jsonl
from imagemill.reading import ShardDataset, ShardSet
from tests.helpers.product import PROJECT, built_plugin, imagemill, photos

KINDS = ["vae_latents", "t5_hidden", "patch_tokens"]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A folder of packages with the example plug-in."""
    return built_plugin(tmp_path_factory.mktemp("plugin"))


@pytest.fixture
def product(site):
    """Run a command with the plug-in on the search path; return what it prints."""

    def run(root, *arguments, code=0, path=site):
        search = os.pathsep.join(map(str, (PROJECT, path)))
        done = imagemill(*arguments, "--data-root", root.path, PYTHONPATH=search)
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    return run


def configure(root, kinds, **encoders):
    root.config_file.write_text(json.dumps({"kinds": kinds, "encoders": encoders}))


def manifests(root):
    return [json.loads(path.read_text()) for path in root.shards.glob("*/manifest.json")]


def graph(site, root, code):
    """Evaluate an expression over the asset graph of the code location of a data root."""
    program = f"""
import dagster as dg
from dagster_project.definitions import build_definitions
from dagster_project.deployments import local_resources
definitions = build_definitions(local_resources({str(root.path)!r}))
graph = definitions.resolve_asset_graph()
assets = sorted(key.to_user_string() for key in graph.materializable_asset_keys)
checks = sorted(key.name for key in graph.asset_check_keys)
print(({code}))
"""
    environment = {**os.environ, "PYTHONPATH": f"{PROJECT}{os.pathsep}{site}", "IMAGEMILL_DATA_ROOT": str(root.path)}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False, cwd=root.path
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_root_without_dinov3_and_with_a_plug_in_is_complete_packed_and_valid(data_root, product, site):
    photos(data_root.approved, 3)
    configure(data_root, KINDS, patch_tokens={"reduce": 8})

    said = product(data_root, "run")

    assert "patch_tokens 3 made" in said
    assert not (data_root.derived / "dinov3").exists()
    (manifest,) = manifests(data_root)
    assert manifest["members"] == ["json", "vae.npy", "t5h.npy", "patches.npy", "t5m.npy"]
    assert sorted(manifest["provenance"]) == sorted(KINDS)
    assert "0 errors" in product(data_root, "verify")
    assert "nothing to do" in product(data_root, "run")
    assert "patch_tokens 3 done, 0 to do" in product(data_root, "status")
    assert "derived/patch_tokens/photo0000.npy" in product(data_root, "explain", "photo0000")
    members = ("json", "vae", "t5h", "t5m", "patches")
    batch = next(iter(ShardDataset(data_root.shards, 3, members=members, allow_preview=True)))
    wide, high = (side // 8 // 16 for side in bucket_size(batch["bucket"]))
    assert batch["patches"].shape == (3, high, wide, 1024)
    assert "patch_tokens" in (data_root.shards / "README.md").read_text()
    assert graph(
        site, data_root, "'patch_tokens' in assets, 'near_duplicates' in assets, 'latent_statistics' in assets"
    ) == ("(True, False, True)\n")


def test_patch_tokens_equal_those_of_the_model(data_root, product):
    from transformers import DINOv3ViTModel

    photos(data_root.approved, 1)
    configure(data_root, KINDS, patch_tokens={"reduce": 8})
    product(data_root, "run")
    sample = ShardSet.open(data_root.shards, allow_preview=True)["photo0000"]
    wide, high = bucket_size(sample["bucket"])

    record = next(line.value for line in read_jsonl(data_root.stage2_jsonl))
    with Image.open(data_root.approved / "photo0000.jpg") as image:
        box_height = min(image.height, round(image.width * high / wide))
        box_width = min(image.width, round(image.height * wide / high))
        left, top = (image.width - box_width) // 2, (image.height - box_height) // 2
        crop = image.crop((left, top, left + box_width, top + box_height))
    assert (record["width"], record["height"]) == (48, 32)
    picture = crop.resize((wide, high), Image.Resampling.LANCZOS, reducing_gap=3.0)
    picture = picture.resize((wide // 8 // 16 * 16, high // 8 // 16 * 16), Image.Resampling.LANCZOS)
    values = (np.asarray(picture, np.float32) / 255 - [0.485, 0.456, 0.406]) / [0.229, 0.224, 0.225]
    model = DINOv3ViTModel.from_pretrained(data_root.preview_models / "patch_tokens").eval()
    with torch.inference_mode():
        given = torch.from_numpy(values.astype(np.float32)).permute(2, 0, 1)[None]
        tokens = model(pixel_values=given).last_hidden_state[0, 1 + model.config.num_register_tokens :]
    np.testing.assert_allclose(sample["patches"].reshape(-1, 1024), tokens.numpy(), atol=5e-3)


@pytest.mark.soak
def test_setting_of_a_plug_in_is_part_of_its_identity(data_root, product):
    photos(data_root.approved, 1)
    configure(data_root, KINDS, patch_tokens={"reduce": 8})
    product(data_root, "run")
    configure(data_root, KINDS, patch_tokens={"reduce": 4})

    assert "differs in reduce" in product(data_root, "run", code=1)
    product(data_root, "stage2", "--regenerate", "patch-tokens")
    product(data_root, "run")
    assert "0 errors" in product(data_root, "verify")


def test_list_of_kinds_can_change(data_root, product):
    """An added kind is made for every image, a removed one is left out of the shards; its files stay."""
    photos(data_root.approved, 2)
    product(data_root, "run")
    (before,) = manifests(data_root)
    configure(data_root, ["dinov3_npy", *KINDS], patch_tokens={"reduce": 8})
    assert "patch_tokens 2 made" in product(data_root, "stage2", "--pass", "patch-tokens")
    assert manifests(data_root) == [before]

    said = product(data_root, "shards", "--append")
    assert "1 set packed from scratch: the embedding kinds changed" in said
    (added,) = manifests(data_root)
    assert added["members"] == ["json", "dinov3.npy", "vae.npy", "t5h.npy", "patches.npy", "t5m.npy"]

    configure(data_root, ["vae_latents"])
    assert "dinov3" not in product(data_root, "status")
    assert "0 errors" in product(data_root, "validate", *data_root.shards.glob("bucket_*"))
    product(data_root, "run")
    (removed,) = manifests(data_root)
    assert removed["members"] == ["json", "vae.npy", "t5m.npy"]
    assert len(list((data_root.derived / "patch_tokens").glob("*.npy"))) == 2
    assert "0 errors" in product(data_root, "verify")


def test_declaration_imports_no_torch(site):
    program = "import sys, imagemill_patch_tokens; sys.exit(bool({'torch', 'dagster'} & sys.modules.keys()))"
    environment = {**os.environ, "PYTHONPATH": f"{PROJECT}{os.pathsep}{site}"}
    assert subprocess.run([sys.executable, "-c", program], env=environment, check=False).returncode == 0


# ---- mistakes


def test_unknown_kind_is_refused_by_commands_and_a_failing_check_of_the_code_location(data_root, product, site):
    photos(data_root.approved, 1)
    configure(data_root, ["vae_latents", "depth_maps"])

    said = product(data_root, "run", code=2)

    assert said.startswith("imagemill: unknown embedding kind 'depth_maps' in kinds")
    assert "patch_tokens" in said, "the installed kinds are named"
    assert not data_root.derived.exists()
    shown = graph(site, data_root, "assets, checks")
    assert "dinov3_npy" in shown
    assert "kinds_known" in shown


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("replace(OTHER, member='vae.npy')", "member 'vae.npy' belongs to vae_latents"),
        ("replace(OTHER, member='t5m.npy')", "member 't5m.npy' belongs to imagemill"),
        ("replace(OTHER, folder='a/b')", "folder 'a/b' contains characters"),
        ("replace(OTHER, kind='another')", "its entry point is a kind named 'another'"),
        ("1 / 0", "cannot be imported from mistaken: ZeroDivisionError"),
    ],
)
def test_mistake_of_a_package_is_refused_in_one_line(data_root, product, tmp_path, source, message):
    package = tmp_path / "site"
    (package / "mistaken-1.dist-info").mkdir(parents=True)
    (package / "mistaken-1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: mistaken\nVersion: 1\n")
    (package / "mistaken-1.dist-info" / "entry_points.txt").write_text("[imagemill.kinds]\nother = mistaken:KIND\n")
    (package / "mistaken.py").write_text(
        "from dataclasses import replace\nfrom imagemill.domain.embedding_specs import VAE\n"
        "OTHER = replace(VAE, kind='other', pass_name='other', folder='other', member='other.npy')\n"
        f"KIND = {source}\n"
    )
    photos(data_root.approved, 1)
    configure(data_root, ["vae_latents", "other"])

    said = product(data_root, "run", code=2, path=package)

    assert message in said.splitlines()[0]
    assert not data_root.derived.exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("kinds: []", "kinds is empty"),
        ("kinds: [vae_latents]\nnear_duplicates: {exclude: true}", "near_duplicates.exclude compares dinov3_npy"),
        ("kinds: [vae_latents]\nencoders: {dinov3_npy: {batch_size: 2}}", "unknown embedding kind 'dinov3_npy'"),
    ],
)
def test_contradictory_configuration_is_refused(data_root, product, text, message):
    photos(data_root.approved, 1)
    data_root.config_file.write_text(text)

    assert message in product(data_root, "run", code=2)
