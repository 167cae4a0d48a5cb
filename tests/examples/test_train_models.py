"""Examples that train models of diffusers: their losses equal those of training with the pipeline's own VAE and text encoder.

A tensor of the right shape and another meaning (unscaled latents, another crop, a wrong mask) gives other losses.
"""

import copy
import json
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps

from examples import train_flux_lora, train_pixart, train_sd3
from imagemill.domain.buckets import bucket_size
from imagemill.domain.embedding_specs import VAE
from imagemill.domain.layout import DataRoot
from imagemill.encoders.preview import ensure_preview
from imagemill.reading import ShardDataset
from tests.encoders.test_text_pipelines import WIDTH, save_clip, save_pipeline
from tests.helpers.product import PROJECT, coco_photos, imagemill

STEPS = 2
# The reference opens photographs with Pillow alone.
AS_STORED = {"pixels": {"color": "ignore"}}
ATTENDED = {"tokens": 128, "padding": "attended"}
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def pipeline(preview_root, tmp_path_factory):
    """A folder with a small text encoder and its tokenizer, as in PixArt's repository; and both."""
    folder = tmp_path_factory.mktemp("pixart")
    return folder, *save_pipeline(folder, preview_root, "text_encoder", "tokenizer")


@pytest.fixture(scope="module")
def root(pipeline, coco128, tmp_path_factory):
    """Shards of 12 photographs with captions in lower case, made with this text encoder."""
    root = DataRoot(tmp_path_factory.mktemp("photos") / "data")
    root.approved.mkdir(parents=True)
    coco_photos(coco128, root.approved)
    for path in sorted(root.approved.glob("*.jpg"))[12:]:
        path.unlink()
        path.with_suffix(".txt").unlink(missing_ok=True)
    text = {"model": str(pipeline[0]), "subfolder": "text_encoder", "tokenizer_subfolder": "tokenizer", "tokens": 120}
    encoders = {"vae_latents": {"size": "bucket"}, "t5_hidden": text}
    root.config_file.write_text(json.dumps({"kinds": ["vae_latents", "t5_hidden"], "encoders": encoders, **AS_STORED}))
    done = imagemill("run", "--data-root", root.path)
    assert done.returncode == 0, done.stdout + done.stderr
    return root


@pytest.fixture
def transformer():
    """A small random PixArt transformer whose output depends on the captions by some percent."""
    from diffusers import PixArtTransformer2DModel

    torch.manual_seed(5)
    model = PixArtTransformer2DModel(
        num_attention_heads=2, attention_head_dim=8, in_channels=16, out_channels=32, num_layers=1, cross_attention_dim=16,
        sample_size=64, caption_channels=WIDTH,
    )  # fmt: skip
    with torch.no_grad():
        for values in model.parameters():
            values.mul_(3 if values.dim() > 1 else 1)
    return model


def batches(root):
    dataset = ShardDataset(
        root.shards, 2, members=("json", "vae", "t5h", "t5m"), normalized=True, tail="drop", allow_preview=True
    )
    return [batch for batch, _ in zip(dataset, range(STEPS), strict=False)]


@pytest.fixture(scope="module")
def vae(preview_root):
    from diffusers import AutoencoderKL

    return AutoencoderKL.from_pretrained(ensure_preview(VAE, preview_root), low_cpu_mem_usage=False).eval()


@torch.inference_mode()
def latents_of(batch, approved, vae):
    """Encode the photographs of a batch with the pipeline's own VAE."""
    wide, high = bucket_size(batch["bucket"])
    latents = []
    for image_id in batch["image_id"]:
        image = ImageOps.exif_transpose(Image.open(approved / f"{image_id}.jpg")).convert("RGB")
        box_width = min(image.width, round(image.height * wide / high))
        box_height = min(image.height, round(image.width * high / wide))
        left, top = (image.width - box_width) // 2, (image.height - box_height) // 2
        crop = image.crop((left, top, left + box_width, top + box_height))
        picture = np.array(crop.resize((wide, high), Image.Resampling.LANCZOS, reducing_gap=3.0), np.float32)
        values = torch.from_numpy(picture / 127.5 - 1).permute(2, 0, 1)[None].contiguous()
        latents.append((vae.encode(values).latent_dist.mode() - vae.config.shift_factor) * vae.config.scaling_factor)
    return torch.cat(latents).clone()


@torch.inference_mode()
def encoded(batch, approved, vae, pipeline):
    """Encode the photographs and captions of a batch with the pipeline's own parts."""
    from diffusers import PixArtAlphaPipeline

    texts = PixArtAlphaPipeline(pipeline[2], pipeline[1], None, None, None)
    states, mask, _, _ = texts.encode_prompt(
        batch["caption"], do_classifier_free_guidance=False, device="cpu", max_sequence_length=120
    )
    return {"vae": latents_of(batch, approved, vae), "t5h": states, "t5m": mask}


