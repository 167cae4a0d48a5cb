"""Examples that train models of diffusers: their losses equal those of training with the pipeline's own VAE and text encoder.

A tensor of the right shape and another meaning (unscaled latents, another crop, a wrong mask) gives other losses.
"""

import copy
import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps

from examples import train_pixart
from imagemill.domain.buckets import bucket_size
from imagemill.domain.embedding_specs import VAE
from imagemill.domain.layout import DataRoot
from imagemill.encoders.preview import ensure_preview
from imagemill.reading import ShardDataset
from tests.encoders.test_text_pipelines import WIDTH, save_pipeline
from tests.helpers.product import PROJECT, coco_photos, imagemill

STEPS = 4
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def pipeline(preview_root, tmp_path_factory):
    """A folder with a small text encoder and its tokenizer, as in PixArt's repository; and both."""
    folder = tmp_path_factory.mktemp("pixart")
    return folder, *save_pipeline(folder, preview_root, "text_encoder", "tokenizer")


@pytest.fixture(scope="module")
def root(pipeline, coco128, tmp_path_factory):
    """Shards of 24 photographs with captions in lower case, made with this text encoder."""
    root = DataRoot(tmp_path_factory.mktemp("photos") / "data")
    root.approved.mkdir(parents=True)
    coco_photos(coco128, root.approved)
    for path in sorted(root.approved.glob("*.jpg"))[24:]:
        path.unlink()
        path.with_suffix(".txt").unlink(missing_ok=True)
    text = {"model": str(pipeline[0]), "subfolder": "text_encoder", "tokenizer_subfolder": "tokenizer", "tokens": 120}
    encoders = {"vae_latents": {"size": "bucket"}, "t5_hidden": text}
    root.config_file.write_text(json.dumps({"kinds": ["vae_latents", "t5_hidden"], "encoders": encoders}))
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


@torch.inference_mode()
def encoded(batch, approved, vae, pipeline):
    """Encode the photographs and captions of a batch with the pipeline's own parts."""
    from diffusers import PixArtAlphaPipeline

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
    texts = PixArtAlphaPipeline(pipeline[2], pipeline[1], None, None, None)
    states, mask, _, _ = texts.encode_prompt(
        batch["caption"], do_classifier_free_guidance=False, device="cpu", max_sequence_length=120
    )
    return {"vae": torch.cat(latents), "t5h": states, "t5m": mask}


def test_losses_of_pixart_equal_those_of_the_pipelines_own_encoders(root, pipeline, transformer, preview_root):
    from diffusers import AutoencoderKL

    vae = AutoencoderKL.from_pretrained(ensure_preview(VAE, preview_root), low_cpu_mem_usage=False).eval()
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