@pytest.mark.soak
def test_losses_of_pixart_equal_those_of_the_pipelines_own_encoders(root, pipeline, transformer, vae):
    stored = batches(root)
    own = [
        {name: value.clone() for name, value in encoded(one, root.approved, vae, pipeline).items()} for one in stored
    ]

    expected = list(train_pixart.train(own, copy.deepcopy(transformer)))
    losses = list(train_pixart.train(stored, copy.deepcopy(transformer)))

    # Latents and states are stored in float16, whose relative step is 1e-3.
    assert len(losses) == STEPS
    np.testing.assert_allclose(losses, expected, rtol=1e-3)
    wrong = [{**one, "t5h": one["t5h"].roll(1, dims=1)} for one in stored]
    assert not np.allclose(list(train_pixart.train(wrong, copy.deepcopy(transformer))), expected, rtol=1e-3)


def test_pixart_example_runs_from_the_command_line(root, transformer, tmp_path):
    transformer.save_pretrained(tmp_path / "model")
    command = [sys.executable, "examples/train_pixart.py", root.shards, tmp_path / "model", "--steps", "4"]

    refused = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, check=False)
    assert "preview model" in refused.stderr

    command += ["--allow-preview", "--batch-size", "2", "--output", tmp_path / "trained"]
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("loss") == 4
    assert (tmp_path / "trained" / "config.json").is_file()


# ---- FLUX and Stable Diffusion 3


def remade(root, folder, kinds, **encoders):
    """Copy a data root, and make the text states with other encoders; the latents stay."""
    copy_of = DataRoot(folder / "data")
    shutil.copytree(root.path, copy_of.path, symlinks=True)
    encoders = {"vae_latents": {"size": "bucket"}, **encoders}
    copy_of.config_file.write_text(
        json.dumps({"kinds": ["vae_latents", "t5_hidden", *kinds], "encoders": encoders, **AS_STORED})
    )
    for command in (["stage2", "--regenerate", "t5"], ["run"]):
        done = imagemill(*command, "--data-root", copy_of.path)
        assert done.returncode == 0, done.stdout + done.stderr
    assert "vae_latents 0 made" in done.stdout
    return copy_of


def batches_of(root, members):
    dataset = ShardDataset(root.shards, 2, members=("json", *members), normalized=True, tail="drop", allow_preview=True)
    return [batch for batch, _ in zip(dataset, range(STEPS), strict=False)]


def scaled(model):
    """Scale the matrices of a small model, so that its output depends on the captions by some percent."""
    with torch.no_grad():
        for values in model.parameters():
            values.mul_(3 if values.dim() > 1 else 1)
    return model


@pytest.fixture(scope="module")
def flux(root, preview_root, tmp_path_factory):
    """Shards with FLUX's text states, and its pipeline without a transformer."""
    from diffusers import FluxPipeline

    folder = tmp_path_factory.mktemp("flux")
    t5 = save_pipeline(folder, preview_root, "text_encoder_2", "tokenizer_2")
    clip = save_clip(folder, preview_root, "", width=16, projected=False)
    made = remade(
        root, folder, [{"clip_l": "clip_text"}],
        t5_hidden={"model": str(folder), "subfolder": "text_encoder_2", "tokenizer_subfolder": "tokenizer_2", **ATTENDED},
        clip_l={"model": str(folder), "subfolder": "text_encoder", "tokenizer_subfolder": "tokenizer"},
    )  # fmt: skip
    return made, FluxPipeline(None, None, *clip, *t5, None)


@pytest.fixture
def flux_transformer():
    from diffusers import FluxTransformer2DModel

    torch.manual_seed(5)
    return scaled(
        FluxTransformer2DModel(
            num_layers=1, num_single_layers=1, attention_head_dim=8, num_attention_heads=2, joint_attention_dim=WIDTH,
            pooled_projection_dim=16, axes_dims_rope=(2, 2, 4), guidance_embeds=True,
        )
    )  # fmt: skip


def losses_of_flux(batches, transformer):
    transformer = copy.deepcopy(transformer)
    torch.manual_seed(6)  # of the low-rank matrices
    optimizer = torch.optim.AdamW(train_flux_lora.add_lora(transformer, 4), lr=1e-2)
    return list(train_flux_lora.train(batches, transformer, optimizer))


def test_losses_of_a_flux_lora_equal_those_of_the_pipelines_own_encoders(flux, flux_transformer, vae):
    root, pipeline = flux
    stored, own = batches_of(root, ("vae", "t5h", "clip_l_pooled")), []
    for batch in stored:
        with torch.no_grad():
            states, pooled, _ = pipeline.encode_prompt(batch["caption"], None, device="cpu", max_sequence_length=128)
        own.append({"vae": latents_of(batch, root.approved, vae), "t5h": states, "clip_l_pooled": pooled})

    expected, losses = losses_of_flux(own, flux_transformer), losses_of_flux(stored, flux_transformer)

    assert len(losses) == STEPS
    np.testing.assert_allclose(losses, expected, rtol=1e-3)
    for name in ("t5h", "clip_l_pooled"):
        wrong = [{**one, name: one[name].roll(1, dims=-1)} for one in stored]  # the order of tokens has no effect
        assert not np.allclose(losses_of_flux(wrong, flux_transformer), expected, rtol=1e-3), name


def test_flux_lora_example_runs_from_the_command_line(flux, flux_transformer, tmp_path):
    flux_transformer.save_pretrained(tmp_path / "model" / "transformer")
    command = [sys.executable, "examples/train_flux_lora.py", flux[0].shards, tmp_path / "model", "--steps", "4"]
    command += ["--subfolder", "transformer", "--allow-preview", "--output", tmp_path / "lora"]

    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr
    assert done.stdout.count("loss") == 4
    assert (tmp_path / "lora" / "pytorch_lora_weights.safetensors").is_file()


@pytest.fixture(scope="module")
def stable_diffusion(root, preview_root, tmp_path_factory):
    """Shards with the text states of Stable Diffusion 3, and its pipeline without a transformer."""
    from diffusers import StableDiffusion3Pipeline

    folder = tmp_path_factory.mktemp("sd3")
    t5 = save_pipeline(folder, preview_root, "text_encoder_3", "tokenizer_3")
    small = save_clip(folder, preview_root, "", width=16, projected=True)
    large = save_clip(folder, preview_root, "_2", width=20, projected=True, pad="!")
    clip = {"model": str(folder), "layer": "penultimate", "pooled": "projected"}
    made = remade(
        root, folder, [{"clip_l": "clip_text"}, {"clip_g": "clip_text"}],
        t5_hidden={"model": str(folder), "subfolder": "text_encoder_3", "tokenizer_subfolder": "tokenizer_3", **ATTENDED},
        clip_l=clip | {"subfolder": "text_encoder", "tokenizer_subfolder": "tokenizer"},
        clip_g=clip | {"subfolder": "text_encoder_2", "tokenizer_subfolder": "tokenizer_2"},
    )  # fmt: skip
    return made, StableDiffusion3Pipeline(None, None, None, *small, *large, *t5)


@pytest.fixture
def sd3_transformer():
    from diffusers import SD3Transformer2DModel

    torch.manual_seed(5)
    return scaled(
        SD3Transformer2DModel(
            sample_size=64, num_layers=2, attention_head_dim=8, num_attention_heads=2, joint_attention_dim=WIDTH,
            caption_projection_dim=16, pooled_projection_dim=36, pos_embed_max_size=96,
        )
    )  # fmt: skip


def test_losses_of_stable_diffusion_3_equal_those_of_the_pipelines_own_encoders(
    stable_diffusion, sd3_transformer, vae, monkeypatch
):
    root, pipeline = stable_diffusion
    stored, own = batches_of(root, train_sd3.MEMBERS), []
    for batch in stored:
        with torch.no_grad():
            states, _, pooled, _ = pipeline.encode_prompt(
                batch["caption"], None, None, device="cpu", do_classifier_free_guidance=False, max_sequence_length=128
            )
        own.append({"vae": latents_of(batch, root.approved, vae), "own": (states, pooled)})

    losses = list(train_sd3.train(stored, copy.deepcopy(sd3_transformer)))
    wrong = [{**one, "clip_g": one["clip_g"].roll(1, dims=1)} for one in stored]
    of_wrong = list(train_sd3.train(wrong, copy.deepcopy(sd3_transformer)))
    monkeypatch.setattr(train_sd3, "text_states", lambda batch: batch["own"])
    expected = list(train_sd3.train(own, copy.deepcopy(sd3_transformer)))

    assert len(losses) == STEPS
    np.testing.assert_allclose(losses, expected, rtol=1e-3)
    assert not np.allclose(of_wrong, expected, rtol=1e-3)


def test_stable_diffusion_3_example_runs_from_the_command_line(stable_diffusion, sd3_transformer, tmp_path):
    sd3_transformer.save_pretrained(tmp_path / "model")
    command = [sys.executable, "examples/train_sd3.py", stable_diffusion[0].shards, tmp_path / "model", "--steps", "4"]
    command += ["--allow-preview", "--batch-size", "2", "--output", tmp_path / "trained"]

    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr
    assert done.stdout.count("loss") == 4
    assert (tmp_path / "trained" / "config.json").is_file()
